"""What is sent to the API server to change an object that was looked at: that one by its uid, and not another one of its name.
Pure."""

from .naming import Manifest


def pinned(manifest: Manifest, live: Manifest | None) -> Manifest:
    """The manifest with the uid of the object that was looked at; unchanged if there was none."""
    if live is None:
        return manifest
    return {**manifest, "metadata": {**manifest["metadata"], "uid": live["metadata"]["uid"]}}


def unchanged(manifest: Manifest, live: Manifest) -> Manifest:
    """The same, and refused with a conflict if anything about the object has changed since."""
    manifest = pinned(manifest, live)
    version = live["metadata"]["resourceVersion"]
    return {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": version}}


def status_of(live: Manifest, status: Manifest) -> Manifest:
    """A new status for the object that was looked at."""
    meta = live["metadata"]
    return {
        "apiVersion": live["apiVersion"],
        "kind": live["kind"],
        "metadata": {"namespace": meta["namespace"], "name": meta["name"], "uid": meta["uid"]},
        "status": status,
    }
