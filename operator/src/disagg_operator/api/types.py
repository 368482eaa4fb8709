"""The API `inference.disagg.dev/v1alpha1` as Python types: everything that other modules use, in one place.

    from disagg_operator.api.types import DisaggInference
    di = DisaggInference.model_validate(manifest)     # pydantic.ValidationError names the field
    di.spec.prefill.parallelism.tensor

By subject: `model`, `engine` (engine and roles), `placement` (nodes and fabric), `transfer`, `serving`, `scaling`, `status`, `inference`
(the two kinds). Rules that span fields are CEL in the CRD, checked by the API server with the operator down.
"""

from .base import API_VERSION, GROUP, VERSION, ApiObject
from .engine import (
    DERIVED_RESOURCES,
    Device,
    Drain,
    Engine,
    EnvFieldRef,
    EnvKeyRef,
    EnvSource,
    EnvVar,
    Parallelism,
    Resources,
    Role,
    RoleResources,
    RoleScaling,
)
from .inference import (
    MAX_NAME_LENGTH,
    DisaggInference,
    DisaggInferenceScaler,
    DisaggInferenceScalerSpec,
    DisaggInferenceScalerStatus,
    DisaggInferenceSpec,
)
from .model import Model, ModelStorage, SecretKeyRef, StorageType
from .placement import EFA, Colocate, Fabric, FabricType, Placement, Toleration
from .scaling import (
    Autoscaling,
    AutoscalingMode,
    Behavior,
    RatioBounds,
    Rollout,
    RolloutStrategy,
    ScaleDown,
    ScaleUp,
    ScalingTargets,
    Signal,
)
from .serving import (
    TLS,
    Auth,
    Deadlines,
    Limits,
    LocalPrefill,
    LocalPrefillMode,
    NetworkPolicy,
    Overload,
    Router,
    RouterPolicy,
    RouterService,
    RoutingPolicy,
    ServiceType,
    Session,
)
from .status import (
    Condition,
    ConditionStatus,
    DisaggInferenceStatus,
    ReuseStatus,
    RoleScalingStatus,
    RoleStatus,
    ScalingStatus,
    TransferStatus,
)
from .transfer import KVTransfer, LoadFailurePolicy, TransferBackend, TransferMode, WriteBack, WriteBackMode

KIND = "DisaggInference"
PLURAL = "disagginferences"
SCALER_KIND = "DisaggInferenceScaler"
SCALER_PLURAL = "disagginferencescalers"

__all__ = [
    "API_VERSION",
    "DERIVED_RESOURCES",
    "EFA",
    "GROUP",
    "KIND",
    "MAX_NAME_LENGTH",
    "PLURAL",
    "SCALER_KIND",
    "SCALER_PLURAL",
    "TLS",
    "VERSION",
    "ApiObject",
    "Auth",
    "Autoscaling",
    "AutoscalingMode",
    "Behavior",
    "Colocate",
    "Condition",
    "ConditionStatus",
    "Deadlines",
    "Device",
    "DisaggInference",
    "DisaggInferenceScaler",
    "DisaggInferenceScalerSpec",
    "DisaggInferenceScalerStatus",
    "DisaggInferenceSpec",
    "DisaggInferenceStatus",
    "Drain",
    "Engine",
    "EnvFieldRef",
    "EnvKeyRef",
    "EnvSource",
    "EnvVar",
    "Fabric",
    "FabricType",
    "KVTransfer",
    "Limits",
    "LoadFailurePolicy",
    "LocalPrefill",
    "LocalPrefillMode",
    "Model",
    "ModelStorage",
    "NetworkPolicy",
    "Overload",
    "Parallelism",
    "Placement",
    "RatioBounds",
    "Resources",
    "ReuseStatus",
    "Role",
    "RoleResources",
    "RoleScaling",
    "RoleScalingStatus",
    "RoleStatus",
    "Rollout",
    "RolloutStrategy",
    "Router",
    "RouterPolicy",
    "RouterService",
    "RoutingPolicy",
    "ScaleDown",
    "ScaleUp",
    "ScalingStatus",
    "ScalingTargets",
    "SecretKeyRef",
    "ServiceType",
    "Session",
    "Signal",
    "StorageType",
    "Toleration",
    "TransferBackend",
    "TransferMode",
    "TransferStatus",
    "WriteBack",
    "WriteBackMode",
]
