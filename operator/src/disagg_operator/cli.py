"""kubectl-disagg: what a person asks about a DisaggInference."""

import asyncio
import json
import sys
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from .api.base import API_VERSION
from .config import Settings
from .errors import GoneError, KubeError
from .explain import account, text
from .kube import connect_as_person
from .naming import KIND, Manifest
from .plan import rendered
from .wanted import read

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Ask about DisaggInferences.")


@app.command()
def render(
    file: Annotated[str, typer.Argument(help="A manifest, or - for standard input.")],
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", help="If the manifest names none.")
    ] = "default",
    router_image: Annotated[str, typer.Option(envvar="ROUTER_IMAGE")] = "disagg-router:dev",
    connector_image: Annotated[str, typer.Option(envvar="CONNECTOR_IMAGE")] = "disagg-connector:dev",
) -> None:
    """Print the objects that the operator would make, without asking a cluster."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
        documents = list(yaml.safe_load_all(text))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        typer.echo(f"{file} cannot be read as YAML: {error}", err=True)
        raise typer.Exit(1) from error
    found = [item for item in documents if isinstance(item, dict) and item.get("kind") == KIND]
    if not found:
        typer.echo(f"{file}: no object of kind {KIND} ({API_VERSION}) in it", err=True)
        raise typer.Exit(1)
    for item in found:
        typer.echo(_render(item, namespace, Settings(router_image, connector_image)), nl=False)


def _render(item: Manifest, namespace: str, settings: Settings) -> str:
    meta = {"namespace": namespace, "uid": "00000000-0000-0000-0000-000000000000", "generation": 1} | item[
        "metadata"
    ]
    wanted = read({**item, "metadata": meta}, settings)
    if wanted.refusal is not None:
        typer.echo(f"{meta['name']}: {wanted.refusal.reason}: {wanted.refusal.message}", err=True)
        raise typer.Exit(1)
    # The Secret without its keys: they are made in the cluster and shown to nobody.
    objects = (wanted.secret, *rendered(wanted))
    return yaml.dump_all(objects, Dumper=_Plain, sort_keys=False, width=120, explicit_start=True)


class Output(StrEnum):
    """How to print."""

    TEXT = "text"
    JSON = "json"


@app.command()
def explain(
    name: Annotated[str, typer.Argument(help="A DisaggInference.")],
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="By default that of the kubeconfig's context.")
    ] = None,
    context: Annotated[
        str | None, typer.Option(help="Of the kubeconfig, by default its current one.")
    ] = None,
    output: Annotated[Output, typer.Option("--output", "-o")] = Output.TEXT,
) -> None:
    """Print how the sizes of its pools came about, with the numbers put in."""
    try:
        resource = asyncio.run(_fetch(name, namespace, context))
    except KubeError as error:
        typer.echo(f"Error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from error
    now = datetime.now(UTC)
    # The images decide on revisions, which nothing here is about.
    said = account(read(resource, Settings("-", "-")), now)
    if output is Output.JSON:
        typer.echo(json.dumps(said.to_wire(), indent=2))
    else:
        typer.echo(text(said, now), nl=False)


async def _fetch(name: str, namespace: str | None, context: str | None) -> Manifest:
    kube, default = await connect_as_person(context)
    try:
        where = namespace or default
        resource = await kube.get(KIND, where, name)
        if resource is not None:
            return resource
        doing = f"read {KIND} {where}/{name}"
        if not await kube.serves(KIND):
            raise GoneError(doing, "the cluster has no such kind: are the CRDs installed?")
        raise GoneError(doing, "there is none")
    finally:
        await kube.close()


class _Plain(yaml.SafeDumper):
    """Without anchors: an object that is used twice is written twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def main() -> None:
    """The command."""
    app()
