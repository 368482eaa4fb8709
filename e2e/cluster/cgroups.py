"""One root control group a node. With a shared root each kubelet kills the other's pods as orphans."""

import time
from collections.abc import Iterator
from pathlib import Path

from e2e.cluster.errors import ClusterError

ROOT = Path("/sys/fs/cgroup")
_WANTED = ("cpu", "cpuset", "memory", "pids", "io", "hugetlb")


def is_unified(root: Path = ROOT) -> bool:
    """Whether the machine has control groups of version 2 alone."""
    return (root / "cgroup.controllers").exists()


def hierarchies(root: Path = ROOT) -> list[Path]:
    """The roots of all hierarchies: one in version 2, one per controller in version 1."""
    if is_unified(root):
        return [root]
    # cpu,cpuacct is often one hierarchy under three names.
    return sorted({path.resolve() for path in root.iterdir() if (path / "cgroup.procs").exists()})


def make(name: str, root: Path = ROOT) -> None:
    """Make the group `name` at the root of every hierarchy, ready to hold processes and groups."""
    if is_unified(root):
        available = (root / "cgroup.controllers").read_text().split()
        for controller in _WANTED:
            if controller in available:
                (root / "cgroup.subtree_control").write_text(f"+{controller}")
        (root / name).mkdir(exist_ok=True)
        return
    for hierarchy in hierarchies(root):
        group = hierarchy / name
        group.mkdir(exist_ok=True)
        for inherited in ("cpuset.cpus", "cpuset.mems"):
            # A cpuset group of version 1 starts empty, and nothing can enter it before it is filled.
            if (hierarchy / inherited).exists():
                (group / inherited).write_text((hierarchy / inherited).read_text())


def ours(prefix: str, root: Path = ROOT) -> list[Path]:
    """The root groups of the nodes whose names start with `prefix`, in all hierarchies."""
    return sorted(
        group for hierarchy in hierarchies(root) for group in hierarchy.glob(f"{prefix}*") if group.is_dir()
    )


def processes(prefix: str, root: Path = ROOT) -> set[int]:
    """Ids of the processes in our groups, the groups below them included."""
    found: set[int] = set()
    for group in _descendants(prefix, root):
        try:
            found.update(int(line) for line in (group / "cgroup.procs").read_text().split())
        except OSError:
            continue
    return found


def remove(prefix: str, root: Path = ROOT, limit: float = 60.0) -> None:
    """Remove our groups, deepest first; a group is busy until the kernel has buried its last process.

    Raises:
        ClusterError: some are still there after `limit` seconds.
    """
    deadline = time.monotonic() + limit
    while True:
        left = [group for group in _descendants(prefix, root) if not _removed(group)]
        if not left:
            return
        if time.monotonic() > deadline:
            names = ", ".join(str(group) for group in left[:5])
            raise ClusterError(
                f"Could not remove {len(left)} control groups ({names}): processes are still in them."
            )
        time.sleep(0.05)


def _descendants(prefix: str, root: Path) -> Iterator[Path]:
    for top in ours(prefix, root):
        groups = [path for path in top.rglob("*/") if path.is_dir()]
        yield from sorted(groups, key=lambda path: len(path.parts), reverse=True)
        yield top


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
