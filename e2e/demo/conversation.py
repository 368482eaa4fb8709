"""Holding the conversation, with the OpenAI client as anybody would."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from e2e.demo.counters import Counters, has_settled
from e2e.demo.report import Turn

QUESTIONS = (
    "I want to visit Rome for two days. Tell me in detail what to see on the first day.",
    "That sounds lovely. Now tell me in detail what to do on the second day.",
    "What should I pack for these two days? Explain each thing.",
    "Write a long postcard to my grandmother about this trip.",
)
ANSWER_TOKENS = 120
"""Upper bound of an answer's length."""

_SETTLE_SECONDS = 60.0
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Answer:
    """A streamed answer."""

    text: str
    tokens: int
    prompt_tokens: int
    ttft_ms: int


def hold_conversation(
    client: OpenAI,
    model: str,
    questions: Sequence[str],
    read: Callable[[], Counters],
    show: Callable[[str], None],
) -> Iterator[Turn]:
    """Ask `questions` one after the other, each with all that was said before, and yield each turn when it has settled.

    `read` returns the engines' counters; `show` gets pieces of text as they arrive.
    """
    messages: list[ChatCompletionMessageParam] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        before = read()
        answer = ask(client, model, messages, show)
        messages.append({"role": "assistant", "content": answer.text})
        yield Turn(
            question=question,
            answer=answer.text,
            ttft_ms=answer.ttft_ms,
            prompt_tokens=answer.prompt_tokens,
            answer_tokens=answer.tokens,
            counted=settled(read, before, answer.prompt_tokens),
        )


def ask(
    client: OpenAI,
    model: str,
    messages: list[ChatCompletionMessageParam],
    show: Callable[[str], None],
    most_tokens: int = ANSWER_TOKENS,
) -> Answer:
    """Stream one answer. TTFT is from sending the request to the first piece of text at this client."""
    sent = time.monotonic()
    first: float | None = None
    pieces: list[str] = []
    tokens = prompt_tokens = 0
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=most_tokens,
        temperature=0,
        frequency_penalty=0.8,  # a model of 135 million parameters likes to repeat itself
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.usage:
            tokens, prompt_tokens = chunk.usage.completion_tokens, chunk.usage.prompt_tokens
        piece = chunk.choices[0].delta.content if chunk.choices else None
        if piece:
            first = first or time.monotonic()
            pieces.append(piece)
            show(piece)
    ttft = (first or time.monotonic()) - sent
    return Answer("".join(pieces), tokens, prompt_tokens, round(ttft * 1000))


def settled(
    read: Callable[[], Counters],
    before: Counters,
    prompt_tokens: int,
    limit_seconds: float = _SETTLE_SECONDS,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Counters:
    """What the turn added to the counters, once nothing more is expected of it or the limit has passed."""
    deadline = clock() + limit_seconds
    while True:
        turn = read() - before
        if has_settled(turn, prompt_tokens) or clock() >= deadline:
            return turn
        sleep(_POLL_SECONDS)
