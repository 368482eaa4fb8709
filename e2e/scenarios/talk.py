"""What the scenarios say, what they expect to hear, and the manifest they say it to."""

from collections.abc import Iterator, Sequence
from typing import Any

import openai
import yaml

from e2e.demo.conversation import Answer, ask
from e2e.demo.stack import EXAMPLE, MODEL

Messages = list[Any]
Script = tuple[str, ...]

TRIP: Script = (
    "I want to visit Rome for two days. Tell me in detail what to see on the first day.",
    "That sounds lovely. Now tell me in detail what to do on the second day.",
    "What should I pack for these two days? Explain each thing.",
    "Write a long postcard to my grandmother about this trip.",
)
GARDEN: Script = (
    "I have a small garden with a lot of shade. Which plants should I choose? Explain why.",
    "How do I take care of the first of these plants over the year?",
    "My neighbour has a cat that digs in the beds. What can I do about it?",
)
COOKING: Script = (
    "Explain step by step how to cook a vegetable soup for six people.",
    "How should I change this if two of my guests do not like onions?",
    "What could I serve after it? Describe the recipe.",
)
SCRIPTS = (TRIP, GARDEN, COOKING)


PlainAnswers = dict[Script, tuple[Answer, ...]]
"""What a plain engine answers to each script."""


def client_of(url: str) -> openai.OpenAI:
    """The stock client."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)


def converse(client: openai.OpenAI, script: Sequence[str]) -> Iterator[Answer]:
    """Ask the script's questions one after the other, each with all that was said before."""
    messages: Messages = []
    for question in script:
        messages.append({"role": "user", "content": question})
        answer = ask(client, MODEL, messages, lambda _: None)
        messages.append({"role": "assistant", "content": answer.text})
        yield answer


class Conversation:
    """A script under way, to be interrupted between turns."""

    def __init__(self, client: openai.OpenAI, script: Script, plain: PlainAnswers) -> None:
        self._client, self._turns = client, iter(zip(script, plain[script], strict=True))
        self._messages: Messages = []

    def turn(self) -> Answer:
        """One turn; its answer must be the plain engine's."""
        question, expected = next(self._turns)
        self._messages.append({"role": "user", "content": question})
        answer = ask(self._client, MODEL, self._messages, lambda _: None)
        assert answer.text == expected.text
        self._messages.append({"role": "assistant", "content": answer.text})
        return answer


def cpu_manifest(name: str, *, model: str = "smollm2-135m", served_name: str = MODEL) -> dict[str, Any]:
    """The example for CPU under another name, in float32, so that greedy answers are equal and not just alike."""
    manifest: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    manifest["metadata"]["name"] = name
    spec = manifest["spec"]
    arguments = spec["engine"]["extraArgs"]
    arguments[arguments.index("--dtype=bfloat16")] = "--dtype=float32"
    arguments[arguments.index("--max-model-len=4096")] = "--max-model-len=2048"
    spec["model"] = {
        "name": served_name,
        "uri": f"file:///models/{model}",
        "storage": {
            "type": "HostPath",
            "path": f"/var/lib/disagg-local/models/{model}",
            "mountPath": f"/models/{model}",
        },
    }
    return manifest
