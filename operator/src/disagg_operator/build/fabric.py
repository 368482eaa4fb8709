"""What an engine pod needs for its devices and for the network that carries KV."""

from ..api.types import DisaggInferenceSpec, FabricType, Role
from ..naming import Manifest

GPU = "nvidia.com/gpu"
EFA_DEVICE = "vpc.amazonaws.com/efa"
HUGEPAGES = "hugepages-2Mi"


def fabric_resources(spec: DisaggInferenceSpec, role: Role) -> dict[str, str]:
    """Extended resources of one pod; requests and limits alike. EFA devices go with GPUs, 16 for TP 8 on p5en."""
    if not spec.uses_gpus:
        return {}
    resources = {GPU: str(role.parallelism.devices)}
    efa = spec.fabric.effective_efa
    if efa is not None:
        resources[EFA_DEVICE] = str(role.parallelism.devices * efa.devices_per_gpu)
        if efa.hugepages_2mi != "0":
            resources[HUGEPAGES] = efa.hugepages_2mi
    return resources


def fabric_env(spec: DisaggInferenceSpec) -> list[Manifest]:
    """Defaults for the fabric; a variable of the same name in engine.env wins."""
    efa = spec.fabric.effective_efa
    if efa is not None:
        values = {
            "FI_PROVIDER": "efa",
            "FI_EFA_USE_DEVICE_RDMA": "1",
            "FI_EFA_USE_HUGE_PAGE": "0" if efa.hugepages_2mi == "0" else "1",
            "FI_EFA_ENABLE_SHM_TRANSFER": "0",
            "FI_EFA_FORK_SAFE": "0",
            "FI_EFA_MR_MAX_CACHED_COUNT": "524288",
        }
    elif not spec.uses_gpus and spec.fabric.type is FabricType.NONE:
        # The pod network, and no pinning: vLLM's own choice of cores assumes that a machine has one engine.
        values = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    else:
        values = {}
    return [{"name": name, "value": value} for name, value in values.items()]


def fabric_security(spec: DisaggInferenceSpec) -> Manifest:
    """The main container's security context: EFA pins memory."""
    efa = spec.fabric.effective_efa
    if efa is None:
        return {"allowPrivilegeEscalation": False}
    if efa.privileged:
        return {"privileged": True}
    return {"allowPrivilegeEscalation": False, "capabilities": {"add": ["IPC_LOCK"]}}
