"""What the local cluster needs of the machine, all of it checked before anything is changed."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.errors import CommandError, PreflightError
from e2e.cluster.layout import Layout
from e2e.cluster.network import Network, overlapping_routes
from e2e.cluster.recipes import toolset_of
from e2e.cluster.shell import run
from e2e.images.engine_cache import cache_root

BUILD_SPACE_GIB = 14
"""Go's module cache 4 GiB, its build cache 7 GiB, the programs 1 GiB, and some air."""
_RUN_SPACE_GIB = 3

Release = tuple[int, int, int]

RUN_PROGRAMS = {
    # Program -> Debian package.
    "ip": "iproute2",
    "nft": "nftables",
    "conntrack": "conntrack",
    "nsenter": "util-linux",
    "mount": "mount",
    "ldd": "libc-bin",
}
BUILD_PROGRAMS = {"gcc": "gcc", "pkg-config": "pkg-config"}


@dataclass(frozen=True)
class Need:
    """One thing that is missing and how to get it."""

    what: str
    remedy: str


def check(
    layout: Layout,
    network: Network,
    to_build: Sequence[str],
    say: Callable[[str], None],
    also: Sequence[Need] = (),
) -> None:
    """Check everything; on Debian, as root, first install the packages that are missing.

    `to_build` names the programs that are not in the cache; `also` are needs that the caller has found.

    Raises:
        PreflightError: lists all that is missing, with a remedy for each.
    """
    needs = [*_root(), *_go(to_build), *_space(layout, to_build), *also]
    packages = missing_packages(building=bool(to_build))
    if packages and not needs and _can_install():
        install(packages, say)
        packages = missing_packages(building=bool(to_build))
    if packages:
        needs.append(
            Need(f"programs of the packages {', '.join(packages)}", f"apt-get install {' '.join(packages)}")
        )
    if not needs:
        needs = [*_kernel(), *_addresses(layout, network)]
    if needs:
        lines = [f"  - {need.what}\n      {need.remedy}" for need in needs]
        raise PreflightError(
            "The local cluster cannot start on this machine yet. Missing:\n" + "\n".join(lines)
        )


def missing_packages(*, building: bool) -> list[str]:
    """Debian packages whose programs or headers are not there."""
    wanted = RUN_PROGRAMS | (BUILD_PROGRAMS if building else {})
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    missing = [package for program, package in wanted.items() if shutil.which(program, path=path) is None]
    if not _compiles_static_c():
        missing.append("gcc libc6-dev")
    if building and not _has_library("libseccomp"):
        missing.append("libseccomp-dev")
    return sorted({name for entry in missing for name in entry.split()})


def install(packages: Sequence[str], say: Callable[[str], None]) -> None:
    """Install Debian packages.

    Raises:
        CommandError: apt-get failed.
    """
    say(f"Installing Debian packages: {' '.join(packages)}")
    env = {"DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "update", "-q"], "Fetching Debian's package lists", env=env, timeout=300)
    command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *packages]
    run(command, "Installing Debian packages", env=env, timeout=900)


def go_release(text: str) -> Release | None:
    """The release that `go version` prints (go1.26.8) or a go.mod wants (go 1.26.6); None if there is none."""
    match = re.search(r"\bgo ?(\d+)\.(\d+)(?:\.(\d+))?", text)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def wanted_go(to_build: Sequence[str]) -> Release:
    """The oldest release of Go that builds all of these programs."""
    modules = {toolset_of(program).folder / "go.mod" for program in to_build}
    releases = [release for module in modules if (release := go_release(module.read_text()))]
    return max(releases, default=(0, 0, 0))


def _root() -> list[Need]:
    if os.geteuid() == 0:
        return []
    remedy = "run the same command with sudo, or use a cluster of your own: CLUSTER=kind or CLUSTER=existing"
    return [Need("root: network namespaces, mounts and control groups need it", remedy)]


def _go(to_build: Sequence[str]) -> list[Need]:
    if not to_build:
        return []
    oldest = wanted_go(to_build)
    wanted = ".".join(str(part) for part in oldest)
    remedy = f"install Go {wanted} or newer and put its bin folder in PATH"
    what = f"Go {wanted}, to build {', '.join(to_build[:3])}{' and others' if len(to_build) > 3 else ''}"
    try:
        printed = run(["go", "version"], "Asking for Go's version")
    except CommandError:
        return [Need(f"{what}: there is no `go` in PATH", remedy)]
    release = go_release(printed)
    if release is None or release < oldest:
        return [Need(f"{what}: this is {printed.strip()}", remedy)]
    return []


def _space(layout: Layout, to_build: Sequence[str]) -> list[Need]:
    wanted = {cache_root(): BUILD_SPACE_GIB if len(to_build) > 3 else 1, layout.data: _RUN_SPACE_GIB}
    needs = []
    for folder, gib in wanted.items():
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free / 2**30
        if free < gib:
            remedy = "free some space" + (
                "" if folder == layout.data else " or set DISAGG_CACHE to another disk"
            )
            needs.append(Need(f"{gib} GiB of disk at {folder}: {free:.1f} GiB are free", remedy))
    return needs


def _can_install() -> bool:
    return os.geteuid() == 0 and Path("/etc/debian_version").exists() and shutil.which("apt-get") is not None


def _compiles_static_c() -> bool:
    """Whether a static program can be linked; the pause image is one."""
    command = ["gcc", "-static", "-x", "c", "-o", os.devnull, "-"]
    try:
        return (
            subprocess.run(
                command, input=b"int main(void){return 0;}", capture_output=True, check=False
            ).returncode
            == 0
        )
    except FileNotFoundError:
        return False


def _has_library(name: str) -> bool:
    try:
        return (
            subprocess.run(["pkg-config", "--exists", name], capture_output=True, check=False).returncode == 0
        )
    except FileNotFoundError:
        return False


def _kernel() -> list[Need]:
    needs = []
    probes = {
        "network namespaces with bridges": [
            "unshare",
            "--net",
            "ip",
            "link",
            "add",
            "probe",
            "type",
            "bridge",
        ],
        "nftables in the kernel": ["unshare", "--net", "nft", "add", "table", "ip", "probe"],
    }
    for what, command in probes.items():
        try:
            run(command, "Probing the kernel")
        except CommandError as error:
            needs.append(
                Need(f"{what}: {error.output.strip()}", "a machine or container that is allowed to use them")
            )
    if modprobe := shutil.which("modprobe", path="/usr/sbin:/sbin"):
        subprocess.run([modprobe, "-aq", "overlay", "br_netfilter"], capture_output=True, check=False)
    if "overlay" not in Path("/proc/filesystems").read_text().split():
        needs.append(Need("the overlay file system in the kernel", "modprobe overlay"))
    return needs


def _addresses(layout: Layout, network: Network) -> list[Need]:
    routes = overlapping_routes(layout, network)
    if not routes:
        return []
    remedy = 'choose another network: export DISAGG_CLUSTER_NETWORK="10.89"'
    return [Need(f"the addresses {network.cidr}: this machine uses {'; '.join(routes)}", remedy)]
