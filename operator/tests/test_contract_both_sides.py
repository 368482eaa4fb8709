"""What the operator writes is what the router and the connector read: docs/wire-contract.md, section 5."""

import json
from pathlib import Path
from typing import Any

import pytest
from operator_world import key_policy, parsed_spec

from disagg_connector.config import parse_config
from disagg_connector.counters import DEFINITIONS
from disagg_operator.api.transfer import TransferMode
from disagg_operator.build.engine import kv_transfer_config
from disagg_operator.build.router import router_config
from disagg_operator.build.services import build_engine_service, build_router_service
from disagg_operator.control_secret import KEY_BYTES
from disagg_operator.mismatch import ALWAYS_THERE, COUNTERS
from disagg_operator.naming import ADMIN_PORT, CONTROL_KEYS, Component
from disagg_router.backends import LABEL_NAME, from_slices
from disagg_router.config import Config, Model, load
from disagg_router.legs import MODES
from disagg_router.replicas import replicas_in
from disagg_router.secretdir import SecretDir


def test_the_router_reads_its_configuration(tmp_path: Path) -> None:
    spec = parsed_spec(
        router={
            "policy": {"type": "LeastLoaded"},
            "session": {"keys": ["X-Conversation", "X-Session-Id"], "bodyFields": ["user"]},
            "deadlines": {"connectSeconds": 2, "firstByteSeconds": 33, "idleSeconds": 44},
            "limits": {"bodyBytes": 2048, "headBytes": 4096},
            "localPrefill": {"mode": "Auto", "maxTokens": 99},
            "tracing": {"endpoint": "https://collector.observability:4318/otel"},
            "auth": {"apiKeySecretRef": {"name": "keys", "key": "keys.txt"}},
            "tls": {"secretName": "certificate"},
        }
    )
    file = tmp_path / "router.json"
    file.write_text(json.dumps(router_config("demo", "team-a", spec)))
    config = load(file)
    assert (config.namespace, config.name, config.model.name) == ("team-a", "demo", "org/model")
    assert config.local_prefill is not None
    assert (config.local_prefill.mode, config.local_prefill.max_tokens) == ("Auto", 99)
    assert config.auth is not None
    assert config.auth.api_keys_file == "/etc/disagg-keys/api-keys"
    assert config.tls is not None
    assert config.tls.certificate_file == "/etc/disagg-tls/tls.crt"
    assert config.tls.key_file == "/etc/disagg-tls/tls.key"
    assert config.tracing is not None
    assert config.tracing.endpoint == "https://collector.observability:4318/otel"
    assert config.policy == "LeastLoaded"
    assert config.session.keys == ("X-Conversation", "X-Session-Id")
    assert config.session.body_fields == ("user",)
    assert (config.deadlines.connect_seconds, config.deadlines.first_byte_seconds) == (2, 33)
    assert (config.deadlines.idle_seconds, config.limits.body_bytes, config.limits.head_bytes) == (
        44,
        2048,
        4096,
    )
    assert (config.ports.http, config.ports.admin, config.ports.engine, config.ports.control) == (
        8000,
        8001,
        8000,
        5700,
    )


def test_the_router_reads_how_many_turns_it_may_let_through(tmp_path: Path) -> None:
    numbers = {"turnsPerEngine": 7, "waitingTurns": 0, "waitingTurnsPerSession": 3, "waitSeconds": 9}
    read = written(tmp_path, router={"overload": numbers}).overload
    assert (read.turns_per_engine, read.waiting_turns) == (7, 0)
    assert (read.waiting_turns_per_session, read.wait_seconds) == (3, 9)


def test_what_is_left_out_is_the_same_for_operator_and_router(tmp_path: Path) -> None:
    read = written(tmp_path)
    alone = Config(version=1, namespace="demo", name="demo", model=Model("m"))
    for part in ("mode", "session", "deadlines", "limits", "overload", "local_prefill", "auth", "tls"):
        assert getattr(read, part) == getattr(alone, part), part


