"""Image layers as reproducible tar files: the same files give the same bytes, whenever and wherever it is done."""

import hashlib
import io
import json
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from e2e.images.engine_cache import build_once, cache_root

_KEPT_PER_NAME = 5


@dataclass(frozen=True)
class Entry:
    """One path of a layer. Exactly one of `source`, `content` and `link` is set; none of them means a folder."""

    path: str
    """Relative to the image's root, such as usr/bin."""
    source: Path | None = None
    content: bytes | None = None
    link: str | None = None
    mode: int = 0o755


@dataclass(frozen=True)
class Layer:
    """A layer in the cache."""

    tar: Path
    digest: str
    """SHA-256 of the uncompressed tar, in hex."""


def folder_entries(source: Path, target: str) -> list[Entry]:
    """Everything below the folder `source`, placed below `target` in the image. Links are kept as they are."""
    entries = [Entry(target)]
    for path in sorted(source.rglob("*")):
        place = f"{target}/{path.relative_to(source)}"
        if path.is_symlink():
            entries.append(Entry(place, link=str(path.readlink())))
        elif path.is_dir():
            entries.append(Entry(place))
        else:
            entries.append(Entry(place, source=path, mode=0o755 if path.stat().st_mode & 0o100 else 0o644))
    return entries


def write_layer(entries: Iterable[Entry], output: Path) -> str:
    """Write a layer's tar with missing parent folders added; returns its SHA-256 in hex.

    Everything belongs to root and carries the time 0.

    Raises:
        ValueError: two entries claim the same path.
    """
    by_path: dict[str, Entry] = {}
    for entry in entries:
        if entry.path in by_path and by_path[entry.path] != entry:
            raise ValueError(f"Two entries of one layer claim /{entry.path}.")
        by_path[entry.path] = entry
    for path in list(by_path):
        for parent in list(Path(path).parents)[:-1]:
            by_path.setdefault(str(parent), Entry(str(parent)))
    with output.open("wb") as raw:
        hashing = _HashingWriter(raw)
        with tarfile.open(fileobj=hashing, mode="w|", format=tarfile.GNU_FORMAT) as tar:
            for path in sorted(by_path):
                _add(tar, by_path[path])
    return hashing.sha.hexdigest()


def cached_layer(name: str, key: str, gather: Callable[[Path], Iterable[Entry]]) -> Layer:
    """The layer `name` with content decided by `key`.

    Only when the cache lacks it, `gather` is called with a scratch folder that lives until the layer is written.
    """

    def build(folder: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="disagg-layer-") as scratch:
            digest = write_layer(gather(Path(scratch)), folder / "layer.tar")
        (folder / "layer.json").write_text(json.dumps({"digest": digest}))

    folder = build_once(cache_root() / "layers" / f"{name}-{key[:16]}", build, lambda _: None)
    _forget_old(folder.parent, name)
    return Layer(folder / "layer.tar", json.loads((folder / "layer.json").read_text())["digest"])


def _forget_old(cache: Path, name: str) -> None:
    """Remove all but the newest layers of a name; a few stay, for another checkout or a step back."""
    same_name = [path for path in cache.glob(f"{name}-*") if len(path.name) == len(name) + 17]
    for old in sorted(same_name, key=lambda path: path.stat().st_mtime, reverse=True)[_KEPT_PER_NAME:]:
        shutil.rmtree(old, ignore_errors=True)


def fingerprint(*parts: object) -> str:
    """Hex digest of the parts' representations, as a cache key."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


class _HashingWriter(io.RawIOBase):
    def __init__(self, raw: io.BufferedWriter) -> None:
        self._raw = raw
        self.sha = hashlib.sha256()

    def write(self, data: object) -> int:
        block = bytes(data)  # type: ignore[call-overload]
        self.sha.update(block)
        return self._raw.write(block)


def _add(tar: tarfile.TarFile, entry: Entry) -> None:
    info = tarfile.TarInfo(entry.path)
    info.mode = entry.mode
    if entry.link is not None:
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, entry.link, 0o777
        tar.addfile(info)
    elif entry.source is not None:
        info.size = entry.source.stat().st_size
        with entry.source.open("rb") as content:
            tar.addfile(info, content)
    elif entry.content is not None:
        info.size = len(entry.content)
        tar.addfile(info, io.BytesIO(entry.content))
    else:
        info.type = tarfile.DIRTYPE
        tar.addfile(info)
