"""Putting images into the nodes' containerd."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from e2e.cluster.layout import Layout, NodeLayout
from e2e.cluster.shell import Word, in_netns, run
from e2e.images.archive import Image, write_archive


def import_images(
    layout: Layout, nodes: Sequence[int], images: Sequence[Image], ctr: Path, scratch: Path
) -> int:
    """Import `images` into each node that does not have them in this very form; returns how many it imported.

    One archive holds all of them, so that layers which they share are read once.
    """
    todo = {index: [image for image in images if not _has(layout.node(index), image)] for index in nodes}
    union = [image for image in images if any(image in missing for missing in todo.values())]
    if not union:
        return 0
    archive = scratch / "images.tar"
    write_archive(union, archive)
    try:
        with ThreadPoolExecutor() as pool:
            behind = [layout.node(index) for index, missing in todo.items() if missing]
            list(pool.map(lambda node: _import(node, archive, union, ctr), behind))
    finally:
        archive.unlink()
    return len(union)


def _import(node: NodeLayout, archive: Path, images: Sequence[Image], ctr: Path) -> None:
    command: list[Word] = [ctr, "--address", node.socket, "--namespace", "k8s.io"]
    command += ["images", "import", "--local", archive]
    run(in_netns(node.netns, command), f"Importing images into {node.name}", timeout=1200)
    record = _read(node) | {image.reference: image.digest for image in images}
    _record_path(node).write_text(json.dumps(record, indent=1))


def _has(node: NodeLayout, image: Image) -> bool:
    return _read(node).get(image.reference) == image.digest


def _record_path(node: NodeLayout) -> Path:
    return node.run / "images.json"


def _read(node: NodeLayout) -> dict[str, str]:
    path = _record_path(node)
    return dict(json.loads(path.read_text())) if path.exists() else {}
