"""Engine pods: what of the spec becomes what of the pod."""

import json
from typing import Any

import pytest
from operator_world import SETTINGS, parsed_spec

from disagg_operator.build.engine import build_engines
from disagg_operator.build.overlay import OverlayError
from disagg_operator.naming import ENGINES, Component

GPU = {"tensor": 8}


def stateful_set(component: Component = Component.PREFILL, **changes: Any) -> Any:
    return build_engines("demo", "default", parsed_spec(**changes), component, "0123abcd", SETTINGS)


def pod(component: Component = Component.PREFILL, **changes: Any) -> Any:
    return stateful_set(component, **changes)["spec"]["template"]["spec"]


def main(component: Component = Component.PREFILL, **changes: Any) -> Any:
    return pod(component, **changes)["containers"][0]


def env(**changes: Any) -> dict[str, Any]:
    return {v["name"]: v.get("value", v.get("valueFrom")) for v in main(**changes)["env"]}


def arguments(component: Component = Component.PREFILL, **changes: Any) -> list[str]:
    found: list[str] = main(component, **changes)["args"]
    return found


def transfer_config(component: Component = Component.PREFILL, **changes: Any) -> Any:
    args = arguments(component, **changes)
    return json.loads(args[args.index("--kv-transfer-config") + 1])


def test_the_command_line() -> None:
    spec = {
        "model": {"uri": "hf://org/model", "revision": "abc", "name": "served"},
        "engine": {"image": "vllm:1", "extraArgs": ["--max-model-len", "4096"]},
        "prefill": {"parallelism": GPU, "extraArgs": ["--max-num-seqs=4"], "drain": {"timeoutSeconds": 33}},
    }
    args = arguments(**spec)
    at = args.index("--kv-transfer-config")
    assert main(**spec)["command"] == ["vllm", "serve"]
    assert " ".join(args[:at]) == (
        "org/model --max-model-len 4096 --max-num-seqs=4 --served-model-name served --port 8000 --revision abc "
        "--tensor-parallel-size 8 --shutdown-timeout 33"
    ), "of two equal flags the later one wins: the role's over the engine's, the operator's over both"
    assert at == len(args) - 2


def test_the_connector_is_configured_from_the_api() -> None:
    transfer = {
        "leaseSeconds": 77,
        "writeBack": {"mode": "Disabled", "reserveBlocks": 5, "minFreePercent": 20, "maxWaitMilliseconds": 0},
        "extraConfig": {"load_timeout_seconds": 9},
    }
    assert transfer_config(Component.DECODE, kvTransfer=transfer) == {
        "kv_connector": "BidirectionalPushConnector",
        "kv_connector_module_path": "disagg_connector.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "role": "decode",
            "backends": ["UCX"],
            "control_port": 5700,
            "control_secret_dir": "/etc/disagg/control",
            "kv_lease_duration": 77,
            "writeback_mode": "off",
            "writeback_min_free_percent": 20,
            "writeback_reserve_blocks": 5,
            "max_wait_milliseconds": 0,
            "load_timeout_seconds": 9,
        },
    }


@pytest.mark.parametrize(
    ("mode", "connector", "roles", "extra"),
    [
        ("Pull", "NixlConnector", ("kv_producer", "kv_consumer"), {}),
        ("Push", "NixlPushConnector", ("kv_producer", "kv_consumer"), {}),
        (
            "BidirectionalPull",
            "NixlConnector",
            ("kv_both", "kv_both"),
            {"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": 480},
        ),
    ],
)
def test_vllms_own_connectors_are_configured_from_the_api(
    mode: str, connector: str, roles: tuple[str, str], extra: dict[str, Any]
) -> None:
    transfer = {"mode": mode, "leaseSeconds": 77, "extraConfig": {"num_threads": 2}}
    for component, role in zip((Component.PREFILL, Component.DECODE), roles, strict=True):
        assert transfer_config(component, kvTransfer=transfer) == {
            "kv_connector": connector,
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "backends": ["UCX"],
                "kv_lease_duration": 77,
                **extra,
                "num_threads": 2,
            },
        }


def test_decode_keeps_kv_for_as_long_as_the_api_says() -> None:
    config = transfer_config(kvTransfer={"mode": "BidirectionalPull", "decodeRetentionSeconds": 60})
    assert config["kv_connector_extra_config"]["decoder_kv_blocks_ttl"] == 60


@pytest.mark.parametrize("mode", ["BidirectionalPush", "BidirectionalPull", "Push", "Pull"])
def test_prefill_tells_a_prompts_tokens_where_the_router_asks_for_them(mode: str) -> None:
    asked = {role: "--enable-scale-out" in arguments(role, kvTransfer={"mode": mode}) for role in ENGINES}
    assert asked == {Component.PREFILL: mode == "BidirectionalPull", Component.DECODE: False}


