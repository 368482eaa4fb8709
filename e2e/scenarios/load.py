"""A steady load on a router: so many prompt tokens a second, asked by people who do not wait for each other."""

import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import openai

from e2e.demo.conversation import ask
from e2e.demo.stack import MODEL
from e2e.scenarios.talk import Messages, client_of

ANSWER_TOKENS = 16
_THINGS = ("kettle", "lamp", "chair", "radio", "basket", "mirror", "ladder", "blanket", "hammer", "clock")
_COLOURS = ("red", "green", "blue", "yellow", "black", "white", "brown", "grey")


@dataclass(frozen=True)
class Prompt:
    """What somebody asks, and what a plain engine answers if it was asked."""

    messages: Messages
    expected: str | None = None


def stock(seed: int, items: int) -> str:
    """A list of a storehouse's goods, as a tool would give it: about 16 tokens an item, no two lists begin alike."""
    draw = random.Random(seed)
    lines = [
        f"{draw.randrange(1000, 9999)}: {draw.randrange(2, 90)} {draw.choice(_COLOURS)} {draw.choice(_THINGS)}s, "
        f"shelf {draw.randrange(10, 99)}"
        for _ in range(items)
    ]
    return f"List {seed}.\n" + "\n".join(lines)


def strangers(first: int, items: int) -> Iterator[Prompt]:
    """Conversations of one long question each, which nobody has asked before; lists are numbered from `first` on."""
    while True:
        yield Prompt([{"role": "user", "content": f"{stock(first, items)}\nWhat is there most of?"}])
        first += 1


def grown(client: openai.OpenAI, seed: int, turns: int, items: int) -> Sequence[Prompt]:
    """One conversation whose every turn brings another list, with the answers of whoever `client` asks."""
    messages: Messages = []
    held = []
    for number in range(turns):
        content = f"{stock(seed + number, items if number else 4 * items)}\nWhich shelf has the most?"
        messages.append({"role": "user", "content": content})
        answer = ask(client, MODEL, messages, lambda _: None, ANSWER_TOKENS)
        held.append(Prompt(list(messages), answer.text))
        messages.append({"role": "assistant", "content": answer.text})
    return held


class Load:
    """Asks the router at `url` from when it is entered until it is left, for each of `talks` one turn at a time.

    All together ask `rate` prompt tokens a second, or as many as are answered in time. A turn that fails, or is answered
    otherwise than expected, ends the load: `check` and leaving it raise what went wrong.
    """

    def __init__(self, url: str, rate: float, talks: Sequence[Iterator[Prompt]]) -> None:
        self._url, self._seconds_per_token = url, len(talks) / rate
        self._over = threading.Event()
        self._talkers = [threading.Thread(target=self._talk, args=(talk,)) for talk in talks]
        self._lock = threading.Lock()
        self._turns = 0
        self._error: BaseException | None = None

    def check(self) -> int:
        """How many turns were answered, all as they should."""
        if self._error is not None:
            raise self._error
        return self._turns

    def _talk(self, talk: Iterator[Prompt]) -> None:
        try:
            with client_of(self._url) as client:
                self._hold(client, talk)
        except BaseException as error:
            self._error = self._error or error
            self._over.set()

    def _hold(self, client: openai.OpenAI, talk: Iterator[Prompt]) -> None:
        due = time.monotonic()
        for prompt in talk:
            if self._over.wait(max(0.0, due - time.monotonic())):
                return
            begun = time.monotonic()
            answer = ask(client, MODEL, prompt.messages, lambda _: None, ANSWER_TOKENS)
            assert answer.tokens > 0, prompt
            if prompt.expected is not None:
                assert answer.text == prompt.expected, prompt
            due = begun + answer.prompt_tokens * self._seconds_per_token
            with self._lock:
                self._turns += 1

    def __enter__(self) -> Self:
        for talker in self._talkers:
            talker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        for talker in self._talkers:
            talker.join()
        if kind is None:
            self.check()
