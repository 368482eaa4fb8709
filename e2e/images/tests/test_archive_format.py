"""Archives: what `docker load` and containerd expect of them, with shared layers stored once."""

import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from e2e.images.archive import Image, write_archive
from e2e.images.layer import Entry, Layer, write_layer


@pytest.fixture
def images(tmp_path: Path) -> list[Image]:
    layers = {}
    for name in ("base", "one", "two"):
        path = tmp_path / name
        layers[name] = Layer(path, write_layer([Entry(name, content=name.encode())], path))
    return [
        Image(
            "localhost/x/one:dev", (layers["base"], layers["one"]), ("run", "one"), "65532:65532", {"A": "b"}
        ),
        Image("localhost/x/two:dev", (layers["base"], layers["two"])),
    ]


def read(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        names = tar.getnames()
        assert len(names) == len(set(names)), "a member is stored twice"
        return {member.name: content.read() for member in tar if (content := tar.extractfile(member))}


def configuration(files: dict[str, bytes], reference: str) -> tuple[dict[str, Any], dict[str, Any]]:
    (entry,) = [entry for entry in json.loads(files["manifest.json"]) if entry["RepoTags"] == [reference]]
    return entry, json.loads(files[entry["Config"]])


def test_every_layer_is_there_once_under_its_own_digest(images: list[Image], tmp_path: Path) -> None:
    write_archive(images, tmp_path / "out")
    files = read(tmp_path / "out")
    tars = {name: content for name, content in files.items() if name.endswith(".tar")}
    assert len(tars) == 3
    assert all(hashlib.sha256(content).hexdigest() + ".tar" == name for name, content in tars.items())
    for image in images:
        entry, config = configuration(files, image.reference)
        assert [f"sha256:{name.removesuffix('.tar')}" for name in entry["Layers"]] == config["rootfs"][
            "diff_ids"
        ]
        assert set(entry["Layers"]) <= set(tars)


def test_the_configuration_says_how_a_container_starts(images: list[Image], tmp_path: Path) -> None:
    write_archive(images, tmp_path / "out")
    files = read(tmp_path / "out")
    _, one = configuration(files, "localhost/x/one:dev")
    _, two = configuration(files, "localhost/x/two:dev")
    assert one["config"] == {
        "Env": ["A=b"],
        "WorkingDir": "/",
        "Entrypoint": ["run", "one"],
        "User": "65532:65532",
    }
    assert "Entrypoint" not in two["config"]
    assert one["os"] == "linux"


def test_the_digest_changes_with_anything_a_container_would_notice(images: list[Image]) -> None:
    first = images[0]
    variants = [
        first,
        Image(first.reference, first.layers[:1], first.entrypoint, first.user, first.env),
        Image(first.reference, first.layers, ("run",), first.user, first.env),
        Image(first.reference, first.layers, first.entrypoint, "0", first.env),
        Image(first.reference, first.layers, first.entrypoint, first.user, {"A": "c"}),
    ]
    assert len({image.digest for image in variants}) == len(variants)
