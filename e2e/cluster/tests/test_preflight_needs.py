"""Preflight: what is missing is listed with a remedy, before anything is changed."""

import os
import shutil
from pathlib import Path

import pytest

from e2e.cluster import preflight
from e2e.cluster.errors import PreflightError
from e2e.cluster.layout import Layout
from e2e.cluster.network import Network
from e2e.cluster.preflight import Need, go_release, wanted_go


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "run", tmp_path / "data", tmp_path / "exposed", "test-", "test0")


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("go version go1.26.8 linux/amd64", (1, 26, 8)),
        ("go version go1.27 linux/arm64", (1, 27, 0)),
        ("module example.com/go\n\ngo 1.26.6\n", (1, 26, 6)),
        ("command not found", None),
    ],
)
def test_the_release_of_go_is_read(text: str, release: tuple[int, int, int] | None) -> None:
    assert go_release(text) == release


def test_go_must_be_as_new_as_the_most_demanding_module() -> None:
    assert wanted_go([]) == (0, 0, 0)
    assert wanted_go(["kubelet", "containerd"]) == max(wanted_go(["kubelet"]), wanted_go(["containerd"]))


def fake_go(folder: Path, version: str) -> None:
    program = folder / "go"
    program.write_text(f"#!/bin/sh\necho go version {version} linux/amd64\n")
    program.chmod(0o755)


def test_an_old_go_and_too_little_space_are_told_together(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_go(tmp_path, "go1.21.3")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/sbin:/usr/bin:/bin")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 2**30))
    said: list[str] = []
    with pytest.raises(PreflightError) as raised:
        preflight.check(
            layout,
            Network("10.95"),
            ["kubelet", "kubectl", "kubeadm", "etcd"],
            said.append,
            [Need("a thing of the caller's", "get one")],
        )
    message = str(raised.value)
    assert "Go 1.26" in message
    assert "go1.21.3" in message
    assert "14 GiB of disk" in message
    assert "1.0 GiB are free" in message
    assert "get one" in message
    assert said == [], "something was installed although the machine cannot run a cluster"
    assert not layout.run.exists()
    assert not layout.data.exists()


def test_without_root_the_other_providers_are_named(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(PreflightError, match=r"root: .*\n.*CLUSTER=kind or CLUSTER=existing"):
        preflight.check(layout, Network("10.95"), [], pytest.fail)


def test_addresses_that_the_machine_uses_are_refused(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "overlapping_routes", lambda *_: ["10.95.0.0/16 dev podman0"])
    with pytest.raises(PreflightError, match=r"10\.95\.0\.0/16 dev podman0\n.*DISAGG_CLUSTER_NETWORK"):
        preflight.check(layout, Network("10.95"), [], pytest.fail)


def test_cached_programs_need_no_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert preflight._go([]) == []
    (need,) = preflight._go(["kubectl"])
    assert "there is no `go` in PATH" in need.what


def test_missing_programs_are_named_by_their_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(preflight, "RUN_PROGRAMS", {"a-program-that-nobody-has": "its-package"})
    assert "its-package" in preflight.missing_packages(building=False)
    assert "libc6-dev" in preflight.missing_packages(building=False)
    assert "libseccomp-dev" in preflight.missing_packages(building=True)
