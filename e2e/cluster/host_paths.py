"""Folders of the host under stable names, so that manifests can mount them with hostPath.

    /var/lib/disagg-local/engine              the engine bundle
    /var/lib/disagg-local/models/<name>       a model

They are links: kubelet and containerd resolve them when a pod starts.
"""

from pathlib import Path, PurePosixPath

from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import EXPOSED


def expose(name: str, target: Path, root: Path = EXPOSED) -> Path:
    """Make the folder `target` known to pods as `root/name`; replaces an earlier target of that name.

    Raises:
        ClusterError: `target` is no folder, or `name` leads out of `root` or is taken by something that is no link.
    """
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts:
        raise ClusterError(
            f"Cannot expose a folder as {name!r}: want a relative name such as models/smollm2-135m."
        )
    if not target.is_dir():
        raise ClusterError(f"Cannot expose {target} to pods as {root / name}: it is not a folder.")
    link = root / name
    if link.exists() and not link.is_symlink():
        raise ClusterError(
            f"Cannot expose {target} as {link}: something that is not ours is there; remove it."
        )
    link.parent.mkdir(parents=True, exist_ok=True)
    unfinished = link.with_name(f".{link.name}.new")
    unfinished.unlink(missing_ok=True)
    unfinished.symlink_to(target.resolve())
    unfinished.replace(link)
    return link


def conceal_all(root: Path = EXPOSED) -> None:
    """Remove every link below `root` and the folders that this leaves empty; anything else stays."""
    if not root.is_dir():
        return
    for path in sorted(root.rglob("*"), key=lambda path: len(path.parts), reverse=True):
        if path.is_symlink():
            path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    if not any(root.iterdir()):
        root.rmdir()
