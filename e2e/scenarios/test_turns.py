"""One DisaggInference holds conversations while pods die, are scaled and are mistyped; every answer is a plain engine's."""

import itertools
from collections.abc import Callable, Iterator

import openai
import pytest

from e2e.cluster.shell import wait_until
from e2e.demo.conversation import hold_conversation
from e2e.demo.report import Turn
from e2e.demo.stack import MODEL
from e2e.engines import BLOCK_SIZE
from e2e.inference import Inference
from e2e.scenarios.talk import COOKING, GARDEN, SCRIPTS, Conversation, PlainAnswers, Script, client_of

pytestmark = pytest.mark.cluster


@pytest.fixture
def client(agents: Inference) -> Iterator[openai.OpenAI]:
    agents.wait_ready()
    with agents.router() as url, client_of(url) as client:
        agents.wait_served(url)
        yield client


def some_turn(
    agents: Inference, client: openai.OpenAI, plain: PlainAnswers, shows: Callable[[Turn, Turn], bool]
) -> None:
    """Hold conversations until a turn and the one before it show something; every answer must be the plain engine's.

    On a crowded machine a write-back may come late, or be given up: the next turn is right all the same.
    """
    held = []
    for script in SCRIPTS:
        turns = list(hold_conversation(client, MODEL, script, agents.counters, lambda _: None))
        assert [turn.answer for turn in turns] == [answer.text for answer in plain[script]]
        if any(shows(before, turn) for before, turn in itertools.pairwise(turns)):
            return
        held += turns
    raise AssertionError(f"none of these turns shows it: {held}")


def moves_both_ways(before: Turn, turn: Turn) -> bool:
    counted = turn.counted
    return counted.p_pushed > 0 and 0 < counted.p_inserted == counted.d_written_back


def test_kv_moves_both_ways_and_prefill_computes_only_what_is_new(
    agents: Inference, client: openai.OpenAI, plain_answers: PlainAnswers
) -> None:
    def costs_little(before: Turn, turn: Turn) -> bool:
        new = turn.prompt_tokens - before.prompt_tokens - before.answer_tokens
        return moves_both_ways(before, turn) and turn.counted.p_computed <= new + BLOCK_SIZE

    some_turn(agents, client, plain_answers, costs_little)


def replaced(agents: Inference, role: str, uid: str) -> bool:
    """Whether another pod of the role serves."""
    return any(
        pod["metadata"]["uid"] != uid
        and any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))
        for pod in agents.pods(role)
    )


def lose_pod(agents: Inference, role: str) -> None:
    """Delete the only pod of a role without grace, as a lost node would, and wait for its successor."""
    (pod,) = agents.pods(role)
    agents.cluster.kubectl("delete", "pod", pod["metadata"]["name"], "--grace-period=0", "--force")
    wait_until(
        lambda: replaced(agents, role, pod["metadata"]["uid"]),
        f"a new {role} pod to be ready",
        limit=600,
        every=1,
    )
    agents.wait_ready()
    with agents.router() as url:
        agents.wait_served(url)


@pytest.mark.parametrize(("role", "script"), [("decode", GARDEN), ("prefill", COOKING)])
def test_a_lost_pod_between_turns_changes_no_answer(
    agents: Inference, client: openai.OpenAI, plain_answers: PlainAnswers, role: str, script: Script
) -> None:
    conversation = Conversation(client, script, plain_answers)
    conversation.turn()
    lose_pod(agents, role)
    conversation.turn()
    conversation.turn()


def test_kv_moves_again_after_pods_were_replaced(
    agents: Inference, client: openai.OpenAI, plain_answers: PlainAnswers
) -> None:
    some_turn(agents, client, plain_answers, moves_both_ways)


def test_an_image_that_cannot_be_pulled_is_reported_while_the_old_pods_serve(
    agents: Inference, client: openai.OpenAI, plain_answers: PlainAnswers
) -> None:
    good = agents.resource()["spec"]["engine"]["image"]
    uids = {pod["metadata"]["uid"] for pod in agents.pods() if "router" not in pod["metadata"]["name"]}

    agents.patch({"engine": {"image": "localhost/disagg/no-such-image:1"}})
    told = agents.wait_condition("Reconciling", says("no-such-image"), "about the image")
    assert "agents-" in told.message, told
    Conversation(client, COOKING, plain_answers).turn()

    agents.patch({"engine": {"image": good}})
    agents.wait_ready()
    wait_until(
        lambda: (
            {p["metadata"]["uid"] for p in agents.pods() if "router" not in p["metadata"]["name"]} == uids
        ),
        "the original pods to be the only ones again",
        limit=300,
        every=0.5,
    )


def says(text: str) -> Callable[[object], bool]:
    """A predicate: the condition's message has `text`."""
    return lambda condition: text in getattr(condition, "message", "")


def test_decode_scales_with_its_replicas(
    agents: Inference, client: openai.OpenAI, plain_answers: PlainAnswers
) -> None:
    agents.patch({"decode": {"replicas": 2}})
    agents.wait_ready()
    assert len(agents.pods("decode")) == 2
    conversation = Conversation(client, GARDEN, plain_answers)
    conversation.turn()

    agents.patch({"decode": {"replicas": 1}})
    agents.wait_ready()
    wait_until(lambda: len(agents.pods("decode")) == 1, "one decode pod to be left", limit=300, every=0.5)
    conversation.turn()


def test_deleting_the_object_removes_every_child(agents: Inference) -> None:
    assert agents.children()

    agents.cluster.kubectl("delete", "di", agents.name, "--wait=false")

    wait_until(lambda: not agents.children(), "all children to be gone", limit=300, every=0.5)