def written(folder: Path, **spec: Any) -> Config:
    """What the router reads of what the operator writes."""
    file = folder / "router.json"
    file.write_text(json.dumps(router_config("demo", "team-a", parsed_spec(**spec))))
    return load(file)


@pytest.mark.parametrize("mode", list(TransferMode))
def test_the_router_knows_every_mode_and_how_long_decode_keeps_kv(tmp_path: Path, mode: TransferMode) -> None:
    pulls = mode is TransferMode.BIDIRECTIONAL_PULL
    transfer = {"mode": str(mode), **({"decodeRetentionSeconds": 99} if pulls else {})}
    file = tmp_path / "router.json"
    file.write_text(json.dumps(router_config("demo", "team-a", parsed_spec(kvTransfer=transfer))))
    config = load(file)
    assert config.mode == mode
    assert config.decode_retention_seconds == (99 if pulls else 480)
    assert (config.handles is not None) == pulls
    assert str(mode) in MODES


def test_replicas_read_the_secret_that_the_operator_writes(tmp_path: Path) -> None:
    for key in CONTROL_KEYS:
        (tmp_path / key).write_bytes(key_policy().fresh(KEY_BYTES))
    assert SecretDir(tmp_path).secrets.current


def test_replicas_find_each_other_by_the_service_that_clients_call() -> None:
    """Its labels come to its EndpointSlices, which a router may watch anyway. The admin port is not in it."""
    service = build_router_service("demo", "team-a", parsed_spec().router)
    piece = {
        "metadata": {"labels": service["metadata"]["labels"]},
        "addressType": "IPv4",
        "endpoints": [{"addresses": ["10.0.0.1"], "targetRef": {"name": "demo-router-5d8f-x2x"}}],
    }
    (replica,) = replicas_in([piece], ADMIN_PORT)
    assert (replica.name, str(replica.admin)) == ("demo-router-5d8f-x2x", "10.0.0.1:8001")
    assert service["metadata"]["labels"][LABEL_NAME] == "demo", "which the router's watch selects by"
    assert [port["name"] for port in service["spec"]["ports"]] == ["http"]


@pytest.mark.parametrize("mode", list(TransferMode))
def test_the_router_reads_an_engines_mode_from_its_service(mode: TransferMode) -> None:
    service = build_engine_service("demo", "team-a", Component.PREFILL, "0123abcd", mode)
    piece = {
        "metadata": {"labels": service["metadata"]["labels"]},
        "addressType": "IPv4",
        "endpoints": [{"addresses": ["10.0.0.1"]}],
    }
    (backend,) = from_slices([piece], 8000, 5700)
    assert backend.mode == mode


@pytest.mark.parametrize(
    ("mode", "said"), [("OnFinish", "on_finish"), ("Streaming", "streaming"), ("Disabled", "off")]
)
@pytest.mark.parametrize("component", [Component.PREFILL, Component.DECODE])
def test_the_connector_reads_its_configuration(component: Component, mode: str, said: str) -> None:
    write_back: dict[str, Any] = {
        "mode": mode,
        "reserveBlocks": 7,
        "minFreePercent": 21,
        "maxWaitMilliseconds": 250,
    }
    spec = parsed_spec(kvTransfer={"leaseSeconds": 99, "writeBack": write_back})
    config = parse_config(kv_transfer_config(spec, component)["kv_connector_extra_config"])
    assert (config.role, config.control_port, config.kv_lease_duration) == (str(component), 5700, 99)
    assert (config.writeback_mode, config.writeback_reserve_blocks) == (said, 7)
    assert (config.writeback_min_free_percent, config.max_wait) == (21, 0.25)


def test_the_connector_counts_what_the_operator_looks_for() -> None:
    for name, label in COUNTERS.items():
        assert DEFINITIONS[name.removesuffix("_total")].label == label
    for name in ALWAYS_THERE:
        assert "fingerprint" in DEFINITIONS[name.removesuffix("_total")].values, (
            "vLLM shows these from the start"
        )
