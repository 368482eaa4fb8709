"""Local images start like the production ones, and their layers hold what they promise."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from e2e.images import python_base, recipes
from e2e.images.recipes import RECIPES, REPOSITORY, Recipe, locked_packages, package_layer
from e2e.images.shared_objects import MissingLibraryError, closure

PRODUCTION = sorted(name for name, recipe in RECIPES.items() if recipe.dockerfile)


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile's last stage as (word, rest), with continued lines joined."""
    text = (REPOSITORY / dockerfile).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    found = [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]
    last_stage = max(number for number, (word, _) in enumerate(found) if word == "FROM")
    return found[last_stage:]


def value(dockerfile: str, word: str) -> str:
    (found,) = [rest for name, rest in instructions(dockerfile) if name == word]
    return found


def environment(dockerfile: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in value(dockerfile, "ENV").split())


@pytest.fixture(params=PRODUCTION)
def recipe(request: pytest.FixtureRequest) -> Recipe:
    return RECIPES[request.param]


def test_all_three_parts_have_a_production_image() -> None:
    assert PRODUCTION == ["connector", "operator", "router"]


def test_a_local_image_starts_like_its_dockerfile(recipe: Recipe) -> None:
    assert recipe.dockerfile is not None
    assert json.loads(value(recipe.dockerfile, "ENTRYPOINT")) == list(recipe.entrypoint)
    assert value(recipe.dockerfile, "USER") == recipe.user
    assert value(recipe.dockerfile, "WORKDIR") == "/"


def test_a_local_image_has_its_dockerfiles_environment(recipe: Recipe) -> None:
    assert recipe.dockerfile is not None
    wanted = environment(recipe.dockerfile)
    found = dict(recipe.env)
    # The connector's image has no packages but ours.
    found["PYTHONPATH"] = ":".join(
        path for path in found["PYTHONPATH"].split(":") if path in wanted["PYTHONPATH"].split(":")
    )
    assert wanted.items() <= found.items()


def test_a_dockerfile_copies_only_what_its_context_lets_in(recipe: Recipe) -> None:
    assert recipe.dockerfile is not None
    ignored = (REPOSITORY / f"{recipe.dockerfile}.dockerignore").read_text().splitlines()
    let_in = {line[1:] for line in ignored if line.startswith("!")}
    text = (REPOSITORY / recipe.dockerfile).read_text()
    copied = {
        line.split()[1] for line in text.splitlines() if line.startswith("COPY ") and "--from" not in line
    }
    assert copied == let_in
    assert all((REPOSITORY / path).exists() for path in copied)


def test_a_lock_is_split_into_packages_with_their_hashes() -> None:
    lock = """\
aiohttp==3.1 \\
    --hash=sha256:aa \\
    --hash=sha256:bb
    # via
    #   kopf
colorama==0.4 ; sys_platform == 'win32' \\
    --hash=sha256:cc
    # via click
"""
    assert locked_packages(lock) == {
        "aiohttp==3.1": "aiohttp==3.1 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n",
        "colorama==0.4": "colorama==0.4 ; sys_platform == 'win32' \\\n    --hash=sha256:cc\n",
    }


def test_the_real_locks_are_split_without_loss() -> None:
    for name in ("operator", "router"):
        lock = (REPOSITORY / "requirements" / f"{name}.txt").read_text()
        packages = locked_packages(lock)
        assert "kubernetes" in {head.split("==")[0] for head in packages}
        assert sum(text.count("--hash=") for text in packages.values()) == lock.count("--hash=")


def test_a_packages_layer_runs_without_its_sources_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISAGG_CACHE", str(tmp_path / "cache"))
    package = tmp_path / "sample"
    package.mkdir()
    (package / "__init__.py").write_text("ANSWER = 42\n")
    layer = package_layer(package)
    with tarfile.open(layer.tar) as tar:
        tar.extractall(tmp_path / "root", filter="tar")
    application = tmp_path / "root" / recipes.APPLICATION
    # Bytecode that is not looked up by time still answers when the source says otherwise.
    (application / "sample" / "__init__.py").write_text("ANSWER = 0\n")
    printed = subprocess.run(
        [sys.executable, "-c", "import sample; print(sample.ANSWER, sample.__file__)"],
        env={**os.environ, "PYTHONPATH": str(application)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert printed.stdout.split()[0] == "42"


def test_a_change_of_code_changes_the_packages_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISAGG_CACHE", str(tmp_path / "cache"))
    package = tmp_path / "sample"
    package.mkdir()
    (package / "__init__.py").write_text("ANSWER = 1\n")
    first = package_layer(package)
    assert package_layer(package) == first
    (package / "__init__.py").write_text("ANSWER = 2\n")
    assert package_layer(package).digest != first.digest


def test_the_interpreters_libraries_are_found_with_the_linker() -> None:
    libraries = closure([python_base.interpreter()])
    assert "libc.so.6" in libraries
    assert any(name.startswith("ld-linux") for name in libraries)
    assert all(path.exists() for path in libraries.values())


def test_a_missing_library_is_named_with_the_program_that_wants_it(tmp_path: Path) -> None:
    source = "int f(void){return 1;}"
    subprocess.run(
        ["gcc", "-shared", "-x", "c", "-o", tmp_path / "libgone.so", "-"], input=source, text=True, check=True
    )
    command = ["gcc", "-x", "c", "-o", str(tmp_path / "wants"), "-", f"-L{tmp_path}", "-lgone"]
    subprocess.run(command, input="int f(void);int main(void){return f();}", text=True, check=True)
    (tmp_path / "libgone.so").unlink()
    with pytest.raises(MissingLibraryError, match=r"wants needs the library libgone\.so"):
        closure([tmp_path / "wants"])