@pytest.mark.parametrize("component", [Component.PREFILL, Component.DECODE])
def test_both_roles_find_the_keys_where_they_are_told_to_look(component: Component) -> None:
    engines = pod(component)
    volume = next(volume for volume in engines["volumes"] if volume["name"] == "control")
    assert volume["secret"] == {"secretName": "demo-control", "optional": False}
    mount = next(mount for mount in engines["containers"][0]["volumeMounts"] if mount["name"] == "control")
    assert mount["readOnly"] is True
    extra = transfer_config(component)["kv_connector_extra_config"]
    assert extra["control_secret_dir"] == mount["mountPath"]


def test_defaults_recompute_and_write_back() -> None:
    config = transfer_config()
    assert config["kv_load_failure_policy"] == "recompute", "vLLM's own default would fail the request"
    assert config["kv_connector_extra_config"]["writeback_mode"] == "on_finish"
    assert config["kv_connector_extra_config"]["role"] == "prefill"


@pytest.mark.parametrize(
    ("model", "argument", "volume", "mount"),
    [
        ({"uri": "hf://org/model"}, "org/model", None, None),
        (
            {"uri": "hf://org/model", "storage": {"type": "PVC", "claimName": "cache"}},
            "org/model",
            {"persistentVolumeClaim": {"claimName": "cache"}},
            {"mountPath": "/models"},
        ),
        (
            {"uri": "pvc://weights/llama/8b"},
            "/models/llama/8b",
            {"persistentVolumeClaim": {"claimName": "weights", "readOnly": True}},
            {"mountPath": "/models", "readOnly": True},
        ),
        (
            {"uri": "pvc://weights"},
            "/models",
            {"persistentVolumeClaim": {"claimName": "weights", "readOnly": True}},
            {"mountPath": "/models", "readOnly": True},
        ),
        (
            {"uri": "file:///models/a", "storage": {"type": "HostPath", "path": "/data"}},
            "/models/a",
            {"hostPath": {"path": "/data", "type": "Directory"}},
            {"mountPath": "/models", "readOnly": True},
        ),
        ({"uri": "file:///in/the/image"}, "/in/the/image", None, None),
    ],
    ids=str,
)
def test_where_the_model_is(model: dict[str, Any], argument: str, volume: Any, mount: Any) -> None:
    rendered = pod(model=model)
    assert rendered["containers"][0]["args"][0] == argument
    volumes = [v for v in rendered["volumes"] if v["name"] == "model"]
    mounts = [m for m in rendered["containers"][0]["volumeMounts"] if m["name"] == "model"]
    assert volumes == ([{"name": "model", **volume}] if volume else [])
    assert mounts == ([{"name": "model", **mount}] if mount else [])


def test_a_hub_model_has_a_writable_cache_and_a_token() -> None:
    model = {
        "uri": "hf://org/model",
        "secretRef": {"name": "hub", "key": "token"},
        "storage": {"type": "HostPath", "path": "/cache", "mountPath": "/hf"},
    }
    variables = env(model=model)
    assert variables["HF_HOME"] == "/hf"
    assert variables["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert "HF_HUB_OFFLINE" not in variables
    assert env()["HF_HOME"].startswith("/tmp/"), "without storage it lies in the pod's own disk"


def test_a_local_model_asks_no_hub() -> None:
    assert env(model={"uri": "pvc://weights/a"})["HF_HUB_OFFLINE"] == "1"


def test_tp8_on_efa_as_on_p5en() -> None:
    spec = {
        "prefill": {"parallelism": GPU, "resources": {"requests": {"memory": "1Ti"}}},
        "fabric": {"type": "EFA"},
    }
    rendered = pod(**spec)
    devices = {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "16", "hugepages-2Mi": "5120Mi"}
    assert rendered["containers"][0]["resources"] == {
        "requests": {"memory": "1Ti", **devices},
        "limits": devices,
    }
    assert rendered["containers"][0]["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"]}
    assert {v["name"]: v for v in rendered["volumes"]}["shm"]["emptyDir"] == {
        "medium": "Memory",
        "sizeLimit": "64Gi",
    }
    assert (
        env(**spec).items()
        >= {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "0"}.items()
    )
    assert transfer_config(**spec)["kv_connector_extra_config"]["backends"] == ["LIBFABRIC"]
    required = rendered["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert required == [
        {
            "topologyKey": "topology.kubernetes.io/zone",
            "labelSelector": {
                "matchLabels": {
                    "app.kubernetes.io/name": "disagg-engine",
                    "inference.disagg.dev/name": "demo",
                    "inference.disagg.dev/revision": "0123abcd",
                }
            },
        }
    ]


