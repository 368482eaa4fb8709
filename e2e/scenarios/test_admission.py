"""A real API server, with no operator anywhere, judges manifests: by `kubectl apply`, as a user meets it.

Every rule of the CRDs has an example that it refuses, with the field's path and the rule's own text, and one right beside
it that passes. `test_every_rule_is_covered` holds the list complete.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from disagg_operator.api.types import DisaggInferenceSpec
from e2e.apiserver import ApiServer, api_server

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
SCALED = {"scaling": {"maxReplicas": 4}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with api_server(tmp_path_factory.mktemp("apiserver")) as running:
        running.install_crds()
        yield running


def inference(spec: dict[str, Any], name: str = "qwen3") -> dict[str, Any]:
    """A minimal manifest with the fields of `spec` put in."""
    base: dict[str, Any] = {
        "model": {"uri": "hf://Qwen/Qwen3-32B"},
        "engine": {"image": "vllm/vllm-openai:v1"},
    }
    for key, value in spec.items():
        base[key] = base[key] | value if isinstance(base.get(key), dict) else value
    return {
        "apiVersion": "inference.disagg.dev/v1alpha1",
        "kind": "DisaggInference",
        "metadata": {"name": name, "namespace": "default"},
        "spec": base,
    }


def args(*items: str) -> dict[str, Any]:
    return {"engine": {"extraArgs": list(items)}}


def env(**variable: Any) -> dict[str, Any]:
    return {"engine": {"env": [variable]}}


def budget(devices: int) -> dict[str, Any]:
    """At least one prefill pod of 8 devices and three decode pods of 8."""
    role = {"parallelism": {"tensor": 8}}
    return {
        "autoscaling": {"mode": "Auto", "maxDevices": devices},
        "prefill": role | {"scaling": {"minReplicas": 1, "maxReplicas": 4}},
        "decode": role | {"scaling": {"minReplicas": 3, "maxReplicas": 4}},
    }


def file_model(uri: str, **storage: str) -> dict[str, Any]:
    return {"model": {"uri": uri, "storage": storage}}


# Key of the connector's settings -> a value, and what the rule says.
RESERVED_SETTINGS: dict[str, tuple[Any, str]] = {
    "backends": (["LIBFABRIC"], "may not contain backends: set kvTransfer.backend"),
    "bidirectional_kv_xfer": (True, "set kvTransfer.mode"),
    "control_port": (1, "the connector always listens on 5700"),
    "control_secret_dir": ("/keys", "the operator makes the secret and mounts it"),
    "decoder_kv_blocks_ttl": (1, "set kvTransfer.decodeRetentionSeconds"),
    "enforce_handshake_compat": (False, "the check is always on"),
    "kv_lease_duration": (1, "set kvTransfer.leaseSeconds"),
    "max_wait_milliseconds": (1, "set kvTransfer.writeBack.maxWaitMilliseconds"),
    "role": ("prefill", "it follows from the pool"),
    "writeback_min_free_percent": (1, "set kvTransfer.writeBack.minFreePercent"),
    "writeback_mode": ("off", "set kvTransfer.writeBack.mode"),
    "writeback_reserve_blocks": (1, "set kvTransfer.writeBack.reserveBlocks"),
}

# name -> fields, path in the error, a part of the rule's message
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "revision of a folder": (
        {"model": {"uri": "file:///models/a", "revision": "main"}},
        "spec.model.revision",
        "model.revision only applies to hf:// models",
    ),
    "token for a folder": (
        {"model": {"uri": "file:///models/a", "secretRef": {"name": "a", "key": "b"}}},
        "spec.model.secretRef",
        "model.secretRef only applies to hf:// and s3:// models",
    ),
    "revision in the uri": (
        {"model": {"uri": "hf://Qwen/Qwen3@main"}},
        "spec.model.uri",
        "model.uri must read hf://ORG/NAME; put a commit or tag into model.revision",
    ),
    "claim with capitals": (
        {"model": {"uri": "pvc://Models/a"}},
        "spec.model.uri",
        "must read pvc://CLAIM/DIRECTORY",
    ),
    "claim and storage": (
        file_model("pvc://models/a", type="PVC", claimName="other"),
        "spec.model.storage",
        "model.storage is not used with a pvc:// model",
    ),
    "relative path": ({"model": {"uri": "file://models/a"}}, "spec.model.uri", "must be an absolute path"),
    "path outside of the mount": (
        file_model("file:///models/a", type="HostPath", path="/srv", mountPath="/mnt"),
        "spec.model.uri",
        "model.uri must lie in storage.mountPath",
    ),
    "path beside the mount": (
        file_model("file:///models2/a", type="HostPath", path="/srv"),
        "spec.model.uri",
        "model.uri must lie in storage.mountPath",
    ),
    "claim not named": (
        {"model": {"storage": {"type": "PVC"}}},
        "spec.model.storage.claimName",
        "storage.claimName is required with type PVC",
    ),
    "directory not named": (
        {"model": {"storage": {"type": "HostPath"}}},
        "spec.model.storage.path",
        "storage.path is required with type HostPath",
    ),
    "two sources of a variable": (
        env(
            name="A",
            valueFrom={"fieldRef": {"fieldPath": "status.hostIP"}, "secretKeyRef": {"name": "a", "key": "b"}},
        ),
        "spec.engine.env[0].valueFrom",
        "valueFrom takes exactly one of",
    ),
    "no source of a variable": (
        env(name="A", valueFrom={}),
        "spec.engine.env[0].valueFrom",
        "valueFrom takes exactly one of",
    ),
    "value and source": (
        env(name="A", value="b", valueFrom={"fieldRef": {"fieldPath": "status.hostIP"}}),
        "spec.engine.env[0]",
        "set value or valueFrom, not both",
    ),
    "side channel's address": (
        env(name="VLLM_NIXL_SIDE_CHANNEL_PORT", value="5600"),
        "spec.engine.env[0].name",
        "the operator sets the side channel's address itself",
    ),
    "search path from elsewhere": (
        env(name="PYTHONPATH", valueFrom={"configMapKeyRef": {"name": "a", "key": "b"}}),
        "spec.engine.env[0].valueFrom",
        "PYTHONPATH must be given as a value",
    ),
    "operator's variable": (
        env(name="DISAGG_CONTROL_PORT", value="1"),
        "spec.engine.env[0].name",
        "variables that start with DISAGG_ belong to the operator",
    ),
    "flag and value in one item": (
        args("--block-size 32"),
        "spec.engine.extraArgs",
        "are two items of extraArgs",
    ),
    "transfer config": (args("--kv-transfer-config", "{}"), "spec.engine.extraArgs", "set spec.kvTransfer"),
    "transfer config, a key of it": (
        args("--kv-transfer-config.kv_role=kv_both"),
        "spec.engine.extraArgs",
        "set spec.kvTransfer",
    ),
    "transfer config with underscores": (
        {"prefill": {"extraArgs": ["--kv_transfer_config={}"]}},
        "spec.prefill.extraArgs",
        "may not contain --kv-transfer-config: set spec.kvTransfer",
    ),
    "served name": (args("--served-model-name=a"), "spec.engine.extraArgs", "set spec.model.name"),
    "model": (args("--model", "a"), "spec.engine.extraArgs", "set spec.model.uri"),
    "revision": (args("--revision", "a"), "spec.engine.extraArgs", "set spec.model.revision"),
    "port": (args("--port=1"), "spec.engine.extraArgs", "engines always listen on port 8000"),
    "host": (args("--host", "::"), "spec.engine.extraArgs", "engines always listen on all addresses"),
    "tensor": ({"decode": {"extraArgs": ["-tp", "8"]}}, "spec.decode.extraArgs", "set parallelism.tensor"),
    "pipeline": (args("--pipeline-parallel-size=2"), "spec.engine.extraArgs", "set parallelism.pipeline"),
    "data": (args("--data-parallel-size-local", "2"), "spec.engine.extraArgs", "set parallelism.data"),
    "data, short": (args("-dpl", "2"), "spec.engine.extraArgs", "set parallelism.data"),
    "shutdown": (args("--shutdown-timeout", "2"), "spec.engine.extraArgs", "set drain.timeoutSeconds"),
    "context parallelism": (
        args("-dcp", "2"),
        "spec.engine.extraArgs",
        "with context parallelism: remove it",
    ),
    "other hashes": (
        args("--prefix-caching-hash-algo=xxhash"),
        "spec.engine.extraArgs",
        "KV is found by vLLM's default, sha256",
    ),
    "file with flags": (args("--config", "/a.yaml"), "spec.engine.extraArgs", "list the flags in extraArgs"),
    "bounds the wrong way round": (
        {"prefill": {"scaling": {"minReplicas": 5, "maxReplicas": 4}}},
        "spec.prefill.scaling.minReplicas",
        "scaling.minReplicas must not be greater than scaling.maxReplicas",
    ),
    "GPUs by hand": (
        {"prefill": {"resources": {"limits": {"nvidia.com/gpu": 8}}}},
        "spec.prefill.resources",
        "are derived from parallelism and fabric",
    ),
    "EFA by hand": (
        {"decode": {"resources": {"requests": {"vpc.amazonaws.com/efa": 16}}}},
        "spec.decode.resources",
        "are derived from parallelism and fabric",
    ),
    "replicas and scaling": (
        {"decode": {"replicas": 2, **SCALED}},
        "spec.decode",
        "set replicas (a fixed number) or scaling (bounds), not both",
    ),
    "EFA settings without EFA": (
        {"fabric": {"efa": {}}},
        "spec.fabric.efa",
        "only applies to fabric.type EFA",
    ),
    "write-back in another mode": (
        {"kvTransfer": {"mode": "Pull", "writeBack": {}}},
        "spec.kvTransfer.writeBack",
        "writeBack only applies to mode BidirectionalPush",
    ),
    "retention in another mode": (
        {"kvTransfer": {"decodeRetentionSeconds": 480}},
        "spec.kvTransfer.decodeRetentionSeconds",
        "decodeRetentionSeconds only applies to mode BidirectionalPull",
    ),
    "ratio the wrong way round": (
        {"autoscaling": {"ratio": {"minPercent": 200, "maxPercent": 100}}},
        "spec.autoscaling.ratio.minPercent",
        "ratio.minPercent must not be greater than ratio.maxPercent",
    ),
    "autoscaling of a fixed role": (
        {"autoscaling": {"mode": "Auto"}, "prefill": SCALED, "decode": {"replicas": 2}},
        "spec.autoscaling",
        "needs scaling (bounds) instead of replicas in both prefill and decode",
    ),
    "fewer devices than the fewest pods need": (
        budget(31),
        "spec.autoscaling.maxDevices",
        "autoscaling.maxDevices is less than what scaling.minReplicas of both roles need",
    ),
    "EFA on CPUs": (
        {"fabric": {"type": "EFA"}, "engine": {"device": "CPU"}},
        "spec.fabric",
        "fabric.type EFA needs engine.device GPU",
    ),
    "lease shorter than the wait": (
        {"router": {"deadlines": {"firstByteSeconds": 121}}},
        "spec.router",
        "must not be longer than kvTransfer.leaseSeconds",
    ),
    "retention shorter than the wait allows": (
        {"kvTransfer": {"mode": "BidirectionalPull", "decodeRetentionSeconds": 239}},
        "spec.kvTransfer",
        "must be at least four times router.deadlines.firstByteSeconds",
    ),
    "wait longer than the default retention allows": (
        {
            "kvTransfer": {"mode": "BidirectionalPull", "leaseSeconds": 600},
            "router": {"deadlines": {"firstByteSeconds": 121}},
        },
        "spec.kvTransfer",
        "must be at least four times router.deadlines.firstByteSeconds",
    ),
    "a key that the router does not have": (
        {"engine": {"image": "x", "extraArgs": ["--api-key=secret"]}},
        "spec.engine.extraArgs",
        "Set spec.router.auth and spec.router.tls instead",
    ),
    "TLS that the router does not speak": (
        {"decode": {"extraArgs": ["--ssl_certfile", "/cert"]}},
        "spec.decode.extraArgs",
        "Set spec.router.auth and spec.router.tls instead",
    ),
    "a socket in place of the port": (
        {"prefill": {"extraArgs": ["--uds", "/tmp/x"]}},
        "spec.prefill.extraArgs",
        "router and probes speak plain HTTP",
    ),
    "no prefix cache to write back to": (
        {"prefill": {"extraArgs": ["--no-enable-prefix-caching"]}},
        "spec.kvTransfer",
        "mode BidirectionalPush needs prefix caching",
    ),
    **{
        f"connector's {key}": (
            {"kvTransfer": {"extraConfig": {key: value}}},
            f"spec.kvTransfer.extraConfig.{key}",
            message,
        )
        for key, (value, message) in RESERVED_SETTINGS.items()
    },
    # By the schema alone.
    "no model": ({"model": {"uri": ""}}, "spec.model.uri", "should match"),
    "no pods": ({"prefill": {"replicas": 0}}, "spec.prefill.replicas", "greater than or equal to 1"),
    "unknown mode": (
        {"kvTransfer": {"mode": "Bidirectional"}},
        "spec.kvTransfer.mode",
        '"BidirectionalPush"',
    ),
    "seconds with a unit": (
        {"kvTransfer": {"leaseSeconds": "120s"}},
        "spec.kvTransfer.leaseSeconds",
        "integer",
    ),
    "no turn at all": (
        {"router": {"overload": {"turnsPerEngine": 0}}},
        "spec.router.overload.turnsPerEngine",
        "greater than or equal to 1",
    ),
    "misspelt field": ({"prefill": {"replica": 2}}, "spec.prefill.replica", "unknown field"),
    "variable twice": (
        {"engine": {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}},
        "spec.engine.env[1]",
        "Duplicate value",
    ),
}

ACCEPTED: dict[str, dict[str, Any]] = {
    "minimal": {},
    "hub model at a revision with a token": {
        "model": {"revision": "main", "secretRef": {"name": "hf", "key": "token"}}
    },
    "hub model without an organization": {"model": {"uri": "hf://gpt2"}},
    "claim": {"model": {"uri": "pvc://models/llama/70b"}},
    "folder of the image": {"model": {"uri": "file:///opt/model"}},
    "folder of the node": file_model("file:///models/a", type="HostPath", path="/srv/models"),
    "the mount itself": file_model("file:///models", type="PVC", claimName="models"),
    "hub cache on a claim": {"model": {"storage": {"type": "PVC", "claimName": "cache"}}},
    "variables": {
        "engine": {
            "env": [
                {"name": "VLLM_LOGGING_LEVEL", "value": "DEBUG"},
                {"name": "HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}},
                {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}},
                {
                    "name": "CONFIG",
                    "valueFrom": {"configMapKeyRef": {"name": "a", "key": "b", "optional": True}},
                },
            ]
        }
    },
    "flags that look like reserved ones": args(
        *("--model-impl", "auto", "--port-range", "--tokenizer-revision=main", "--config-format", "hf"),
        *(
            "--chat-template",
            "{{ a b }}",
            "--host-memory",
            "--kv-cache-dtype=fp8",
            "-q",
            "fp8",
            "-dc",
            "x",
            "-ep",
        ),
    ),
    "prefix caching off in pull mode": {
        "kvTransfer": {"mode": "Pull"},
        "decode": {"extraArgs": ["--no-enable-prefix-caching"]},
    },
    "scaled roles": {"autoscaling": {"mode": "External"}, "prefill": SCALED, "decode": SCALED},
    "as many devices as the fewest pods need": budget(32),
    "a budget that nothing scales by": budget(31) | {"autoscaling": {"mode": "Disabled", "maxDevices": 1}},
    "scaled role without autoscaling": {"prefill": SCALED},
    "other resources": {"prefill": {"resources": {"requests": {"cpu": 8}, "limits": {"memory": "64Gi"}}}},
    "EFA": {"fabric": {"type": "EFA", "efa": {"hugepages2Mi": 0}}},
    "connector's further settings": {
        "kvTransfer": {
            "extraConfig": {"enable_cross_layers_blocks": True, "kv_recompute_threshold": 64, "x": {"y": [1]}}
        }
    },
    "write-back": {"kvTransfer": {"writeBack": {"mode": "Disabled", "maxWaitMilliseconds": 0}}},
    "retention": {"kvTransfer": {"mode": "BidirectionalPull", "decodeRetentionSeconds": 240}},
    "retention by default": {
        "kvTransfer": {"mode": "BidirectionalPull", "leaseSeconds": 600},
        "router": {"deadlines": {"firstByteSeconds": 120}},
    },
    "router with all its settings": {
        "router": {
            "auth": {"apiKeySecretRef": {"name": "keys", "key": "keys.txt"}},
            "tls": {"secretName": "certificate"},
            "overload": {"turnsPerEngine": 64, "waitingTurns": 0, "waitSeconds": 5},
            "policy": {"type": "LeastLoaded"},
            "session": {"keys": ["X-Conversation-Id"], "bodyFields": ["prompt_cache_key", "user"]},
            "tracing": {"endpoint": "https://collector.observability:4318/otel"},
        }
    },
    "long wait with a lease as long": {
        "kvTransfer": {"leaseSeconds": 600},
        "router": {"deadlines": {"firstByteSeconds": 600}},
    },
    "any pod template": {
        "prefill": {
            "template": {"metadata": {"annotations": {"a": "b"}}, "spec": {"containers": [{"name": "main"}]}}
        }
    },
    "tolerations": {"placement": {"tolerations": [{"operator": "Exists"}], "nodeSelector": {"a": "b"}}},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_contradiction_is_refused_with_its_path_and_what_to_do(server: ApiServer, name: str) -> None:
    fields, path, message = REFUSED[name]
    answer = server.apply(inference(fields), "--dry-run=server")
    assert not answer.ok, "was accepted"
    assert path in answer.stderr
    assert message in answer.stderr


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_legal_is_accepted_and_stored_as_the_operator_reads_it(server: ApiServer, name: str) -> None:
    manifest = inference(ACCEPTED[name])
    answer = server.apply(manifest, "--dry-run=server", "-o", "yaml")
    assert answer.ok, answer.stderr
    # The API server's defaults and the operator's are the same, and nothing is pruned.
    stored = DisaggInferenceSpec.model_validate(yaml.safe_load(answer.stdout)["spec"])
    assert stored == DisaggInferenceSpec.model_validate(manifest["spec"])


def rules_of(schema: dict[str, Any]) -> Iterator[str]:
    """The message of every CEL rule in a schema."""
    for rule in schema.get("x-kubernetes-validations", ()):
        yield rule["message"]
    for child in [
        *schema.get("properties", {}).values(),
        schema.get("items"),
        schema.get("additionalProperties"),
    ]:
        if isinstance(child, dict):
            yield from rules_of(child)


def test_every_rule_is_covered() -> None:
    said = [message for _, _, message in REFUSED.values()]
    said += [
        "metadata.name must have at most",
        "metadata.name must start with a letter",
    ]  # see the names below
    for path in (ROOT / "crds").glob("*.yaml"):
        schema = yaml.safe_load(path.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        uncovered = {rule for rule in rules_of(schema) if not any(part in rule for part in said)}
        assert not uncovered


def children_of(name: str) -> list[dict[str, Any]]:
    """The children with the longest names and label values that a DisaggInference of that name has."""
    child = f"{name}-prefill-0123abcd"
    labels = {"app.kubernetes.io/instance": name, "inference.disagg.dev/name": name}
    meta = {"name": child, "namespace": "default", "labels": labels}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "main", "image": "x"}]}}
    stateful_set = {"serviceName": child, "selector": {"matchLabels": labels}, "template": template}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": {"ports": [{"port": 1}]}},
        {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": meta, "spec": stateful_set},
        {
            "apiVersion": "inference.disagg.dev/v1alpha1",
            "kind": "DisaggInferenceScaler",
            "metadata": {**meta, "name": f"{name}-prefill"},
            "spec": {"replicas": 1},
        },
    ]


@pytest.mark.parametrize("name", ["a", "vllm", "a" * 20, "a" * 30, "a" * 35, "a" * 34 + "b", "qwen3-32b"])
def test_a_name_that_is_accepted_is_legal_for_every_child(server: ApiServer, name: str) -> None:
    answer = server.apply(inference({}, name), "--dry-run=server")
    assert answer.ok, answer.stderr
    for child in children_of(name):
        answer = server.apply(child, "--dry-run=server")
        assert answer.ok, answer.stderr
    # The longest label value that Kubernetes makes of it: controller-revision-hash of the StatefulSet's pods.
    assert len(f"{name}-prefill-0123abcd-0123456789") <= 63


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        *((name, "must start with a letter") for name in ("phi-3.5-mini", "7b-chat", "a.b")),
        *(("a" * length, "at most 35 characters") for length in (36, 40, 52, 63, 64, 253)),
    ],
)
def test_a_name_that_children_could_not_have_is_refused_with_the_limit(
    server: ApiServer, name: str, limit: str
) -> None:
    answer = server.apply(inference({}, name), "--dry-run=server")
    assert not answer.ok, "was accepted"
    assert limit in answer.stderr


def test_defaults_appear_in_what_is_stored(server: ApiServer) -> None:
    answer = server.apply(inference({}), "--dry-run=server", "-o", "yaml")
    assert answer.ok, answer.stderr
    spec = yaml.safe_load(answer.stdout)["spec"]
    assert spec["kvTransfer"] == {
        "mode": "BidirectionalPush",
        "backend": "Auto",
        "loadFailurePolicy": "Recompute",
        "leaseSeconds": 120,
    }
    assert spec["model"]["storage"] == {"type": "None", "mountPath": "/models"}
    assert "replicas" not in spec["prefill"]


def test_the_overlay_is_stored_as_written(server: ApiServer) -> None:
    template = {
        "spec": {"containers": [{"name": "main", "securityContext": {"privileged": True}}], "unknownYet": [1]}
    }
    answer = server.apply(inference({"decode": {"template": template}}), "--dry-run=server", "-o", "yaml")
    assert yaml.safe_load(answer.stdout)["spec"]["decode"]["template"] == template


def test_a_user_finds_the_api_by_kubectl_explain(server: ApiServer) -> None:
    answer = server.kubectl("explain", "di.spec.kvTransfer.writeBack")
    assert answer.ok, answer.stderr
    for words in ("minFreePercent", "Prefill takes no written-back blocks", "OnFinish, Streaming, Disabled"):
        assert words in " ".join(answer.stdout.split())


def test_status_is_written_apart_and_shown_in_columns(server: ApiServer) -> None:
    assert server.apply(inference({}, "columns")).ok
    status = {
        "observedGeneration": 1,
        "endpoint": "http://columns-router.default.svc:8000/v1",
        "roles": [
            {"name": "prefill", "desiredReplicas": 2, "readyReplicas": 1, "ready": "1/2"},
            {"name": "decode", "desiredReplicas": 1, "readyReplicas": 1, "ready": "1/1"},
        ],
        "conditions": [
            {
                "type": "Ready",
                "status": "False",
                "observedGeneration": 1,
                "lastTransitionTime": "2026-01-01T00:00:00Z",
                "reason": "PodsStarting",
                "message": "",
            }
        ],
        "reuse": {
            "windowSeconds": 60,
            "observedTime": "2026-01-01T00:00:00Z",
            "promptTokens": 100,
            "computedTokens": 13,
            "writtenBackTokens": 80,
            "ratioPercent": 87,
        },
    }
    patch = yaml.safe_dump({**inference({}, "columns"), "spec": None, "status": status})
    applied = server.kubectl("apply", "--server-side", "--subresource=status", "-f", "-", stdin=patch)
    assert applied.ok, applied.stderr
    shown = server.kubectl("get", "di", "columns").stdout.splitlines()
    assert shown[0].split() == ["NAME", "READY", "PREFILL", "DECODE", "REUSE%", "MODE", "AGE"]
    assert shown[1].split()[:-1] == ["columns", "False", "1/2", "1/1", "87", "BidirectionalPush"]
    assert server.kubectl("wait", "--for=condition=Ready=False", "--timeout=60s", "di/columns").ok


def test_a_scaler_is_scaled_by_kubectl(server: ApiServer) -> None:
    scaler = children_of("scaled")[2]
    assert server.apply(scaler).ok
    assert server.kubectl("scale", "discaler/scaled-prefill", "--replicas=3").ok
    assert server.kubectl("get", "discaler/scaled-prefill", "-o", "jsonpath={.spec.replicas}").stdout == "3"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_accepted(server: ApiServer, path: Path) -> None:
    """Of what this API server knows: KEDA's objects and values of charts are looked at in operator/tests."""
    known = [
        item
        for item in yaml.safe_load_all(path.read_text())
        if not item.get("apiVersion", "keda.sh/").startswith("keda.sh/")
    ]
    if known:
        answer = server.kubectl("apply", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump_all(known))
        assert answer.ok, answer.stderr
