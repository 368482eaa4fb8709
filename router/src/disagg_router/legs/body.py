"""The client's body, and what of it may go to prefill. Pure.

Values are kept as the JSON text that the client wrote, so numbers and strings reach the engine unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

Endpoint = Literal["chat", "completions", "responses"]

PATHS: dict[Endpoint, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
}

_TRANSFER_FIELDS = frozenset({"kv_transfer_params", "ec_transfer_params"})

# Output options. They are illegal beside one token that is not streamed (min_tokens, stream_options, ...), cost
# prefill work for nobody (logprobs, grammars), or multiply its requests (n, best_of). Everything else stays: the
# fields that shape the prompt must, or the KV would be that of another prompt, and that holds for fields that this
# list does not know yet. A field that prefill refuses all the same shows as a counted fallback, never as wrong text.
_NOT_ON_PREFILL = frozenset(
    {
        # how much and how it is sent
        "max_completion_tokens",
        "min_tokens",
        "stream_options",
        "stream_interval",
        "n",
        "best_of",
        "use_beam_search",
        "length_penalty",
        "ignore_eos",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "thinking_token_budget",
        "repetition_detection",
        "max_output_tokens",
        "max_tool_calls",
        # what is reported beside the text
        "include",
        "include_reasoning",
        "enable_response_messages",
        "echo",
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "logprob_token_ids",
        "return_tokens_as_token_ids",
        "return_token_ids",
        "return_token_offsets",
        "return_prompt_text",
        "routed_experts_prompt_start",
        # how a token is chosen and written
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "watermarking",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "structured_outputs",
    }
)


class BadBodyError(Exception):
    """The client's body is not a JSON object. The message is for the client."""


@dataclass(frozen=True, slots=True)
class Body:
    """A client's body: its top-level fields as JSON text, without transfer parameters."""

    fields: dict[str, msgspec.Raw]
    endpoint: Endpoint = "chat"

    @property
    def streamed(self) -> bool:
        return bytes(self.fields.get("stream", b"")) == b"true"

    @property
    def model(self) -> str | None:
        """The `model` field, None if it is absent or no text: the engine judges that."""
        return self.text("model")

    @property
    def batched(self) -> bool:
        """Whether there are several prompts in it, which vLLM computes as requests of their own."""
        raw = bytes(self.fields.get("prompt", b"")).lstrip()
        if not raw.startswith(b"[") or raw[1:].lstrip()[:1] not in (b'"', b"["):
            return False
        try:
            return len(_list.decode(raw)) > 1
        except (msgspec.DecodeError, RecursionError):
            return True

    @property
    def text_only(self) -> bool:
        """Whether all messages are plain text; False also if that cannot be told."""
        raw = self.fields.get("messages")
        if raw is None:
            return True
        try:
            contents = [message.content for message in _messages.decode(raw)]
        except (msgspec.DecodeError, RecursionError):
            return False
        return all(
            content is None
            or isinstance(content, str)
            or (isinstance(content, list) and all(part.type == "text" for part in content))
            for content in contents
        )

    def on(self, name: str) -> bool:
        """Whether a field is there with a value other than null or false."""
        return _set(self, name)

    def text(self, name: str) -> str | None:
        """A field's value if it is a text, else None."""
        try:
            return _text.decode(self.fields[name])
        except (KeyError, msgspec.DecodeError):
            return None

    def under(self, request_id: str) -> Body:
        """The body of a turn whose legs are joined by this id.

        Where other endpoints take the engine's request id from X-Request-Id, /v1/responses takes it from its body, and
        the id of its answer with it.
        """
        if self.endpoint != "responses":
            return self
        named = msgspec.Raw(msgspec.json.encode(f"resp_{request_id}"))
        return Body({**self.fields, "request_id": named}, self.endpoint)


class _Part(msgspec.Struct):
    type: str


class _Message(msgspec.Struct):
    content: str | list[_Part] | None = None


_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list = msgspec.json.Decoder(list[msgspec.Raw])
_messages = msgspec.json.Decoder(list[_Message])
_text = msgspec.json.Decoder(str)


def parse(body: bytes, endpoint: Endpoint = "chat") -> Body:
    """Read a client's body. Raises BadBodyError."""
    try:
        fields = _object.decode(body)
    except msgspec.ValidationError:
        raise BadBodyError("The body of the request must be a JSON object.") from None
    except (msgspec.DecodeError, RecursionError) as exc:
        raise BadBodyError(f"The body of the request is not valid JSON: {exc}") from None
    if bytes(fields.get("stream", b"null")) not in (b"true", b"false", b"null"):
        raise BadBodyError("`stream` must be true or false.")  # an engine takes "true" and 1 for true as well
    for name in _TRANSFER_FIELDS & fields.keys():
        del fields[name]
    if "vllm_xargs" in fields:
        fields["vllm_xargs"] = _without_transfer_fields(fields["vllm_xargs"])
    return Body(fields, endpoint)


