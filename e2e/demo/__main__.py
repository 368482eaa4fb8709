"""`python -m e2e.demo`: from nothing to a conversation whose KV moves both ways."""

import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, NoReturn

import openai
import typer
from rich.console import Console

from e2e.cluster import (
    Cluster,
    ClusterError,
    NoCluster,
    Progress,
    Provider,
    binaries,
    choose,
    expose_engine,
    preflight,
)
from e2e.cluster.errors import PreflightError
from e2e.cluster.layout import EXPOSED, Layout
from e2e.cluster.network import Network
from e2e.cluster.recipes import CLUSTER_PROGRAMS
from e2e.demo.conditions import LineView, LiveView, wait_until_ready
from e2e.demo.conversation import QUESTIONS, hold_conversation
from e2e.demo.diagnosis import explain
from e2e.demo.engine_side import EngineBuild, engine_needs
from e2e.demo.errors import DemoError
from e2e.demo.report import Turn, shortcomings, to_json, turn_table
from e2e.demo.stack import EXAMPLE, MODEL, NAME, REPOSITORY, Stack
from e2e.images.engine_bundle import EngineError
from e2e.images.recipes import ImageError

REPORT = REPOSITORY / "build" / "reports" / "demo.json"
IMAGES = ("operator", "router", "connector", "engine-cpu")
NODES = 2
READY_SECONDS = 900.0
_KNOWN = (DemoError, ClusterError, EngineError, ImageError, LookupError, openai.OpenAIError)


@dataclass
class Demo:
    """One run: what it talks to, and when each part was done."""

    provider: Provider
    progress: Progress
    console: Console
    began: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=dict)
    cluster_was_there: bool = False
    has_begun: bool = False
    """Whether there may be something to clean up."""
    stack: Stack | None = None

    def run(self) -> list[str]:
        """Everything but taking down; returns why the conversation does not show what it should."""
        self.check_machine()
        stack = self.stack = Stack(self.prepare())
        with self.part("operator"):
            stack.install_operator()
        self.progress.say(f"kubectl apply -f {EXAMPLE.relative_to(REPOSITORY)}")
        stack.apply_example()
        with self.part("ready"):
            view = LiveView(NAME, self.console) if self.console.is_terminal else LineView(self.progress.say)
            wait_until_ready(stack.inference.resource, view, READY_SECONDS)
        turns = self.converse(stack)
        self.seconds["total"] = time.monotonic() - self.began
        self.console.print(turn_table(turns))
        REPORT.parent.mkdir(parents=True, exist_ok=True)
        REPORT.write_text(json.dumps(to_json(turns, self.seconds, self.provider.name), indent=2) + "\n")
        return shortcomings(turns)

    def check_machine(self) -> None:
        """Say all that is missing before anything is changed."""
        if self.provider.name == "existing":
            raise DemoError(
                "The demo mounts the engine and the model from this machine, which nodes of another cluster do not have. "
                "Use CLUSTER=local or CLUSTER=kind; for your own cluster see docs/install.md."
            )
        if Layout.configured().exposed != EXPOSED:
            raise DemoError(
                f"The example mounts the engine and the model from {EXPOSED}, where only the cluster of the default name "
                "has them. Unset DISAGG_CLUSTER_NAME."
            )
        try:
            self.provider.connect()
            self.cluster_was_there = True
        except NoCluster:
            pass
        if self.provider.name == "local" and not self.cluster_was_there:
            to_build = binaries.missing([*CLUSTER_PROGRAMS, "helm"])
            needs = engine_needs(beside=preflight.BUILD_SPACE_GIB * 2**30 if to_build else 0)
            preflight.check(Layout.configured(), Network.configured(), to_build, self.progress.say, needs)
        elif needs := engine_needs():
            raise DemoError("\n".join(f"Missing: {need.what}\n    {need.remedy}" for need in needs))

    def prepare(self) -> Cluster:
        """A cluster with the images, the engine and the model; what does not depend on each other side by side."""
        self.has_begun = True
        with EngineBuild(self.progress.say) as engine:
            if self.provider.name == "local":
                binaries.ensure([*CLUSTER_PROGRAMS, "helm"], self.progress)
            with self.part("cluster"):
                cluster = self._start_cluster()
            with self.part("engine"):
                engine.result()
        expose_engine(self.provider, self.progress)
        return cluster

    def _start_cluster(self) -> Cluster:
        try:
            return self.provider.up(NODES, self.progress, IMAGES)
        except PreflightError:
            self.has_begun = False  # nothing was changed, so there is nothing to remove
            raise

    def converse(self, stack: Stack) -> list[Turn]:
        """Hold the conversation through the router."""
        turns: list[Turn] = []
        with (
            stack.inference.router() as url,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            stack.inference.wait_served(url)
            self.progress.say(f"The router answers at {url}/v1; a conversation with {MODEL}:")
            answers = hold_conversation(client, MODEL, QUESTIONS, stack.inference.counters, self.show)
            self.console.print(f"\n[bold]{QUESTIONS[0]}[/]")
            for turn in answers:
                turns.append(turn)
                self.seconds.setdefault("first_answer", time.monotonic() - self.began)
                self.console.print()
                if len(turns) < len(QUESTIONS):
                    self.console.print(f"\n[bold]{QUESTIONS[len(turns)]}[/]")
        return turns

    def show(self, piece: str) -> None:
        """A piece of an answer as it arrives."""
        self.console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Remember how long a part took."""
        began = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - began

    def take_down(self) -> None:
        """Remove what this run made: the whole cluster, or from a cluster that was there what was put into it."""
        if not self.cluster_was_there:
            self.provider.down(self.progress)
        elif self.stack:
            self.stack.remove()
            self.progress.say(
                "The cluster was there before and stays; the operator and the example are removed."
            )

    def tell_how_to_go_on(self) -> None:
        """A curl line, tried before it is shown, and how to remove everything."""
        assert self.stack is not None
        kubeconfig = self.stack.cluster.kubeconfig
        with self.stack.inference.router() as url:
            line = curl_line(url)
            if shutil.which("curl"):
                answered = subprocess.run(
                    line, shell=True, capture_output=True, text=True, timeout=120, check=False
                )
                if '"choices"' not in answered.stdout:
                    raise DemoError(
                        f"This command did not answer as it should: {line}\n{answered.stdout}{answered.stderr}"
                    )
        self.progress.say("\nTalk to it:")
        if self.provider.name != "local":
            forward = shlex.join(self.stack.inference.forward_command("8000:8000"))
            self.progress.say(f"    {forward} &")
            line = curl_line("http://127.0.0.1:8000")
        self.progress.say(f"    {line}")
        self.progress.say(f"Look at it:\n    KUBECONFIG={kubeconfig} kubectl get di,pods")
        self.progress.say("Remove it:\n    make cluster-down")


def curl_line(url: str) -> str:
    """A command that asks the model a question."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 60,
    }
    return shlex.join(
        [
            "curl",
            "-sS",
            f"{url}/v1/chat/completions",
            "-H",
            "content-type: application/json",
            "-d",
            json.dumps(body),
        ]
    )


