"""Exposed folders: replaced at once, removed without a trace, and nothing of others touched."""

from pathlib import Path

import pytest

from e2e.cluster import ClusterError
from e2e.cluster.host_paths import conceal_all, expose


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "exposed"


def folder(tmp_path: Path, name: str) -> Path:
    path = tmp_path / name
    path.mkdir()
    (path / "name").write_text(name)
    return path


def test_a_folder_is_found_under_its_stable_name(tmp_path: Path, root: Path) -> None:
    path = expose("models/small", folder(tmp_path, "one"), root)
    assert path == root / "models" / "small"
    assert (path / "name").read_text() == "one"


def test_a_second_target_replaces_the_first(tmp_path: Path, root: Path) -> None:
    expose("engine", folder(tmp_path, "one"), root)
    path = expose("engine", folder(tmp_path, "two"), root)
    assert (path / "name").read_text() == "two"
    assert [entry.name for entry in root.iterdir()] == ["engine"]


def test_concealing_removes_links_and_empty_folders_but_no_target(tmp_path: Path, root: Path) -> None:
    target = folder(tmp_path, "one")
    expose("engine", target, root)
    expose("models/small", target, root)
    conceal_all(root)
    assert not root.exists()
    assert (target / "name").read_text() == "one"
    conceal_all(root)


def test_concealing_keeps_what_somebody_else_put_there(tmp_path: Path, root: Path) -> None:
    expose("models/small", folder(tmp_path, "one"), root)
    (root / "models" / "note").write_text("mine")
    conceal_all(root)
    assert [str(path.relative_to(root)) for path in sorted(root.rglob("*"))] == ["models", "models/note"]


@pytest.mark.parametrize("name", ["", "/etc", "../x", "models/../../x"])
def test_a_name_that_leads_out_is_refused(tmp_path: Path, root: Path, name: str) -> None:
    with pytest.raises(ClusterError, match="relative name"):
        expose(name, folder(tmp_path, "one"), root)
    assert not root.exists()


def test_a_target_that_is_no_folder_is_refused(tmp_path: Path, root: Path) -> None:
    with pytest.raises(ClusterError, match="it is not a folder"):
        expose("engine", tmp_path / "absent", root)


def test_something_that_is_no_link_is_never_replaced(tmp_path: Path, root: Path) -> None:
    (root / "engine").mkdir(parents=True)
    with pytest.raises(ClusterError, match="not ours"):
        expose("engine", folder(tmp_path, "one"), root)
