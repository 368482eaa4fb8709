"""The router: its Deployment, and the ConfigMap with what it needs to know (docs/wire-contract.md, section 5)."""

import hashlib
import json
from dataclasses import dataclass

from ..api.transfer import TransferMode
from ..api.types import DisaggInferenceSpec, LocalPrefillMode
from ..config import Settings
from ..naming import (
    ADMIN_PORT,
    ANNOTATION_CONFIG,
    CONTROL_KEYS,
    CONTROL_PORT,
    HTTP_PORT,
    MAIN_CONTAINER,
    Component,
    Manifest,
    control_secret_name,
    labels,
    role_name,
    selector,
)
from .overlay import strategic_merge, with_labels

CONFIG_DIRECTORY = "/etc/disagg"
CONFIG_FILE = "router.json"
KEYS_DIRECTORY = "/etc/disagg-keys"
KEYS_FILE = "api-keys"
TLS_DIRECTORY = "/etc/disagg-tls"
TLS_CERTIFICATE = "tls.crt"
"""With the next, the keys of every Secret of type kubernetes.io/tls."""
TLS_KEY = "tls.key"
SECRETS_DIRECTORY = "/etc/disagg-secrets"
MIN_READY_SECONDS = 5
"""An old router goes when its successor has been in the Service's endpoints for a while."""
DRAIN_DELAY_SECONDS = 5
"""How long the router serves on after SIGTERM, until nobody sends it new connections any more."""
GRACE_SECONDS = 120
"""How long answers under way may take after that."""
EXIT_SECONDS = 10
"""From then to SIGKILL."""


def router_config(name: str, namespace: str, spec: DisaggInferenceSpec) -> Manifest:
    """The content of router.json, version 1."""
    router, retention = spec.router, spec.kv_transfer.effective_decode_retention_seconds
    config: Manifest = {
        "version": 1,
        "namespace": namespace,
        "name": name,
        "model": {"name": spec.model.served_name},
        "mode": str(spec.kv_transfer.mode),
        **({} if retention is None else {"decodeRetentionSeconds": retention}),
        "ports": {"http": HTTP_PORT, "admin": ADMIN_PORT, "engine": HTTP_PORT, "control": CONTROL_PORT},
        "policy": str(router.policy.type),
        "session": {"keys": list(router.session.keys), "bodyFields": list(router.session.body_fields)},
        "deadlines": router.deadlines.to_wire(),
        "limits": router.limits.to_wire(),
        "overload": router.overload.to_wire(),
    }
    if router.local_prefill.mode is not LocalPrefillMode.DISABLED:
        config["localPrefill"] = router.local_prefill.to_wire()
    if _replicas_share(spec):
        config["handles"] = {"secretDir": SECRETS_DIRECTORY}
    if router.auth:
        config["auth"] = {"apiKeysFile": f"{KEYS_DIRECTORY}/{KEYS_FILE}"}
    if router.tls:
        config["tls"] = {
            "certificateFile": f"{TLS_DIRECTORY}/{TLS_CERTIFICATE}",
            "keyFile": f"{TLS_DIRECTORY}/{TLS_KEY}",
        }
    if router.tracing:
        config["tracing"] = {"endpoint": router.tracing.endpoint}
    return config


def _replicas_share(spec: DisaggInferenceSpec) -> bool:
    """Whether replicas keep for each other what decode hands back, which it does in one mode."""
    return spec.kv_transfer.mode is TransferMode.BIDIRECTIONAL_PULL


