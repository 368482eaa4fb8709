"""Reading manifests into types and back; what follows from defaults."""

from typing import Any

import pytest
from pydantic import ValidationError

from disagg_operator.api import types
from disagg_operator.api.types import (
    Colocate,
    Device,
    DisaggInference,
    DisaggInferenceSpec,
    StorageType,
    TransferBackend,
    WriteBackMode,
)

MINIMAL: dict[str, Any] = {
    "model": {"uri": "hf://Qwen/Qwen3-32B"},
    "engine": {"image": "vllm/vllm-openai:v1"},
}


def spec_of(**fields: Any) -> DisaggInferenceSpec:
    return DisaggInferenceSpec.model_validate(MINIMAL | fields)


def test_what_is_written_is_read_back_as_it_was() -> None:
    spec = spec_of(
        prefill={
            "scaling": {"maxReplicas": 4},
            "template": {"spec": {"hostNetwork": True}},
            "extraArgs": ["--x", "1"],
        },
        fabric={"type": "EFA", "efa": {"devicesPerGPU": 4, "hugepages2Mi": 0}},
        kvTransfer={"extraConfig": {"enable_cross_layers_blocks": True}, "writeBack": {"minFreePercent": 20}},
        engine={
            "image": "x",
            "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}],
        },
    )
    assert DisaggInferenceSpec.model_validate(spec.to_wire()) == spec


def test_names_on_the_wire_are_camel_case_and_absent_fields_stay_absent() -> None:
    wire = spec_of().to_wire()
    assert wire["kvTransfer"]["leaseSeconds"] == 120
    assert "replicas" not in wire["prefill"]
    assert "writeBack" not in wire["kvTransfer"]


def test_a_minimal_manifest_is_one_prefill_and_one_decode_with_write_back() -> None:
    spec = spec_of()
    assert (spec.prefill.fixed_replicas, spec.decode.fixed_replicas) == (1, 1)
    assert spec.engine.device is Device.GPU
    assert spec.model.storage.type is StorageType.NONE
    assert spec.placement.colocate is Colocate.AUTO
    write_back = spec.kv_transfer.effective_write_back
    assert write_back is not None
    assert write_back.mode is WriteBackMode.ON_FINISH


def test_fields_of_a_newer_crd_are_ignored() -> None:
    assert spec_of(futureField={"a": 1}) == spec_of()


def test_types_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        spec_of().suspend = True


def test_an_unreadable_manifest_names_the_field() -> None:
    with pytest.raises(ValidationError, match=r"spec\.prefill\.parallelism\.tensor"):
        DisaggInference.model_validate({"spec": MINIMAL | {"prefill": {"parallelism": {"tensor": "eight"}}}})


@pytest.mark.parametrize(
    ("router", "path"),
    [
        ({"session": {"bodyFields": ["metadata.id"]}}, "router.session.bodyFields"),
        ({"session": {"keys": ["X Session"]}}, "router.session.keys"),
        ({"tracing": {"endpoint": "collector:4317"}}, "router.tracing.endpoint"),
        ({"tracing": {"endpoint": "http://collector:4318/?token=a"}}, "router.tracing.endpoint"),
    ],
)
def test_a_value_that_cannot_work_is_refused(router: dict[str, Any], path: str) -> None:
    with pytest.raises(ValidationError, match=path):
        spec_of(router=router)


@pytest.mark.parametrize(
    ("model", "served"),
    [
        ({"uri": "hf://Qwen/Qwen3-32B"}, "Qwen/Qwen3-32B"),
        ({"uri": "hf://gpt2"}, "gpt2"),
        ({"uri": "pvc://models/llama/70b/"}, "70b"),
        ({"uri": "file:///models/smollm2"}, "smollm2"),
        ({"uri": "file:///models/smollm2", "name": "smol"}, "smol"),
    ],
)
def test_the_served_name_comes_from_the_uri_unless_given(model: dict[str, str], served: str) -> None:
    assert spec_of(model=model).model.served_name == served


@pytest.mark.parametrize(
    ("fabric", "backend", "resolved"),
    [
        ("None", "Auto", TransferBackend.UCX),
        ("EFA", "Auto", TransferBackend.LIBFABRIC),
        ("EFA", "UCX", TransferBackend.UCX),
        ("None", "Libfabric", TransferBackend.LIBFABRIC),
    ],
)
def test_the_backend_follows_the_fabric_unless_given(
    fabric: str, backend: str, resolved: TransferBackend
) -> None:
    assert spec_of(fabric={"type": fabric}, kvTransfer={"backend": backend}).backend is resolved


def test_settings_of_one_mode_have_no_effect_in_another() -> None:
    pull = spec_of(kvTransfer={"mode": "BidirectionalPull"}).kv_transfer
    assert pull.effective_write_back is None
    assert pull.effective_decode_retention_seconds == 480
    assert spec_of().kv_transfer.effective_decode_retention_seconds is None
    assert spec_of().fabric.effective_efa is None


def test_a_scaled_role_starts_at_its_lower_bound() -> None:
    assert spec_of(decode={"scaling": {"minReplicas": 3, "maxReplicas": 5}}).decode.fixed_replicas == 3


def test_quantities_may_be_written_as_numbers() -> None:
    role = spec_of(prefill={"resources": {"limits": {"cpu": 8, "memory": "64Gi"}}}).prefill
    assert role.resources.limits == {"cpu": "8", "memory": "64Gi"}


def test_the_public_names_are_those_that_are_there() -> None:
    assert set(types.__all__) == {name for name in vars(types) if not name.startswith("_")} - {
        *("base", "engine", "inference", "model", "placement", "scaling", "serving", "status", "transfer")
    }
