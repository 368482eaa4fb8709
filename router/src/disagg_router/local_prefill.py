"""Whether what is new in a turn is so little that decode computes it itself (`router.localPrefill`). Pure.

Decode has a conversation's KV in its own prefix cache. The cheapest prefill of a few new tokens is there: no second engine
and no transfer. Many would hold up what decode generates for others; those prefill computes and pushes.

The router has no tokenizer. It takes `_BYTES_PER_TOKEN` bytes of the JSON text for a token, fewer than tokens of most texts
have, so that it errs towards prefill. An estimate that is wrong costs time, nothing else.
"""

from __future__ import annotations

from math import ceil

import msgspec

from disagg_router.legs import Body

_BYTES_PER_TOKEN = 3

_items = msgspec.json.Decoder(list[msgspec.Raw])


class _Item(msgspec.Struct):
    role: msgspec.Raw = msgspec.Raw(b"null")  # whatever it is, decode judges it


_item = msgspec.json.Decoder(_Item)


def new_tokens(body: Body, decode_has_it: bool) -> int | None:
    """About how many tokens of a prompt decode would have to compute, None if that cannot be told from its text.

    If decode has the conversation so far, what is new in a chat is what comes after the model's last message. Of other
    prompts nobody can say what of them the model wrote, so all of it counts.
    """
    if not body.text_only or body.endpoint == "responses":
        return None  # an image's address is short, a stored response's too: their tokens are many
    if decode_has_it and "messages" in body.fields:
        size = _after_last_answer(body.fields["messages"])
        return ceil(size / _BYTES_PER_TOKEN)
    return all_tokens(body)


def all_tokens(body: Body) -> int:
    """About how many tokens a prompt of text has."""
    return ceil(sum(len(memoryview(raw)) for raw in body.fields.values()) / _BYTES_PER_TOKEN)


def _after_last_answer(messages: msgspec.Raw) -> int:
    """Bytes of the messages after the last of the assistant, of all if there is none. `messages` are well-formed."""
    size = 0
    for message in reversed(_items.decode(messages)):
        if bytes(_item.decode(message).role) == b'"assistant"':
            break
        size += len(bytes(message))
    return size
