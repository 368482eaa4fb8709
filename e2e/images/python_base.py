"""The base of our images: this machine's own Python interpreter in an otherwise empty root.

The interpreter, its standard library (compiled, without tests and Tk), the shared libraries that these load, the
dynamic linker, CA certificates, the user 65532 and a /tmp. Laid out with merged /usr, like Debian.
"""

import compileall
import os
import py_compile
import shutil
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from e2e.images.layer import Entry, Layer, cached_layer, fingerprint, folder_entries
from e2e.images.shared_objects import closure, shared_objects_below

RECIPE = 1
"""Raise it whenever this module changes what is in the layer."""
USER = "65532:65532"
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"

_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_LEFT_OUT = shutil.ignore_patterns(
    "test",
    "tests",
    "idlelib",
    "tkinter",
    "turtledemo",
    "turtle.py",
    "ensurepip",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "dist-packages",
    "config-*",
    "__pycache__",
    "_tkinter*.so",
    "_test*.so",
    "_xxtestfuzz*.so",
    "*.a",
)
SKELETON = (
    *(Entry(name, link=f"usr/{name}") for name in ("bin", "lib", "lib64", "sbin")),
    *(Entry(f"usr/{name}") for name in ("bin", "lib", "lib64", "sbin")),
    Entry("tmp", mode=0o1777),
    Entry("home/nonroot", mode=0o777),
    Entry(
        "etc/passwd",
        content=b"root:x:0:0:root:/:/sbin/nologin\nnonroot:x:65532:65532::/home/nonroot:/sbin/nologin\n",
        mode=0o644,
    ),
    Entry("etc/group", content=b"root:x:0:\nnonroot:x:65532:\n", mode=0o644),
    Entry("etc/nsswitch.conf", content=b"hosts: files dns\n", mode=0o644),
)


def interpreter() -> Path:
    """The real interpreter behind a virtual environment."""
    return Path(os.path.realpath(sys.executable))


def standard_library() -> Path:
    """The folder of the standard library."""
    return Path(sysconfig.__file__).parent


def base_layer() -> Layer:
    """The layer, built where the cache does not have it."""
    return cached_layer("python", _key(), _entries)


def library_entries(programs: Iterable[Path]) -> list[Entry]:
    """The shared libraries that `programs` load, where the image's dynamic linker finds them."""
    libraries = closure(programs)
    entries = []
    for name, path in libraries.items():
        # The linker's own path is written in every executable; the rest goes where it searches by default.
        folder = path.parent if name.startswith("ld-") else _default_folder(libraries)
        entries.append(Entry(f"usr/{str(folder).removeprefix('/usr').lstrip('/')}/{name}", source=path))
    return entries


def compile_folder(folder: Path, final: str) -> None:
    """Compile all Python files below `folder`, which will be `final` in the image.

    The bytecode does not depend on the sources' times, which a layer does not keep. Without bytecode a read-only
    container would compile everything at each start.
    """
    compileall.compile_dir(
        folder,
        maxlevels=20,
        quiet=2,
        workers=0,
        stripdir=str(folder),
        prependdir=f"/{final}",
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )


def _default_folder(libraries: dict[str, Path]) -> Path:
    return libraries["libc.so.6"].parent


def _entries(scratch: Path) -> list[Entry]:
    program = interpreter()
    place = f"usr/local/lib/python{VERSION}"
    library = scratch / "library"
    shutil.copytree(standard_library(), library, symlinks=True, ignore=_LEFT_OUT)
    compile_folder(library, place)
    certificates = [Entry("etc/ssl/certs/ca-certificates.crt", source=_CERTIFICATES, mode=0o644)]
    return [
        *SKELETON,
        Entry(f"usr/local/bin/python{VERSION}", source=program),
        Entry("usr/local/bin/python3", link=f"python{VERSION}"),
        Entry("usr/local/bin/python", link=f"python{VERSION}"),
        *folder_entries(library, place),
        *library_entries([program, *shared_objects_below(library)]),
        *(certificates if _CERTIFICATES.exists() else []),
    ]


def _key() -> str:
    library = standard_library()
    files = [interpreter(), *library.glob("*.py"), *library.glob("*/*.py"), *library.glob("lib-dynload/*.so")]
    if _CERTIFICATES.exists():
        files.append(_CERTIFICATES)
    stats = [
        (str(path), status.st_size, status.st_mtime_ns) for path in sorted(files) if (status := path.stat())
    ]
    return fingerprint(RECIPE, sys.version, stats)