@pytest.mark.parametrize(("tensor", "per_gpu", "efa"), [(1, 2, "2"), (4, 2, "8"), (8, 2, "16"), (8, 4, "32")])
def test_efa_devices_are_counted_by_gpu(tensor: int, per_gpu: int, efa: str) -> None:
    fabric = {"type": "EFA", "efa": {"devicesPerGPU": per_gpu}}
    limits = main(prefill={"parallelism": {"tensor": tensor}}, fabric=fabric)["resources"]["limits"]
    assert (limits["nvidia.com/gpu"], limits["vpc.amazonaws.com/efa"]) == (str(tensor), efa)


def test_efa_without_hugepages_and_privileged() -> None:
    container = main(fabric={"type": "EFA", "efa": {"hugepages2Mi": "0", "privileged": True}})
    assert "hugepages-2Mi" not in container["resources"]["limits"]
    assert container["securityContext"] == {"privileged": True}
    assert {"name": "FI_EFA_USE_HUGE_PAGE", "value": "0"} in container["env"]


def test_hugepages_bring_the_cpu_request_that_kubernetes_demands() -> None:
    assert main(fabric={"type": "EFA"})["resources"]["requests"]["cpu"] == "1"


def test_a_cpu_engine_requests_no_device_and_uses_the_pod_network() -> None:
    spec = {"engine": {"image": "cpu", "device": "CPU"}}
    assert main(**spec)["resources"] == {}
    assert env(**spec).items() >= {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}.items()


@pytest.mark.parametrize(
    ("colocate", "kind"),
    [
        ("Auto", "preferredDuringSchedulingIgnoredDuringExecution"),
        ("Required", "requiredDuringSchedulingIgnoredDuringExecution"),
        ("None", None),
    ],
)
def test_colocation(colocate: str, kind: str | None) -> None:
    affinity = pod(placement={"colocate": colocate}).get("affinity", {})
    assert list(affinity.get("podAffinity", {})) == ([kind] if kind else [])


def test_the_users_variables_win_except_that_the_connector_stays_importable() -> None:
    variables = env(
        engine={
            "image": "cpu",
            "device": "CPU",
            "env": [{"name": "UCX_TLS", "value": "shm"}, {"name": "PYTHONPATH", "value": "/mine"}],
        }
    )
    assert variables["UCX_TLS"] == "shm"
    assert variables["PYTHONPATH"] == "/disagg/connector:/mine"


def test_the_pods_own_address_comes_before_what_may_refer_to_it() -> None:
    names = [variable["name"] for variable in main()["env"]]
    assert names[0] == "POD_IP"
    assert env()["VLLM_NIXL_SIDE_CHANNEL_HOST"] == {"fieldRef": {"fieldPath": "status.podIP"}}


def test_termination_is_the_sum_of_its_parts() -> None:
    rendered = pod(prefill={"drain": {"timeoutSeconds": 100}})
    before = rendered["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert rendered["terminationGracePeriodSeconds"] > before + 100


@pytest.mark.parametrize(("deadline", "budget"), [(60, 300), (1800, 1800), (7200, 7200)])
def test_loading_a_model_has_its_time(deadline: int, budget: int) -> None:
    probe = main(rollout={"progressDeadlineSeconds": deadline})["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= budget
    for name in ("readinessProbe", "livenessProbe", "startupProbe"):
        assert main()[name]["timeoutSeconds"] >= 5


def test_service_links_are_off_unless_the_user_turns_them_on() -> None:
    assert pod()["enableServiceLinks"] is False
    assert pod(prefill={"template": {"spec": {"enableServiceLinks": True}}})["enableServiceLinks"] is True


def test_the_template_cannot_take_our_labels_away() -> None:
    template = {"metadata": {"labels": {"inference.disagg.dev/revision": "x", "mine": "1"}}}
    made = stateful_set(prefill={"template": template})
    labels = made["spec"]["template"]["metadata"]["labels"]
    assert labels["inference.disagg.dev/revision"] == "0123abcd"
    assert labels["mine"] == "1"
    assert made["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_a_template_that_cannot_be_merged_says_where() -> None:
    with pytest.raises(OverlayError, match=r"spec\.containers"):
        stateful_set(prefill={"template": {"spec": {"containers": "main"}}})


@pytest.mark.parametrize(("suspend", "replicas"), [(False, 3), (True, 0)])
def test_replicas(suspend: bool, replicas: int) -> None:
    assert stateful_set(prefill={"replicas": 3}, suspend=suspend)["spec"]["replicas"] == replicas
