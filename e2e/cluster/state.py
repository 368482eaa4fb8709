"""What is remembered about the running cluster, in one file under its run folder."""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from e2e.cluster.layout import Layout

NODE_SYSCTLS = (
    # kubelet sets these for the whole machine, and `down` puts them back.
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
OUTSIDE_FOLDERS = (
    # Components make these whatever they are told; `down` removes those that were not there, when they are empty.
    "/run/netns",
    "/run/containerd",
    "/var/log/containers",
    "/var/lib/kubelet",
    "/var/lib/cni",
    "/usr/libexec/kubernetes",
    "/etc/kubernetes",
)


@dataclass(frozen=True)
class State:
    """One cluster. `ready` is false while it is being started or taken down."""

    ready: bool
    nodes: int
    network: str
    sysctls: dict[str, str] = field(default_factory=dict)
    """Values before the first kubelet started."""
    absent_folders: tuple[str, ...] = ()
    """Those of OUTSIDE_FOLDERS that did not exist before."""

    @classmethod
    def begin(cls, nodes: int, network: str) -> "State":
        """The state of a cluster that is about to start on this machine."""
        sysctls = {
            name: path.read_text().strip()
            for name in NODE_SYSCTLS
            if (path := Path("/proc/sys") / name).exists()
        }
        absent = tuple(folder for folder in OUTSIDE_FOLDERS if not Path(folder).exists())
        return cls(ready=False, nodes=nodes, network=network, sysctls=sysctls, absent_folders=absent)

    def with_changes(self, **changes: object) -> "State":
        """A copy with some fields replaced."""
        return replace(self, **changes)  # type: ignore[arg-type]


def load(layout: Layout) -> State | None:
    """The remembered state; None where there is none or it cannot be read."""
    try:
        raw = json.loads((layout.run / "state.json").read_text())
        # What another version of this file remembered besides does not matter.
        known = {name: raw[name] for name in State.__dataclass_fields__ if name in raw}
        return State(**{**known, "absent_folders": tuple(raw["absent_folders"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def save(layout: Layout, state: State) -> None:
    """Remember `state`, atomically."""
    layout.run.mkdir(parents=True, exist_ok=True)
    unfinished = layout.run / ".state.json"
    unfinished.write_text(json.dumps(asdict(state), indent=1) + "\n")
    unfinished.rename(layout.run / "state.json")
