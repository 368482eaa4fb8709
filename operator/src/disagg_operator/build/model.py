"""Where an engine finds its model: the argument for vLLM, and the volumes and variables that go with it."""

from dataclasses import dataclass

from ..api.types import Model, StorageType
from ..naming import Manifest


@dataclass(frozen=True)
class ModelAccess:
    """What `vllm serve` is given, and what the pod needs for it."""

    argument: str
    volumes: tuple[Manifest, ...] = ()
    mounts: tuple[Manifest, ...] = ()
    env: tuple[Manifest, ...] = ()


def model_access(model: Model) -> ModelAccess:
    """By the uri's scheme. Raises ValueError for one that this version cannot read (the caller has refused it before)."""
    scheme, _, rest = model.uri.partition("://")
    if scheme == "hf":
        return _hub(model, rest)
    if scheme == "pvc":
        claim, _, directory = rest.partition("/")
        root = model.storage.mount_path
        source = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        return _local(f"{root}/{directory}".rstrip("/"), root, source)
    if scheme == "file":
        return _local(rest, model.storage.mount_path, _storage(model, writable=False))
    raise ValueError(f"model.uri {model.uri}: scheme {scheme} is not implemented")


def _hub(model: Model, repository: str) -> ModelAccess:
    source = _storage(model, writable=True)
    cache = model.storage.mount_path if source else "/tmp/huggingface"
    env: list[Manifest] = [{"name": "HF_HOME", "value": cache}]
    if model.secret_ref:
        key = {"name": model.secret_ref.name, "key": model.secret_ref.key}
        env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": key}})
    if source is None:
        return ModelAccess(repository, env=tuple(env))
    mount = {"name": "model", "mountPath": cache}
    return ModelAccess(repository, ({"name": "model", **source},), (mount,), tuple(env))


def _local(path: str, root: str, source: Manifest | None) -> ModelAccess:
    env = ({"name": "HF_HUB_OFFLINE", "value": "1"},)
    if source is None:  # in the image, or mounted by the role's template
        return ModelAccess(path, env=env)
    mount = {"name": "model", "mountPath": root, "readOnly": True}
    return ModelAccess(path, ({"name": "model", **source},), (mount,), env)


def _storage(model: Model, *, writable: bool) -> Manifest | None:
    storage = model.storage
    if storage.type is StorageType.PVC:
        claim: Manifest = {"claimName": storage.claim_name}
        return {"persistentVolumeClaim": claim if writable else {**claim, "readOnly": True}}
    if storage.type is StorageType.HOST_PATH:
        # A model must be there; a cache may begin empty.
        return {"hostPath": {"path": storage.path, "type": "DirectoryOrCreate" if writable else "Directory"}}
    return None
