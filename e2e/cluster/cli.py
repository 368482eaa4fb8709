"""The command line: `python -m e2e.cluster`."""

import os
import shlex
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from e2e.cluster.errors import ClusterError
from e2e.cluster.handle import program
from e2e.cluster.progress import Progress
from e2e.cluster.provider import ALL_IMAGES, Provider, choose, expose_engine
from e2e.images.engine_bundle import EngineError
from e2e.images.recipes import ImageError

DEFAULT_NODES = 2
_MIB = 2**20

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="A Kubernetes cluster for tests and the demo. CLUSTER=local|kind|existing chooses where it comes from.",
)
_PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command()
def up(
    nodes: Annotated[int, typer.Option(min=1, help="how many nodes")] = DEFAULT_NODES,
    fake_p5en: Annotated[int, typer.Option(min=0, help="how many fake p5en.48xlarge nodes")] = 0,
    engine: Annotated[
        bool, typer.Option(help="also build the engine bundle and the model, and let pods mount them")
    ] = True,
    images: Annotated[bool, typer.Option(help="build our images and give them to the nodes")] = True,
) -> None:
    """Start the cluster, or complete the one that runs, and load the images."""
    progress = Progress()
    provider = choose()
    cluster = provider.up(nodes, progress, ALL_IMAGES if images else ())
    provider.add_fake_nodes(fake_p5en, progress)
    if engine and provider.name != "existing":  # its nodes are other machines
        expose_engine(provider, progress)
    _explain(str(cluster.kubeconfig))


@app.command()
def down() -> None:
    """Remove the cluster and every trace of it."""
    progress = Progress()
    if not choose().down(progress):
        progress.say("  there is no cluster to remove")


@app.command()
def status() -> None:
    """Show what the cluster is made of and how much memory each part takes."""
    provider = choose()
    components = provider.status()
    if not components:
        print("There is no cluster.")
        raise typer.Exit(1)
    table = Table(box=None, pad_edge=False)
    for heading in ("component", "state", "MiB"):
        table.add_column(heading, justify="right" if heading == "MiB" else "left")
    for component in components:
        table.add_row(component.name, component.state, f"{component.resident_bytes / _MIB:.0f}")
    table.add_row("all", "", f"{sum(component.resident_bytes for component in components) / _MIB:.0f}")
    Console(highlight=False).print(table)
    print(provider.connect().kubectl("get", "nodes", "-o=wide"), end="")


@app.command()
def kubeconfig() -> None:
    """Print the path of the kubeconfig."""
    print(choose().connect().kubeconfig)


@app.command(context_settings=_PASS_THROUGH)
def kubectl(context: typer.Context) -> None:
    """Run kubectl on the cluster."""
    _become("kubectl", choose(), context.args)


@app.command(context_settings=_PASS_THROUGH)
def helm(context: typer.Context) -> None:
    """Run helm on the cluster."""
    _become("helm", choose(), context.args)


def main() -> None:
    """Run the command line; an error of ours ends it with its text and exit status 1."""
    try:
        app()
    except (ClusterError, EngineError, ImageError) as error:
        sys.exit(f"{error}")


def _become(name: str, provider: Provider, arguments: list[str]) -> None:
    path = program(name)
    os.environ["KUBECONFIG"] = str(provider.connect().kubeconfig)
    os.execv(path, [str(path), *arguments])


def _explain(kubeconfig: str) -> None:
    path = program("kubectl")
    print("The cluster is up. To use it:")
    print(f"    export KUBECONFIG={shlex.quote(kubeconfig)}")
    print(f"    export PATH={shlex.quote(str(path.parent))}:$PATH")
    print("    kubectl get nodes")
    print("To remove it: make cluster-down")
