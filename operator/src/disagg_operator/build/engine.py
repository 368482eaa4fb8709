"""The StatefulSet of one role in one revision: its engine pods."""

import json
from collections.abc import Callable
from typing import Any

from ..api.transfer import TransferMode, WriteBack
from ..api.types import Colocate, DisaggInferenceSpec, Drain, FabricType, Role, WriteBackMode
from ..config import Settings
from ..naming import (
    CONTROL_PORT,
    HTTP_PORT,
    MAIN_CONTAINER,
    SIDE_CHANNEL_PORT,
    Component,
    Manifest,
    control_secret_name,
    engine_name,
    engines_selector,
    labels,
    selector,
)
from .fabric import fabric_env, fabric_resources, fabric_security
from .model import model_access
from .overlay import strategic_merge, with_labels

CONNECTOR_ROOT = "/disagg"
CONNECTOR_PATH = f"{CONNECTOR_ROOT}/connector"
CONTROL_SECRET_DIR = "/etc/disagg/control"
PRESTOP_SECONDS = 5
"""Between a pod leaving the EndpointSlices and SIGTERM, so that the router has stopped sending: a draining vLLM accepts a
new request and never answers it."""
MIN_READY_SECONDS = 5
"""While pods are replaced in place: the next one goes when routers have had time to hear of the last one."""
EXIT_SECONDS = 15
"""From the end of vLLM's own shutdown time-out to SIGKILL."""
# The connector's names.
_WRITE_BACK_MODES = {
    WriteBackMode.ON_FINISH: "on_finish",
    WriteBackMode.STREAMING: "streaming",
    WriteBackMode.DISABLED: "off",
}

_STARTUP_PERIOD = 2
_LEAST_STARTUP_SECONDS = 300


def build_engines(
    name: str,
    namespace: str,
    spec: DisaggInferenceSpec,
    component: Component,
    revision: str,
    settings: Settings,
) -> Manifest:
    """The StatefulSet. Raises OverlayError if the role's template cannot be merged."""
    role = spec.prefill if component is Component.PREFILL else spec.decode
    full_name = engine_name(name, component, revision)
    all_labels = labels(name, component, revision)
    pod = {
        "metadata": {"labels": all_labels},
        "spec": _pod_spec(name, spec, role, component, revision, settings),
    }
    pod = with_labels(strategic_merge(pod, role.template), all_labels)
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": full_name, "namespace": namespace, "labels": all_labels},
        "spec": {
            "replicas": 0 if spec.suspend else role.fixed_replicas,
            "serviceName": full_name,
            # Engines do not wait for each other; and only so is a pod that never became ready replaced when the
            # template is put right.
            "podManagementPolicy": "Parallel",
            "minReadySeconds": MIN_READY_SECONDS,
            "selector": {"matchLabels": selector(name, component, revision)},
            "template": pod,
        },
    }


def _pod_spec(
    name: str, spec: DisaggInferenceSpec, role: Role, component: Component, revision: str, settings: Settings
) -> Manifest:
    access = model_access(spec.model)
    pod: Manifest = {
        # A Service called vllm would set VLLM_PORT, which vLLM reads as its own.
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": grace_seconds(role.drain),
        # No shareProcessNamespace: with the engine as process 1 its workers die with it, and their GPU memory is free
        # for the restarted one.
        "initContainers": [_connector_container(settings)],
        "containers": [_main_container(spec, role, component, access.argument)],
        "volumes": [
            {"name": "connector", "emptyDir": {}},
            # Rotated keys reach running pods as files; nothing of them is in the template, so no pod restarts.
            {"name": "control", "secret": {"secretName": control_secret_name(name), "optional": False}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _shm_size(spec, role)}},
            {"name": "scratch", "emptyDir": {}},
            *access.volumes,
        ],
    }
    main = pod["containers"][0]
    main["volumeMounts"].extend(access.mounts)
    main["env"] = _environment(spec, [*access.env, *fabric_env(spec)])
    if settings.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": secret} for secret in settings.image_pull_secrets]
    if spec.placement.node_selector:
        pod["nodeSelector"] = dict(spec.placement.node_selector)
    if spec.placement.tolerations:
        pod["tolerations"] = [toleration.to_wire() for toleration in spec.placement.tolerations]
    affinity = _affinity(name, spec, revision)
    if affinity:
        pod["affinity"] = affinity
    return pod


