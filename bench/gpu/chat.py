"""Chats of a known number of tokens for engines with dummy weights, and what the engines need for them.

Random weights answer with any token, and a conversation goes on with the answer's text. So the tokenizer's tokens are words of
four bytes each, of which any text is split the same way again, and answers are kept to some of them. Four bytes a token is
about what English has.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

WORDS = 4096
_FIRST = 2
_ANSWER_WORDS = 64
_TEMPLATE = "{% for message in messages %}{{ 'wfff' if message.role == 'assistant' else 'wffe' }}{{ message.content }}{% endfor %}wffd"


def _word(number: int) -> str:
    return f"w{number:03x}"


def write_tokenizer(model: Path) -> None:
    """Put it into a model folder, instead of what is there."""
    vocabulary = {"<s>": 0, "</s>": 1} | {_word(number): _FIRST + number for number in range(WORDS)}
    special = [
        {"id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for text, number in (("<s>", 0), ("</s>", 1))
    ]  # fmt: skip
    split = {"type": "Split", "pattern": {"Regex": "w[0-9a-f]{3}"}, "behavior": "Isolated", "invert": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": split,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<s>"},
    }
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<s>",
        "chat_template": _TEMPLATE,
    }
    (model / "tokenizer_config.json").write_text(json.dumps(settings))


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
        "allowed_token_ids": list(range(_FIRST, _FIRST + _ANSWER_WORDS)),
    }