def _without_transfer_fields(raw: msgspec.Raw) -> msgspec.Raw:
    """vLLM merges `vllm_xargs` into the same dictionary as the transfer parameters: a second way in."""
    try:
        xargs = _object.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        if bytes(raw).startswith(
            b"{"
        ):  # Python reads names that msgspec does not: those with half a surrogate pair
            raise BadBodyError("`vllm_xargs` is not valid JSON.") from None
        return raw  # no object: the engine refuses it
    for name in _TRANSFER_FIELDS & xargs.keys():
        del xargs[name]
    return msgspec.Raw(msgspec.json.encode(xargs))


def why_local(body: Body) -> str | None:
    """Why decode has to compute this prompt itself, or None if prefill can.

    - `parallel_sampling`: vLLM splits n > 1 and beam search into child requests under ids of their own, which cannot be
      joined with the prefill leg.
    - `prompt_logprobs`: they come from computing the prompt, so it has to happen where the answer is made. `echo` asks
      for them too: always in a chat, with `logprobs` in a text completion.
    - `truncation`: how much is cut may depend on the number of output tokens, which differs between the legs.
    - `prompt_embeds`: no token ids, so nothing to compare a prefix by.
    - `builtin_tools`: vLLM runs them by itself and goes on with requests of its own making, which prefill never sees.
    """
    if body.endpoint == "responses":
        if _set(body, "truncation", but=b'"disabled"'):
            return "truncation"
        return "builtin_tools" if _has_builtin_tools(body) else None
    if any(_set(body, name, but=b"1") for name in ("n", "best_of")) or _set(body, "use_beam_search"):
        return "parallel_sampling"
    echoed = _set(body, "echo") and ("messages" in body.fields or _set(body, "logprobs"))
    if echoed or _set(body, "prompt_logprobs"):
        return "prompt_logprobs"
    if _set(body, "truncate_prompt_tokens"):
        return "truncation"
    if _set(body, "prompt_embeds"):
        return "prompt_embeds"
    return None


def why_refused(body: Body) -> tuple[str, str] | None:
    """The field, and what to tell the client, of a request that no engine behind a router can serve; else None."""
    if body.endpoint != "responses":
        return None
    if _set(body, "previous_response_id"):
        return "previous_response_id", (
            "Responses are not stored, so there is no previous one: send the whole conversation in `input`."
        )
    if _set(body, "conversation"):
        return "conversation", "Conversations are not stored: send the whole conversation in `input`."
    if _set(body, "background"):
        return "background", (
            "Responses are not stored, so one that runs in the background could not be fetched: "
            "leave `background` out, and use `stream` for long answers."
        )
    return None


class _Tool(msgspec.Struct):
    type: str = "function"


_tools = msgspec.json.Decoder(list[_Tool] | None)


def _has_builtin_tools(body: Body) -> bool:
    try:
        tools = _tools.decode(body.fields.get("tools", b"null"))
    except (msgspec.DecodeError, RecursionError):
        return True  # whatever it is, decode judges it
    return any(tool.type != "function" for tool in tools or ())


def _set(body: Body, field: str, but: bytes = b"") -> bool:
    """Whether a field is there with a value other than null, false or `but`."""
    return bytes(body.fields.get(field, b"null")) not in (b"null", b"false", but)


def local_leg(body: Body) -> bytes:
    """The body for decode when it computes the prompt itself: an ordinary request."""
    return msgspec.json.encode(body.fields)


def with_params(body: Body, params: Mapping[str, Any] | msgspec.Raw) -> bytes:
    """The whole body, for decode, with the router's own transfer parameters."""
    return msgspec.json.encode({**body.fields, "kv_transfer_params": params})


def prompt_only(body: Body, params: Mapping[str, Any] | msgspec.Raw) -> bytes:
    """The same prompt for prefill, which makes exactly one token, with the router's own transfer parameters."""
    kept: dict[str, Any] = {name: raw for name, raw in body.fields.items() if name not in _NOT_ON_PREFILL}
    if body.endpoint == "responses":
        kept |= {"max_output_tokens": 1, "store": False}
    else:
        kept["max_tokens"] = 1
    kept |= {"stream": False, "kv_transfer_params": params}
    return msgspec.json.encode(kept)


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    input_tokens: int | None = None  # what /v1/responses calls it


class _PrefillAnswer(msgspec.Struct):
    usage: _Usage | None = None


_prefill_answer = msgspec.json.Decoder(_PrefillAnswer)


def prompt_tokens(answer: bytes) -> int | None:
    """The prompt's length in tokens, from prefill's answer; None if it does not say."""
    try:
        usage = _prefill_answer.decode(answer).usage
    except (msgspec.DecodeError, RecursionError):
        return None
    if usage is None:
        return None
    return usage.input_tokens if usage.prompt_tokens is None else usage.prompt_tokens
