"""etcd, the API server, the controller manager, the scheduler and DNS, in one network namespace."""

import ssl
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster import dns
from e2e.cluster.daemons import Daemon, Daemons, require_alive
from e2e.cluster.kubectl import Kubectl
from e2e.cluster.layout import Layout
from e2e.cluster.network import Network
from e2e.cluster.pki import API_PORT
from e2e.cluster.shell import Word, wait_until

_ETCD = "http://127.0.0.1:2379"
_READY_LIMIT_SECONDS = 300.0
# The default of 20 requests a second is what one would measure in a test with hundreds of objects.
_CLIENT_RATE = ("--kube-api-qps=300", "--kube-api-burst=500")


def start_api_server(
    layout: Layout, network: Network, programs: Mapping[str, Path], daemons: Daemons
) -> None:
    """Start etcd and the API server, and wait until the latter is ready."""
    ns = layout.control_plane_netns
    (layout.data / "etcd").mkdir(parents=True, exist_ok=True, mode=0o700)
    etcd = daemons.start("etcd", ns, [programs["etcd"], *_etcd_flags(layout)])
    api_server = daemons.start(
        "kube-apiserver", ns, [programs["kube-apiserver"], *_api_server_flags(layout, network)]
    )

    def ready() -> bool:
        require_alive(etcd, api_server)
        return is_ready(layout, network)

    wait_until(
        ready,
        f"the API server to be ready (its log is {api_server.log})",
        limit=_READY_LIMIT_SECONDS,
        every=0.05,
    )


def is_ready(layout: Layout, network: Network) -> bool:
    """Whether the API server says that it is ready."""
    try:
        trust = ssl.create_default_context(cafile=str(layout.pki / "ca.crt"))
        url = f"https://{network.control_plane}:{API_PORT}/readyz"
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trust)
        )
        with opener.open(url, timeout=10) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def start_controllers(
    layout: Layout, network: Network, programs: Mapping[str, Path], daemons: Daemons
) -> None:
    """Start the controller manager, the scheduler and DNS, and give everyone the rights kubeadm would have given."""
    ns = layout.control_plane_netns
    manager: list[Word] = [programs["kube-controller-manager"], *_controller_manager_flags(layout)]
    scheduler: list[Word] = [programs["kube-scheduler"], *_client_flags(layout, "scheduler"), *_CLIENT_RATE]
    daemons.start("kube-controller-manager", ns, manager)
    daemons.start("kube-scheduler", ns, scheduler)
    kubectl = Kubectl(programs["kubectl"], layout.client_config("super-admin"), layout.control_plane_netns)
    limit = int(_READY_LIMIT_SECONDS)
    kubectl(  # the API server makes it after it has said that it is ready
        *("wait", "--for=create", "namespace/kube-system", f"--timeout={limit}s"),
        doing="Waiting for the first namespaces",
        timeout=limit + 10,
    )
    bootstrap = yaml.safe_dump_all([*_role_bindings(), *dns.manifests(network)])
    kubectl.apply(bootstrap, "Giving the components their rights")
    daemons.start("coredns", ns, dns.command(programs["coredns"], layout, network))


def wait_for_controllers(
    layout: Layout, network: Network, programs: Mapping[str, Path], daemons: Daemons
) -> None:
    """Wait until pods can be created (the default ServiceAccount exists) and names resolve."""
    kubectl = Kubectl(programs["kubectl"], layout.client_config("super-admin"), layout.control_plane_netns)
    limit = int(_READY_LIMIT_SECONDS)
    kubectl(
        "wait",
        "--for=create",
        "serviceaccount/default",
        f"--timeout={limit}s",
        doing="Waiting for the controller manager",
        timeout=limit + 10,
    )
    own = [daemon for name in ("coredns", "kube-scheduler") if (daemon := daemons.named(name))]

    def answers() -> bool:
        require_alive(*own)
        return _dns_is_ready(network)

    wait_until(answers, "CoreDNS to be ready", limit=_READY_LIMIT_SECONDS, every=0.05)


