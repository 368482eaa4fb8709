"""A real Kubernetes API server without nodes: etcd and kube-apiserver as plain processes on loopback.

Enough for everything that happens at the API: admission of our manifests by schema and CEL, defaults, server-side apply,
RBAC, `helm install`. No controller runs, so nothing becomes of what is applied. Ready in a few seconds.

    with api_server(folder) as server:
        server.kubectl("apply", "-f", "manifest.yaml")
"""

import json
import secrets
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from e2e.cluster import binaries
from e2e.cluster.errors import CommandError, DaemonDied
from e2e.cluster.kubectl import ask_patiently
from e2e.cluster.layout import REPOSITORY
from e2e.cluster.progress import Progress
from e2e.cluster.shell import Answer, wait_until
from e2e.ports import free_port

PROGRAMS = ("etcd", "kube-apiserver", "kubectl")
_CRDS = REPOSITORY / "crds"
_READY_LIMIT_SECONDS = 300.0
_STOP_LIMIT_SECONDS = 60.0


@dataclass(frozen=True)
class ApiServer:
    """A running API server and how to talk to it as its administrator."""

    kubeconfig: Path
    kubectl_path: Path

    def kubectl(self, *arguments: str, stdin: str | None = None, limit: float = 180.0) -> Answer:
        """Runs kubectl; a failure is an answer, not an exception."""
        command = [str(self.kubectl_path), "--kubeconfig", str(self.kubeconfig), *arguments]
        return ask_patiently(command, "Asking the API server", stdin=stdin, timeout=limit)

    def apply(self, manifest: Mapping[str, object] | str, *options: str) -> Answer:
        """`kubectl apply` of one manifest, given as an object or as YAML."""
        text = manifest if isinstance(manifest, str) else json.dumps(dict(manifest))
        return self.kubectl("apply", "-f", "-", *options, stdin=text)

    def install_crds(self) -> None:
        """Apply this project's CRDs and return when kubectl finds their kinds, which is a moment after they are established.

        Raises:
            CommandError, WaitTimeoutError: they are refused, or not served in time.
        """
        self._do("apply", "--server-side", "-f", str(_CRDS))
        self._do("wait", "--for=condition=Established", "crd", "--all", "--timeout=180s")
        for path in _CRDS.glob("*.yaml"):
            plural = yaml.safe_load(path.read_text())["spec"]["names"]["plural"]
            wait_until(
                partial(self._tells_of, plural),
                f"the API server to tell of {plural}",
                limit=_READY_LIMIT_SECONDS,
            )

    def _tells_of(self, plural: str) -> bool:
        return self.kubectl("get", plural).ok and self.kubectl("explain", f"{plural}.spec").ok

    def _do(self, *arguments: str) -> None:
        answer = self.kubectl(*arguments)
        if not answer.ok:
            raise CommandError(
                "Preparing the API server", ["kubectl", *arguments], answer.code, answer.stderr
            )


@contextmanager
def api_server(folder: Path) -> Iterator[ApiServer]:
    """Runs etcd and kube-apiserver until the block ends; data, certificates and logs go to `folder`.

    Raises:
        ClusterError: a program cannot be built, ended by itself, or was not ready in time; logs are in `folder`.
    """
    paths = binaries.ensure(PROGRAMS, Progress())
    client_port, peer_port, port = (free_port() for _ in range(3))
    etcd_url, peer_url = f"http://127.0.0.1:{client_port}", f"http://127.0.0.1:{peer_port}"
    token = _credentials(folder)
    etcd_command: list[str | Path] = [
        paths["etcd"],
        "--name=test",
        f"--data-dir={folder / 'etcd'}",
        "--unsafe-no-fsync",
    ]
    etcd_command += [f"--listen-client-urls={etcd_url}", f"--advertise-client-urls={etcd_url}"]
    etcd_command += [f"--listen-peer-urls={peer_url}", f"--initial-advertise-peer-urls={peer_url}"]
    etcd_command += [f"--initial-cluster=test={peer_url}"]
    server_command: list[str | Path] = [
        paths["kube-apiserver"],
        f"--etcd-servers={etcd_url}",
        "--bind-address=127.0.0.1",
    ]
    server_command += [f"--secure-port={port}", f"--cert-dir={folder / 'certs'}", "--authorization-mode=RBAC"]
    server_command += [
        f"--token-auth-file={folder / 'tokens.csv'}",
        "--service-cluster-ip-range=10.96.0.0/16",
    ]
    server_command += [
        f"--service-account-{use}-file={folder / 'service-accounts.key'}" for use in ("key", "signing-key")
    ]
    server_command += [
        "--service-account-issuer=https://kubernetes.default.svc",
        "--enable-priority-and-fairness=false",
    ]
    with ExitStack() as stack:
        etcd = stack.enter_context(_process(etcd_command, folder / "etcd.log"))
        server = stack.enter_context(_process(server_command, folder / "kube-apiserver.log"))
        certificate = folder / "certs" / "apiserver.crt"
        wait_until(
            lambda: (
                _alive(etcd, folder / "etcd.log")
                and _alive(server, folder / "kube-apiserver.log")
                and _is_ready(port, certificate, token)
            ),
            f"kube-apiserver on 127.0.0.1:{port} to be ready (logs in {folder})",
            limit=_READY_LIMIT_SECONDS,
        )
        kubeconfig = folder / "kubeconfig"
        kubeconfig.write_text(yaml.safe_dump(_kubeconfig(port, certificate, token)))
        running = ApiServer(kubeconfig, paths["kubectl"])
        # Made after the server says that it is ready, and by it.
        running._do("wait", "--for=create", "namespace/default", "--timeout=180s")
        yield running


def _credentials(folder: Path) -> str:
    """Writes an administrator's token and the key of service accounts; returns the token."""
    folder.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(16)
    (folder / "tokens.csv").write_text(f'{token},admin,admin,"system:masters"\n')
    key = ec.generate_private_key(ec.SECP256R1())
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    (folder / "service-accounts.key").write_bytes(pem)
    return token


def _kubeconfig(port: int, certificate: Path, token: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
        "users": [{"name": "admin", "user": {"token": token}}],
        "clusters": [
            {
                "name": "test",
                "cluster": {"server": f"https://127.0.0.1:{port}", "certificate-authority": str(certificate)},
            }
        ],
    }


@contextmanager
def _process(command: list[str | Path], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a daemon until the block ends."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(word) for word in command], stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(_STOP_LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _alive(process: subprocess.Popen[bytes], log: Path) -> bool:
    if process.poll() is None:
        return True
    last = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
    raise DaemonDied(f"{log.stem} ended with status {process.returncode}; the last lines of {log}:\n{last}")


def _is_ready(port: int, certificate: Path, token: str) -> bool:
    if not certificate.exists():
        return False
    request = urllib.request.Request(
        f"https://127.0.0.1:{port}/readyz", headers={"Authorization": f"Bearer {token}"}
    )
    try:
        context = ssl.create_default_context(cafile=str(certificate))
        with urllib.request.urlopen(request, timeout=30, context=context) as response:
            return int(response.status) == 200
    except (OSError, ssl.SSLError):  # not listening yet, or not ready (urllib's HTTPError is an OSError)
        return False