def _connector_container(settings: Settings) -> Manifest:
    """Copies the connector's Python package into the stock image's reach."""
    container: Manifest = {
        "name": "connector",
        "image": settings.connector_image,
        "args": [CONNECTOR_PATH],
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "connector", "mountPath": CONNECTOR_ROOT}],
    }
    if settings.image_pull_policy:
        container["imagePullPolicy"] = settings.image_pull_policy
    return container


def _main_container(spec: DisaggInferenceSpec, role: Role, component: Component, model: str) -> Manifest:
    probe = {"httpGet": {"path": "/health", "port": "http"}}
    startup_seconds = max(_LEAST_STARTUP_SECONDS, spec.rollout.progress_deadline_seconds)
    return {
        "name": MAIN_CONTAINER,
        "image": spec.engine.image,
        "command": ["vllm", "serve"],
        "args": engine_arguments(spec, role, component, model),
        "ports": [
            {"name": "http", "containerPort": HTTP_PORT},
            {"name": "side-channel", "containerPort": SIDE_CHANNEL_PORT},
            {"name": "control", "containerPort": CONTROL_PORT},
        ],
        "resources": _resources(spec, role),
        "securityContext": fabric_security(spec),
        # The port opens when the engine is up, so a refused connection is a model that loads.
        "startupProbe": {
            **probe,
            "periodSeconds": _STARTUP_PERIOD,
            "timeoutSeconds": 5,
            "failureThreshold": startup_seconds // _STARTUP_PERIOD,
        },
        "readinessProbe": {**probe, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 3},
        # /health answers late under load; when the engine has died it answers 500 or not at all.
        "livenessProbe": {**probe, "periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 6},
        "lifecycle": {"preStop": {"sleep": {"seconds": PRESTOP_SECONDS}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "connector", "mountPath": CONNECTOR_ROOT, "readOnly": True},
            {"name": "control", "mountPath": CONTROL_SECRET_DIR, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "scratch", "mountPath": "/tmp"},
        ],
    }


def engine_arguments(spec: DisaggInferenceSpec, role: Role, component: Component, model: str) -> list[str]:
    """The arguments of `vllm serve`: the user's flags, then what fields say. Of two equal flags vLLM takes the later."""
    arguments = [model, *spec.engine.extra_args, *role.extra_args]
    arguments += ["--served-model-name", spec.model.served_name, "--port", str(HTTP_PORT)]
    if spec.model.revision:
        arguments += ["--revision", spec.model.revision]
    parallelism = role.parallelism
    for flag, size in (
        ("--tensor-parallel-size", parallelism.tensor),
        ("--pipeline-parallel-size", parallelism.pipeline),
        ("--data-parallel-size", parallelism.data),
    ):
        if size > 1:
            arguments += [flag, str(size)]
    arguments += ["--shutdown-timeout", str(role.drain.timeout_seconds)]
    if component is Component.PREFILL and spec.kv_transfer.mode is TransferMode.BIDIRECTIONAL_PULL:
        arguments += ["--enable-scale-out"]  # the router asks for a prompt's tokens before prefill reads KV for them
    return [*arguments, "--kv-transfer-config", json.dumps(kv_transfer_config(spec, component))]


def kv_transfer_config(spec: DisaggInferenceSpec, component: Component) -> dict[str, Any]:
    """vLLM's KVTransferConfig for the connector of the mode."""
    connector, extra = _CONNECTORS[spec.kv_transfer.mode](spec, component)
    return {
        **connector,
        # Of the project's connector it is the only policy; vLLM's own would by default fail the request. Another one is
        # refused before anything is built.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {**extra, **spec.kv_transfer.extra_config},
    }


_Rendered = tuple[dict[str, Any], dict[str, Any]]
"""The connector and its extra config."""


def _bidirectional_push(spec: DisaggInferenceSpec, component: Component) -> _Rendered:
    transfer = spec.kv_transfer
    write_back = transfer.effective_write_back or WriteBack()
    connector = {
        "kv_connector": "BidirectionalPushConnector",
        "kv_connector_module_path": "disagg_connector.connector",
        # Both roles load and save: prefill takes what decode writes back.
        "kv_role": "kv_both",
    }
    extra = {
        "role": str(component),
        "backends": _backends(spec),
        "control_port": CONTROL_PORT,
        "control_secret_dir": CONTROL_SECRET_DIR,
        "kv_lease_duration": transfer.lease_seconds,
        # Decode waits for a prompt as long as prefill would keep it; a prefill that is lost shows much sooner.
        "load_timeout_seconds": transfer.lease_seconds,
        "writeback_mode": _WRITE_BACK_MODES[write_back.mode],
        "writeback_min_free_percent": write_back.min_free_percent,
        "writeback_reserve_blocks": write_back.reserve_blocks,
        "max_wait_milliseconds": write_back.max_wait_milliseconds,
    }
    return connector, extra


def _bidirectional_pull(spec: DisaggInferenceSpec, component: Component) -> _Rendered:
    both_ways = {
        "bidirectional_kv_xfer": True,
        "decoder_kv_blocks_ttl": spec.kv_transfer.effective_decode_retention_seconds,
    }
    return {"kv_connector": "NixlConnector", "kv_role": "kv_both"}, {**_one_way(spec), **both_ways}


def _push(spec: DisaggInferenceSpec, component: Component) -> _Rendered:
    # No engine id: one that stays when the engine starts anew would make its peers use the memory of the engine before.
    return {"kv_connector": "NixlPushConnector", "kv_role": _ONE_WAY[component]}, _one_way(spec)


def _pull(spec: DisaggInferenceSpec, component: Component) -> _Rendered:
    return {"kv_connector": "NixlConnector", "kv_role": _ONE_WAY[component]}, _one_way(spec)


def _one_way(spec: DisaggInferenceSpec) -> dict[str, Any]:
    return {"backends": _backends(spec), "kv_lease_duration": spec.kv_transfer.lease_seconds}


def _backends(spec: DisaggInferenceSpec) -> list[str]:
    return [str(spec.backend).upper()]


_ONE_WAY = {Component.PREFILL: "kv_producer", Component.DECODE: "kv_consumer"}
_CONNECTORS: dict[TransferMode, Callable[[DisaggInferenceSpec, Component], _Rendered]] = {
    TransferMode.BIDIRECTIONAL_PUSH: _bidirectional_push,
    TransferMode.BIDIRECTIONAL_PULL: _bidirectional_pull,
    TransferMode.PUSH: _push,
    TransferMode.PULL: _pull,
}


def grace_seconds(drain: Drain) -> int:
    """terminationGracePeriodSeconds: leaving the router's set, finishing turns, exiting."""
    return PRESTOP_SECONDS + drain.timeout_seconds + EXIT_SECONDS


def _environment(spec: DisaggInferenceSpec, profile: list[Manifest]) -> list[Manifest]:
    """The pod's own address first, then what the profile needs, then the user's, which win."""
    base: list[Manifest] = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": str(SIDE_CHANNEL_PORT)},
        {"name": "PYTHONPATH", "value": CONNECTOR_PATH},
        {"name": "HOME", "value": "/tmp"},
        *profile,
    ]
    variables = {variable["name"]: variable for variable in base}
    for variable in spec.engine.env:
        wire = variable.to_wire()
        if variable.name == "PYTHONPATH" and variable.value:
            wire["value"] = f"{CONNECTOR_PATH}:{variable.value}"  # without the connector there is no engine
        variables[variable.name] = wire
    return list(variables.values())