def main(
    keep: Annotated[bool, typer.Option(help="Leave cluster, operator and model running.")] = False,
) -> None:
    """A cluster, the operator, one DisaggInference on CPU, and a conversation whose KV can be watched moving."""
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    try:
        demo = Demo(choose(), Progress(), console)
    except ClusterError as error:
        sys.exit(str(error))
    sys.exit(attempt(demo, keep=keep))


def attempt(demo: Demo, *, keep: bool) -> int:
    """Run the demo, say what went wrong if something did, and clean up. Returns the exit status."""
    status = 1
    try:
        wrong = demo.run()
        if wrong:
            raise DemoError(
                "The conversation does not show KV moving both ways:\n" + "\n".join(f"  {w}" for w in wrong)
            )
        took = f"first answer after {demo.seconds['first_answer']:.0f} s, all after {demo.seconds['total']:.0f} s"
        demo.progress.say(f"KV moved both ways. {took[0].upper()}{took[1:]}. Report: {REPORT}")
        if keep:
            demo.tell_how_to_go_on()
        else:
            demo.progress.say("`make demo KEEP=1` leaves it running and prints how to talk to it.")
        status = 0
    except KeyboardInterrupt:
        demo.progress.say("\nInterrupted.")
        status = 130
    except _KNOWN as error:
        demo.progress.say(f"\nThe demo failed: {error}")
        if demo.stack:
            demo.progress.say(explain(demo.stack))
        if demo.stack and not keep:
            demo.progress.say(
                "To look further: `make demo KEEP=1` leaves everything as it is when something fails."
            )
    finally:
        if demo.has_begun and not keep:
            status = max(status, _taken_down(demo))
    return status


def _taken_down(demo: Demo) -> int:
    try:
        with _uninterrupted():
            demo.take_down()
    except ClusterError as error:
        demo.progress.say(f"Not everything could be removed: {error}")
        return 1
    return 0


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore further signals: half a clean-up would leave more behind than none."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    cli = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    cli.command()(main)
    cli()
