"""What a run of the demo ends with: its exit status, what it says, and what it removes."""

import io
import json
import shlex
from collections.abc import Callable

import pytest
from rich.console import Console

from e2e.cluster import ClusterError, NoCluster, Progress, choose
from e2e.demo.__main__ import Demo, attempt, curl_line
from e2e.demo.errors import DemoError
from e2e.demo.stack import MODEL


class FakeDemo(Demo):
    """A run that does `body` instead of everything, and counts how often it is taken down."""

    def __init__(self, body: Callable[[], list[str]], *, begun: bool = True) -> None:
        self.output = io.StringIO()
        console = Console(file=self.output, width=200)
        super().__init__(choose("existing"), Progress(console), console)
        self.seconds.update(first_answer=87.0, total=109.0)
        self.body, self.begun, self.taken_down = body, begun, 0

    def run(self) -> list[str]:
        self.has_begun = self.begun
        return self.body()

    def take_down(self) -> None:
        self.taken_down += 1

    def tell_how_to_go_on(self) -> None:
        self.progress.say("curl ...")


def _raise(error: BaseException) -> Callable[[], list[str]]:
    def body() -> list[str]:
        raise error

    return body


def test_a_good_conversation_ends_with_nothing_left_behind() -> None:
    demo = FakeDemo(list)
    assert attempt(demo, keep=False) == 0
    assert demo.taken_down == 1
    assert "First answer after 87 s, all after 109 s" in demo.output.getvalue()
    assert "curl" not in demo.output.getvalue()


def test_kept_it_stays_and_tells_how_to_talk_to_it() -> None:
    demo = FakeDemo(list)
    assert attempt(demo, keep=True) == 0
    assert demo.taken_down == 0
    assert "curl ..." in demo.output.getvalue()


def test_kv_that_did_not_move_is_a_failure() -> None:
    demo = FakeDemo(lambda: ["Turn 2: decode wrote nothing back to prefill."])
    assert attempt(demo, keep=False) == 1
    assert "Turn 2: decode wrote nothing back" in demo.output.getvalue()
    assert demo.taken_down == 1


@pytest.mark.parametrize(
    "error", [DemoError("no pod"), ClusterError("no pod"), NoCluster("no pod"), LookupError("no pod")]
)
def test_what_went_wrong_is_said_and_everything_removed(error: Exception) -> None:
    demo = FakeDemo(_raise(error))
    assert attempt(demo, keep=False) == 1
    assert "The demo failed: no pod" in demo.output.getvalue()
    assert demo.taken_down == 1


def test_an_interrupt_removes_everything_too() -> None:
    demo = FakeDemo(_raise(KeyboardInterrupt()))
    assert attempt(demo, keep=False) == 130
    assert demo.taken_down == 1


def test_a_bug_is_not_hidden_and_still_removes_everything() -> None:
    demo = FakeDemo(_raise(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        attempt(demo, keep=False)
    assert demo.taken_down == 1


def test_a_machine_that_lacks_something_is_not_touched() -> None:
    demo = FakeDemo(_raise(DemoError("Go is missing")), begun=False)
    assert attempt(demo, keep=False) == 1
    assert demo.taken_down == 0


def test_a_cluster_of_somebody_else_is_refused_before_anything_is_done() -> None:
    demo = Demo(choose("existing"), Progress(), Console())
    with pytest.raises(DemoError, match="CLUSTER=local or CLUSTER=kind"):
        demo.check_machine()
    assert not demo.has_begun


def test_the_curl_line_survives_a_shell() -> None:
    words = shlex.split(curl_line("http://10.88.1.1:8000"))
    assert words[2] == "http://10.88.1.1:8000/v1/chat/completions"
    assert json.loads(words[words.index("-d") + 1])["model"] == MODEL


def test_what_cannot_be_removed_is_said_and_fails_the_demo() -> None:
    class Stuck(FakeDemo):
        def take_down(self) -> None:
            raise ClusterError("node1 is busy")

    demo = Stuck(list)
    assert attempt(demo, keep=False) == 1
    assert "Not everything could be removed: node1 is busy" in demo.output.getvalue()


def test_a_cluster_whose_pods_would_not_find_the_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISAGG_CLUSTER_NAME", "other")
    demo = Demo(choose("local"), Progress(), Console(file=io.StringIO()))
    with pytest.raises(DemoError, match="Unset DISAGG_CLUSTER_NAME"):
        demo.check_machine()
