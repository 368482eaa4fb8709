"""The part of the spec about the model and its files."""

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from .base import ApiObject, Rule


class StorageType(StrEnum):
    """Where an engine keeps the model's files."""

    NONE = "None"
    PVC = "PVC"
    HOST_PATH = "HostPath"


class SecretKeyRef(ApiObject):
    """A key of a Secret in the same namespace."""

    name: Annotated[str, Field(min_length=1, max_length=253, description="Name of the Secret.")]
    key: Annotated[str, Field(min_length=1, max_length=253, description="Key in the Secret.")]


class ModelStorage(ApiObject):
    """Where the model's files are kept between engine starts."""

    type: Annotated[
        StorageType,
        Field(
            description="None: every pod downloads the model into its own disk at each start. "
            "PVC: an existing claim is mounted (ReadWriteMany when pods are on several nodes). "
            "HostPath: a directory of the node is mounted."
        ),
    ] = StorageType.NONE
    claim_name: Annotated[
        str | None, Field(min_length=1, max_length=253, description="The existing claim. Only with type PVC.")
    ] = None
    path: Annotated[
        str | None,
        Field(max_length=1024, pattern=r"^/.*", description="The node's directory. Only with type HostPath."),
    ] = None
    mount_path: Annotated[
        str,
        Field(
            max_length=1024,
            pattern=r"^/[^:]*[^:/]$",
            description="Where the storage appears in the engine's container. With hf:// it is the Hugging Face cache "
            "and writable; with file:// the model is read beneath it, read-only.",
        ),
    ] = "/models"

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.type == 'PVC' ? has(self.claimName) : !has(self.claimName)",
            "storage.claimName is required with type PVC and not allowed otherwise",
            ".claimName",
        ),
        Rule(
            "self.type == 'HostPath' ? has(self.path) : !has(self.path)",
            "storage.path is required with type HostPath and not allowed otherwise",
            ".path",
        ),
    )


class Model(ApiObject):
    """Which model is served, under which name, and from where its weights come."""

    uri: Annotated[
        str,
        Field(
            max_length=1024,
            pattern=r"^(hf|s3|pvc|file)://[^\s]+$",
            description="Where the weights come from: hf://ORG/NAME (Hugging Face), pvc://CLAIM/DIRECTORY (a claim of "
            "this namespace, mounted read-only), file:///DIRECTORY (a path in the container, see storage). "
            "s3://BUCKET/PREFIX is reserved and not implemented yet.",
        ),
    ]
    name: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=128,
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*$",
            description="The name that clients put in `model`. Default: ORG/NAME for hf://, else the last part of "
            "the uri.",
        ),
    ] = None
    revision: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=128,
            pattern=r"^[A-Za-z0-9._/-]+$",
            description="Commit, tag or branch on the hub; pin a commit in production. Only with hf://. Part of KV "
            "compatibility: engines of different revisions never exchange KV.",
        ),
    ] = None
    storage: Annotated[
        ModelStorage, Field(description="Where the model's files are kept between engine starts.")
    ] = ModelStorage()
    secret_ref: Annotated[
        SecretKeyRef | None,
        Field(description="The hub's access token, for gated models. Only with hf:// or s3://."),
    ] = None

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.revision) || self.uri.startsWith('hf://')",
            "model.revision only applies to hf:// models; a directory has no revisions: use another directory",
            ".revision",
        ),
        Rule(
            "!has(self.secretRef) || self.uri.startsWith('hf://') || self.uri.startsWith('s3://')",
            "model.secretRef only applies to hf:// and s3:// models: remove it",
            ".secretRef",
        ),
        Rule(
            "!self.uri.startsWith('hf://') || self.uri.matches('^hf://[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9._-]+)?$')",
            "model.uri must read hf://ORG/NAME; put a commit or tag into model.revision",
            ".uri",
        ),
        Rule(
            "!self.uri.startsWith('pvc://') || self.uri.matches('^pvc://[a-z0-9][a-z0-9.-]*(/.+)?$')",
            "model.uri must read pvc://CLAIM/DIRECTORY, with the claim's name in lower case",
            ".uri",
        ),
        Rule(
            "!self.uri.startsWith('pvc://') || self.storage.type == 'None'",
            "model.storage is not used with a pvc:// model, the claim in the uri is mounted: leave storage.type None",
            ".storage",
        ),
        Rule(
            "!self.uri.startsWith('file://') || self.uri.matches('^file:///[^/].*$')",
            "model.uri must be an absolute path: file:///DIRECTORY, with three slashes",
            ".uri",
        ),
        Rule(
            "!self.uri.startsWith('file://') || self.storage.type == 'None' || "
            "self.uri == 'file://' + self.storage.mountPath || "
            "self.uri.startsWith('file://' + self.storage.mountPath + '/')",
            "model.uri must lie in storage.mountPath, or the engine would not find the mounted files",
            ".uri",
        ),
    )

    @property
    def served_name(self) -> str:
        """The name that clients use: `name`, else ORG/NAME of a hub model, else the last part of the uri."""
        if self.name:
            return self.name
        rest = self.uri.split("://", 1)[1].strip("/")
        return rest if self.uri.startswith("hf://") else rest.rsplit("/", 1)[-1]
