"""Chats of a known number of tokens for engines with dummy weights, and what the engines need for them.

Random weights answer with any token, and a conversation goes on with the answer's text. So the tokenizer's tokens are words of
four bytes each, of which any text is split the same way again, and answers are kept to some of them. Four bytes a token is
about what English has.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from bench.gpu.shapes import FIRST_WORD, write_tokenizer

WORDS = 4096
_ANSWER_WORDS = 64
_TEMPLATE = "{% for message in messages %}{{ 'wfff' if message.role == 'assistant' else 'wffe' }}{{ message.content }}{% endfor %}wffd"


def _word(number: int) -> str:
    return f"w{number:03x}"


def write_chat_tokenizer(model: Path) -> None:
    """Put it into a model folder, instead of what is there."""
    split = {"type": "Split", "pattern": {"Regex": "w[0-9a-f]{3}"}, "behavior": "Isolated", "invert": False}
    words = [_word(number) for number in range(WORDS)]
    write_tokenizer(model, words, {"type": "WordLevel"}, split, {"chat_template": _TEMPLATE})


def text(random: Random, tokens: int) -> str:
    """What a user says."""
    return "".join(_word(random.randrange(WORDS - 16)) for _ in range(tokens))


def body(model: str, messages: list[dict[str, str]], tokens: int) -> dict[str, Any]:
    """A request for an answer of so many tokens."""
    return {
        "model": model,
        "messages": messages,
        "stream": True,
        "max_tokens": tokens,
        "min_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "allowed_token_ids": list(range(FIRST_WORD, FIRST_WORD + _ANSWER_WORDS)),
    }
