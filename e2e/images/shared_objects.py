"""Which shared libraries programs need, as the dynamic linker resolves them on this machine."""

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

_RESOLVED = re.compile(r"^\s+(?:\S+ => )?(/\S+) \(0x[0-9a-f]+\)$")
_MISSING = re.compile(r"^\s+(\S+) => not found$")


class MissingLibraryError(Exception):
    """A program needs a library that this machine does not have."""


def closure(programs: Iterable[Path]) -> dict[str, Path]:
    """The libraries that `programs` (executables and shared objects) load, the dynamic linker among them.

    Maps the name under which each is loaded to the file.

    Raises:
        MissingLibraryError: one cannot be found.
    """
    found: dict[str, Path] = {}
    batch = [str(program) for program in programs]
    if not batch:
        return found
    printed = subprocess.run(["ldd", *batch], capture_output=True, text=True, check=False).stdout
    program = batch[0]
    for line in printed.splitlines():
        if line.startswith("/") and line.endswith(":"):
            program = line[:-1]
        elif match := _MISSING.match(line):
            raise MissingLibraryError(
                f"{program} needs the library {match[1]}, which this machine does not have."
            )
        elif match := _RESOLVED.match(line):
            path = Path(match[1])
            found[path.name] = path
    return found


def shared_objects_below(folder: Path) -> list[Path]:
    """Every shared object in a folder, also those with a version after `.so`."""
    return sorted(path for path in folder.rglob("*.so*") if path.is_file() and not path.is_symlink())
