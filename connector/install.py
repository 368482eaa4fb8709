"""Copies the connector into a folder, from which an engine's container then imports it.

    install.py FOLDER     afterwards `import disagg_connector` works with FOLDER on PYTHONPATH

The entrypoint of the connector's image: an init container runs it with a volume that it shares with the engine, so the
engine's own image needs no change. Needs nothing but the standard library.
"""

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "disagg_connector"


def install(source: Path, folder: Path) -> Path:
    """Copy the package at `source` into `folder`, replacing an earlier copy; returns where it is.

    A copy that was interrupted is never visible under the package's name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / source.name
    unfinished = folder / f".{source.name}.new"
    shutil.rmtree(unfinished, ignore_errors=True)
    # Bytecode stays behind: the engine may run another Python.
    shutil.copytree(source, unfinished, ignore=shutil.ignore_patterns("__pycache__"))
    if target.exists():
        shutil.rmtree(target)
    unfinished.rename(target)
    return target


def main(arguments: list[str]) -> int:
    """Install into the one folder named; returns the exit status."""
    if len(arguments) != 1:
        print("usage: install.py FOLDER", file=sys.stderr)
        return 2
    # Found without importing it: the package imports the engine, which this image does not have.
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        print(f"The package {PACKAGE} is not on the Python path of this image.", file=sys.stderr)
        return 1
    try:
        print(f"Installed {install(Path(spec.submodule_search_locations[0]), Path(arguments[0]))}")
    except OSError as error:
        print(
            f"Installing {PACKAGE} into {arguments[0]} failed: {error}. Is the volume writable?",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
