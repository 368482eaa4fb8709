"""docker-archive files, as `docker save` writes them; containerd, kind and Docker all read them.

Format: the image specification v1.2 of Moby. `manifest.json` lists, for each image, its configuration, its names and
its layers' tars; layers that images share are in the file once.
"""

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from e2e.images.layer import Layer

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Image:
    """An image: layers from the bottom up, and how a container of it starts."""

    reference: str
    """Name and tag, such as localhost/disagg/operator:dev."""
    layers: tuple[Layer, ...]
    entrypoint: tuple[str, ...] = ()
    user: str = ""
    env: dict[str, str] = field(default_factory=dict)

    @cached_property
    def config(self) -> bytes:
        """The image's configuration as JSON."""
        machine = platform.machine()
        container: dict[str, Any] = {
            "Env": [f"{name}={value}" for name, value in self.env.items()],
            "WorkingDir": "/",
        }
        if self.entrypoint:
            container["Entrypoint"] = list(self.entrypoint)
        if self.user:
            container["User"] = self.user
        return json.dumps(
            {
                "architecture": _ARCHITECTURES.get(machine, machine),
                "os": "linux",
                "created": "1970-01-01T00:00:00Z",
                "config": container,
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer.digest}" for layer in self.layers]},
                "history": [{"created": "1970-01-01T00:00:00Z", "created_by": "disagg"} for _ in self.layers],
            },
            sort_keys=True,
        ).encode()

    @property
    def digest(self) -> str:
        """SHA-256 of the configuration in hex: the image's id, which covers all its content."""
        return hashlib.sha256(self.config).hexdigest()


def write_archive(images: Sequence[Image], output: Path) -> None:
    """Write one archive with all `images`."""
    manifest = [
        {
            "Config": f"{image.digest}.json",
            "RepoTags": [image.reference],
            "Layers": [f"{layer.digest}.tar" for layer in image.layers],
        }
        for image in images
    ]
    layers = {layer.digest: layer for image in images for layer in image.layers}
    with tarfile.open(output, "w", format=tarfile.GNU_FORMAT) as tar:
        for image in images:
            _add_bytes(tar, f"{image.digest}.json", image.config)
        for digest, layer in layers.items():
            info = tarfile.TarInfo(f"{digest}.tar")
            info.size = layer.tar.stat().st_size
            with layer.tar.open("rb") as content:
                tar.addfile(info, content)
        _add_bytes(tar, "manifest.json", json.dumps(manifest).encode())


def _add_bytes(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))