def start_service_proxy(layout: Layout, programs: Mapping[str, Path], daemons: Daemons) -> None:
    """Start a kube-proxy that lets the API server (webhooks) and the host reach Services. Needs node 1: it borrows its
    name, since a kube-proxy wants a Node."""
    config = layout.node(1).run / "kube-proxy.yaml"
    daemons.start("kube-proxy", layout.control_plane_netns, [programs["kube-proxy"], f"--config={config}"])


def components(daemons: Daemons) -> list[Daemon]:
    """The control plane's daemons."""
    names = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "coredns")
    return [daemon for name in names if (daemon := daemons.named(name))]


def _dns_is_ready(network: Network) -> bool:
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://{network.control_plane}:{dns.READY_PORT}/ready", timeout=10) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _etcd_flags(layout: Layout) -> list[str]:
    return [
        f"--data-dir={layout.data / 'etcd'}",
        "--unsafe-no-fsync",
        f"--listen-client-urls={_ETCD}",
        f"--advertise-client-urls={_ETCD}",
        "--listen-peer-urls=http://127.0.0.1:2380",
    ]


def _api_server_flags(layout: Layout, network: Network) -> list[str]:
    pki = layout.pki
    return [
        f"--etcd-servers={_ETCD}",
        f"--advertise-address={network.control_plane}",
        f"--secure-port={API_PORT}",
        f"--service-cluster-ip-range={network.services}",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        f"--client-ca-file={pki}/ca.crt",
        f"--kubelet-client-certificate={pki}/apiserver-kubelet-client.crt",
        f"--kubelet-client-key={pki}/apiserver-kubelet-client.key",
        "--kubelet-preferred-address-types=InternalIP",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={pki}/sa.pub",
        f"--service-account-signing-key-file={pki}/sa.key",
        f"--requestheader-client-ca-file={pki}/front-proxy-ca.crt",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-username-headers=X-Remote-User",
        f"--proxy-client-cert-file={pki}/front-proxy-client.crt",
        f"--proxy-client-key-file={pki}/front-proxy-client.key",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
    ]


def _controller_manager_flags(layout: Layout) -> list[str]:
    pki = layout.pki
    return [
        *_client_flags(layout, "controller-manager"),
        *_CLIENT_RATE,
        "--use-service-account-credentials",
        f"--root-ca-file={pki}/ca.crt",
        f"--client-ca-file={pki}/ca.crt",
        f"--service-account-private-key-file={pki}/sa.key",
        f"--cluster-signing-cert-file={pki}/ca.crt",
        f"--cluster-signing-key-file={pki}/ca.key",
        "--concurrent-statefulset-syncs=20",
        "--concurrent-service-endpoint-syncs=20",
        # No node is ever lost here. One that is late, on a machine that builds or starts engines, is not to look like it.
        "--node-monitor-grace-period=600s",
    ]


def _client_flags(layout: Layout, user: str) -> list[str]:
    config = layout.client_config(user)
    return [
        f"--kubeconfig={config}",
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
    ]


def _role_bindings() -> list[dict[str, Any]]:
    def binding(name: str, role: str, kind: str, subject: str) -> dict[str, Any]:
        api_group = "rbac.authorization.k8s.io"
        return {
            "apiVersion": f"{api_group}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": name},
            "roleRef": {"apiGroup": api_group, "kind": "ClusterRole", "name": role},
            "subjects": [{"apiGroup": api_group, "kind": kind, "name": subject}],
        }

    return [
        binding("kubeadm:cluster-admins", "cluster-admin", "Group", "kubeadm:cluster-admins"),
        # Without it exec and logs are forbidden.
        binding("disagg:kubelet-client", "system:kubelet-api-admin", "User", "kube-apiserver-kubelet-client"),
        binding("disagg:coredns", "disagg:coredns", "User", "system:coredns"),
    ]
