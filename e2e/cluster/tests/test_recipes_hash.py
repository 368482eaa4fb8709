"""Recipes: the pinned modules build what the recipes name, and the cache's key covers what decides a binary."""

import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.cluster import binaries, recipes
from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import GOTOOLS
from e2e.cluster.progress import Progress
from e2e.cluster.recipes import CLUSTER_PROGRAMS, TOOLSETS, Toolset


@pytest.mark.parametrize("toolset", TOOLSETS, ids=lambda toolset: toolset.name)
def test_go_mod_keeps_every_program(toolset: Toolset) -> None:
    module = (toolset.folder / "go.mod").read_text()
    tools = set(re.findall(r"^\s*(?:tool )?(\S+/\S+)$", module, re.MULTILINE))
    # A program of the module itself needs no tool line.
    packages = {package for package in toolset.programs.values() if package != "."}
    assert packages <= tools
    assert (toolset.folder / "go.sum").stat().st_size > 0


def test_every_module_has_a_recipe() -> None:
    assert {path.name for path in GOTOOLS.iterdir()} == {toolset.name for toolset in TOOLSETS}


def test_program_names_are_unique() -> None:
    names = [program for toolset in TOOLSETS for program in toolset.programs]
    assert len(names) == len(set(names))
    assert set(CLUSTER_PROGRAMS) <= set(names)


@pytest.mark.parametrize(
    "change",
    [
        {"stamps": ("-X a=b",)},
        {"cgo": True},
        {"tags": ("x",)},
        {"assets": {"m": ("f",)}},
        {"programs": {"a": "b"}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_changed_recipe_has_another_folder(change: dict[str, object]) -> None:
    toolset = next(toolset for toolset in TOOLSETS if toolset.name == "cni")
    assert dataclasses.replace(toolset, **change).digest() != toolset.digest()  # type: ignore[arg-type]


def test_a_changed_pin_has_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toolset = next(toolset for toolset in TOOLSETS if toolset.name == "cni")
    before = toolset.digest()
    shutil.copytree(GOTOOLS / "cni", tmp_path / "cni")
    monkeypatch.setattr(recipes, "GOTOOLS", tmp_path)
    assert toolset.digest() == before
    with (tmp_path / "cni" / "go.sum").open("a") as pins:
        pins.write("example.com/x v1.0.0 h1:x\n")
    assert toolset.digest() != before


def test_only_what_is_not_in_the_cache_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISAGG_CACHE", str(tmp_path))
    assert binaries.missing(["bridge", "loopback"]) == ["bridge", "loopback"]
    present = binaries.path_of("bridge")
    present.parent.mkdir(parents=True)
    # Half a program beside its final place is no program.
    (present.parent / ".loopback.building").touch()
    present.touch()
    assert binaries.missing(["bridge", "loopback"]) == ["loopback"]


def test_a_program_without_its_files_is_not_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISAGG_CACHE", str(tmp_path))
    kwok = binaries.path_of("kwok")
    kwok.parent.mkdir(parents=True)
    kwok.touch()
    assert binaries.missing(["kwok"]) == ["kwok"]


def test_no_pin_names_a_host_to_fetch_from() -> None:
    for path in GOTOOLS.rglob("*"):
        if path.is_file():
            assert "proxy." not in path.read_text(), path


GO = """\
#!/bin/sh
[ "$2" = download ] && echo '{{"Dir": "{folder}"}}' && exit 0
echo >> {folder}/builds
[ $(wc -l < {folder}/builds) -gt {failures} ] || {{ echo 'dial tcp: i/o timeout' >&2; exit 1; }}
for word; do [ "$last" = -o ] && echo > "$word"; last=$word; done
"""


@pytest.fixture
def failing_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """A `go` that cannot reach its proxy so many times; what it counts is in the file returned."""
    monkeypatch.setenv("DISAGG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(binaries, "_PAUSE_SECONDS", 0.0)

    def write(failures: int) -> Path:
        go = tmp_path / "go"
        go.write_text(GO.format(folder=tmp_path, failures=failures))
        go.chmod(0o755)
        return tmp_path / "builds"

    return write


def test_a_proxy_that_fails_at_times_costs_no_build(failing_go: Callable[[int], Path]) -> None:
    failing_go(binaries._ATTEMPTS - 1)
    assert binaries.ensure(["bridge"], Progress())["bridge"].is_file()


def test_a_proxy_that_never_answers_is_told_of(failing_go: Callable[[int], Path]) -> None:
    builds = failing_go(100)
    with pytest.raises(ClusterError, match="i/o timeout"):
        binaries.ensure(["bridge"], Progress())
    assert len(builds.read_text().splitlines()) == binaries._ATTEMPTS