def build_router_config(name: str, namespace: str, spec: DisaggInferenceSpec) -> Manifest:
    """The ConfigMap."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": role_name(name, Component.ROUTER),
            "namespace": namespace,
            "labels": labels(name, Component.ROUTER),
        },
        "data": {CONFIG_FILE: json.dumps(router_config(name, namespace, spec), indent=1)},
    }


def build_router(name: str, namespace: str, spec: DisaggInferenceSpec, config: Manifest, settings: Settings) -> Manifest:
    """The Deployment; `config` is the ConfigMap, whose hash rolls the pods when it changes.

    Raises OverlayError if the router's template cannot be merged.
    """
    all_labels = labels(name, Component.ROUTER)
    digest = hashlib.sha256(json.dumps(config["data"], sort_keys=True).encode()).hexdigest()[:16]
    pod = {
        "metadata": {"labels": all_labels, "annotations": {ANNOTATION_CONFIG: digest}},
        "spec": _pod_spec(name, spec, settings),
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": role_name(name, Component.ROUTER), "namespace": namespace, "labels": all_labels},
        "spec": {
            "replicas": 0 if spec.suspend else spec.router.replicas,
            "minReadySeconds": MIN_READY_SECONDS,
            "selector": {"matchLabels": selector(name, Component.ROUTER)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": with_labels(strategic_merge(pod, spec.router.template), all_labels),
        },
    }


@dataclass(frozen=True, slots=True)
class _Mounted:
    """A Secret that the router reads from a folder.

    A folder, not single files: the kubelet exchanges a folder when the Secret changes. Without the Secret or a key of it no pod
    starts, so that a mistake never opens the door.
    """

    volume: str
    directory: str
    secret_name: str
    files: dict[str, str]
    """Names of files, by keys of the Secret."""

    @property
    def source(self) -> Manifest:
        items = [{"key": key, "path": file} for key, file in self.files.items()]
        return {"secretName": self.secret_name, "items": items, "optional": False}


def _secrets(name: str, spec: DisaggInferenceSpec) -> list[_Mounted]:
    found, router = [], spec.router
    if router.auth:
        ref = router.auth.api_key_secret_ref
        found.append(_Mounted("api-keys", KEYS_DIRECTORY, ref.name, {ref.key: KEYS_FILE}))
    if router.tls:
        files = {name: name for name in (TLS_CERTIFICATE, TLS_KEY)}
        found.append(_Mounted("tls", TLS_DIRECTORY, router.tls.secret_name, files))
    if _replicas_share(spec):
        # The engines of this mode mount it too and use it for nothing.
        files = {key: key for key in CONTROL_KEYS}
        found.append(_Mounted("replicas", SECRETS_DIRECTORY, control_secret_name(name), files))
    return found


def _pod_spec(name: str, spec: DisaggInferenceSpec, settings: Settings) -> Manifest:
    full_name = role_name(name, Component.ROUTER)
    spread = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": selector(name, Component.ROUTER)}}
    pod: Manifest = {
        "serviceAccountName": full_name,
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        # As process 1 of its own namespace the router would not get a SIGTERM that comes before its handler is set: a pod
        # deleted while it starts would sit out the whole grace period.
        "shareProcessNamespace": True,
        "terminationGracePeriodSeconds": DRAIN_DELAY_SECONDS + GRACE_SECONDS + EXIT_SECONDS,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "affinity": {
            "podAntiAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": spread}]
            }
        },
        "containers": [_container(name, spec, settings)],
        "volumes": [
            {"name": "config", "configMap": {"name": full_name}},
            *({"name": mounted.volume, "secret": mounted.source} for mounted in _secrets(name, spec)),
        ],
    }
    if settings.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": secret} for secret in settings.image_pull_secrets]
    return pod


def _container(name: str, spec: DisaggInferenceSpec, settings: Settings) -> Manifest:
    container: Manifest = {
        "name": MAIN_CONTAINER,
        "image": settings.router_image,
        "args": [
            f"--config={CONFIG_DIRECTORY}/{CONFIG_FILE}",
            f"--drain-delay={DRAIN_DELAY_SECONDS}",
            f"--grace={GRACE_SECONDS}",
        ],
        "ports": [
            {"name": "http", "containerPort": HTTP_PORT},
            {"name": "admin", "containerPort": ADMIN_PORT},
        ],
        "startupProbe": _probe("/healthz", period=1, failures=60),
        "readinessProbe": _probe("/readyz", period=2, failures=2),
        "livenessProbe": _probe("/healthz", period=10, failures=6),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG_DIRECTORY, "readOnly": True},
            *(
                {"name": mounted.volume, "mountPath": mounted.directory, "readOnly": True}
                for mounted in _secrets(name, spec)
            ),
        ],
    }
    if _replicas_share(spec):
        container["args"].append("--name=$(POD_NAME)")
        container["env"] = [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]
    resources = spec.router.resources.to_wire()
    resources = {key: value for key, value in resources.items() if value}
    if resources:
        container["resources"] = resources
    if settings.image_pull_policy:
        container["imagePullPolicy"] = settings.image_pull_policy
    return container


def _probe(path: str, *, period: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": "admin"},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
