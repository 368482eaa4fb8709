"""Control groups, on trees of plain files that look like the kernel's."""

from pathlib import Path

import pytest

from e2e.cluster import ClusterError, cgroups


def hierarchy(root: Path, *files: tuple[str, str]) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name, content in (("cgroup.procs", ""), *files):
        (root / name).write_text(content)
    return root


def fill(group: Path, *pids: int) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))


@pytest.fixture
def first_version(tmp_path: Path) -> Path:
    """Version 1: one hierarchy per controller, one of them under two names."""
    hierarchy(tmp_path / "memory")
    hierarchy(tmp_path / "cpuset", ("cpuset.cpus", "0-1\n"), ("cpuset.mems", "0\n"))
    hierarchy(tmp_path / "cpu,cpuacct")
    (tmp_path / "cpu").symlink_to("cpu,cpuacct")
    return tmp_path


@pytest.fixture
def second_version(tmp_path: Path) -> Path:
    files = (("cgroup.controllers", "cpuset cpu io memory pids\n"), ("cgroup.subtree_control", ""))
    return hierarchy(tmp_path, *files)


def test_a_node_has_a_group_in_every_hierarchy(first_version: Path) -> None:
    cgroups.make("test-node1", first_version)
    assert {group.parent.name for group in cgroups.ours("test-", first_version)} == {
        "memory",
        "cpuset",
        "cpu,cpuacct",
    }


def test_a_cpuset_group_gets_its_parents_processors(first_version: Path) -> None:
    cgroups.make("test-node1", first_version)
    assert (first_version / "cpuset" / "test-node1" / "cpuset.cpus").read_text() == "0-1\n"
    assert (first_version / "cpuset" / "test-node1" / "cpuset.mems").read_text() == "0\n"


def test_one_hierarchy_gives_one_group(second_version: Path) -> None:
    cgroups.make("test-node1", second_version)
    assert cgroups.ours("test-", second_version) == [second_version / "test-node1"]
    # The kernel accepts one controller a write; the last one stays in a plain file.
    assert (second_version / "cgroup.subtree_control").read_text() == "+io"


def test_processes_are_found_in_nested_groups_of_ours_alone(first_version: Path) -> None:
    fill(first_version / "memory" / "test-node1", 10)
    fill(first_version / "memory" / "test-node1" / "kubepods" / "pod1", 11, 12)
    fill(first_version / "cpuset" / "test-node2", 13)
    fill(first_version / "memory" / "other", 99)
    assert cgroups.processes("test-", first_version) == {10, 11, 12, 13}


def test_groups_are_removed_deepest_first(first_version: Path) -> None:
    deep = first_version / "memory" / "test-node1" / "kubepods" / "pod1"
    deep.mkdir(parents=True)
    (first_version / "memory" / "other").mkdir()
    cgroups.remove("test-", first_version, limit=1)
    assert cgroups.ours("test-", first_version) == []
    assert (first_version / "memory" / "other").is_dir()


def test_a_group_that_stays_busy_is_named(first_version: Path) -> None:
    # A plain file keeps the folder from being removed, as a process keeps a group.
    fill(first_version / "memory" / "test-node1", 10)
    with pytest.raises(ClusterError, match="memory/test-node1"):
        cgroups.remove("test-", first_version, limit=0)
