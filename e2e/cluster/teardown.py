"""Taking a cluster down, also one whose run was killed half-way. Leaves nothing behind.

What belongs to the cluster is recognised by names that only we give: network namespaces and control groups that start
with the layout's prefix, processes inside them, mounts below our folders. No memory of the run is needed, except for
the values of the sysctls that kubelet changed and for which folders were not there before.
"""

import os
import shutil
import signal
import time
from pathlib import Path

from e2e.cluster import cgroups, state
from e2e.cluster.errors import ClusterError, CommandError
from e2e.cluster.host_paths import conceal_all
from e2e.cluster.layout import Layout
from e2e.cluster.shell import run

_NETNS = Path("/run/netns")
_KILL_LIMIT_SECONDS = 60.0


def take_down(layout: Layout) -> bool:
    """Remove every trace of the cluster; returns whether there was any.

    Raises:
        ClusterError: something cannot be removed; a second call goes on where this one stopped.
    """
    remembered = state.load(layout)
    if not is_present(layout):
        return False
    if remembered is not None and remembered.ready:
        state.save(layout, remembered.with_changes(ready=False))
    kill_everything(layout)
    _unmount_below(layout.run, layout.data)
    cgroups.remove(layout.prefix)
    _remove_namespaces(layout)
    if remembered is not None:
        _restore_sysctls(remembered.sysctls)
    _remove_log_links(layout)
    conceal_all(layout.exposed)
    _remove_tree(layout.data)
    if remembered is not None:
        _remove_outside_folders(remembered.absent_folders)
    # Last, since it holds the memory that a repeated attempt needs.
    _remove_tree(layout.run)
    return True


def is_present(layout: Layout) -> bool:
    """Whether anything of a cluster is on this machine."""
    return bool(
        layout.run.exists() or layout.data.exists() or namespaces(layout) or cgroups.ours(layout.prefix)
    )


def namespaces(layout: Layout) -> list[Path]:
    """Our network namespaces."""
    return sorted(_NETNS.glob(f"{layout.prefix}*"))


def our_processes(layout: Layout) -> set[int]:
    """Processes in our network namespaces or control groups, this one excepted."""
    networks = {_identity(path) for path in namespaces(layout)} - {None}
    found = cgroups.processes(layout.prefix)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _identity(entry / "ns" / "net") in networks:
            found.add(int(entry.name))
    return found - {os.getpid()}


def kill_everything(layout: Layout, limit: float = _KILL_LIMIT_SECONDS) -> None:
    """Kill the cluster's processes at once, as a power cut would, until none is left.

    Raises:
        ClusterError: some still run after `limit` seconds.
    """
    deadline = time.monotonic() + limit
    while left := our_processes(layout):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            raise ClusterError(f"These processes of the cluster do not end, even killed: {sorted(left)}.")
        time.sleep(0.05)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _mount_points() -> list[str]:
    """Every mount point, in the order in which they were mounted."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    # The kernel writes blanks and the like as octal escapes.
    return [line.split()[4].encode().decode("unicode_escape") for line in lines]


def _unmount_below(*roots: Path) -> None:
    prefixes = tuple(f"{root}/" for root in roots)
    while mounts := [point for point in _mount_points() if point.startswith(prefixes)]:
        # The newest first: a mount may lie on another.
        run(["umount", "--lazy", *reversed(mounts)], "Unmounting what pods had mounted")


def _remove_namespaces(layout: Layout) -> None:
    for path in namespaces(layout):
        run(["ip", "netns", "del", path.name], f"Removing the network namespace {path.name}")
    link = Path("/sys/class/net") / layout.host_link
    if link.exists():
        try:
            run(["ip", "link", "del", link.name], "Removing the host's link into the cluster")
        except CommandError:
            # It vanishes by itself, a little after its other end did.
            if link.exists():
                raise


def _restore_sysctls(values: dict[str, str]) -> None:
    for name, value in values.items():
        path = Path("/proc/sys") / name
        if path.read_text().strip() != value:
            path.write_text(value)


def _remove_log_links(layout: Layout) -> None:
    folder = Path("/var/log/containers")
    if folder.is_dir():
        for link in folder.iterdir():
            if link.is_symlink() and str(link.readlink()).startswith(f"{layout.data}/"):
                link.unlink()


def _remove_outside_folders(folders: tuple[str, ...]) -> None:
    """Remove folders that components made outside ours, unless somebody else has put something in them."""
    for name in folders:
        folder = Path(name)
        if folder == _NETNS and folder.is_dir() and not any(folder.iterdir()):
            # `ip netns add` mounts this folder on itself the first time.
            for _ in range(_mount_points().count(name)):
                run(["umount", name], f"Unmounting {name}")
        for path in sorted([*folder.rglob("*"), folder], key=lambda path: len(path.parts), reverse=True):
            if path.is_socket():
                path.unlink()
            elif path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
                path.rmdir()


def _remove_tree(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