def _resources(spec: DisaggInferenceSpec, role: Role) -> Manifest:
    derived = fabric_resources(spec, role)
    requests = {**role.resources.requests, **derived}
    limits = {**role.resources.limits, **derived}
    if "hugepages-2Mi" in derived and not {"cpu", "memory"} & {*requests, *limits}:
        requests["cpu"] = "1"  # Kubernetes refuses hugepages without a request for cpu or memory
    resources = {"requests": requests, "limits": limits}
    return {key: value for key, value in resources.items() if value}


def _shm_size(spec: DisaggInferenceSpec, role: Role) -> str:
    return f"{8 * role.parallelism.devices}Gi" if spec.uses_gpus else "2Gi"


def _affinity(name: str, spec: DisaggInferenceSpec, revision: str) -> Manifest | None:
    """Prefill and decode of one revision in one topology domain; another revision may have another."""
    colocate = spec.placement.colocate
    if colocate is Colocate.AUTO:
        colocate = Colocate.REQUIRED if spec.fabric.type is FabricType.EFA else Colocate.PREFERRED
    if colocate is Colocate.NONE:
        return None
    both_roles = {"matchLabels": engines_selector(name, revision)}
    term = {"topologyKey": spec.placement.topology_key, "labelSelector": both_roles}
    if colocate is Colocate.REQUIRED:
        return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    weighted = {"weight": 100, "podAffinityTerm": term}
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [weighted]}}
