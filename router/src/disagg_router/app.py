"""The OpenAI-compatible surface: which paths there are and who answers them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import unquote

import msgspec

from disagg_router import legs
from disagg_router.backends import Fleet
from disagg_router.config import Config
from disagg_router.errors import error_response, model_not_found, not_ready, unauthorized
from disagg_router.http1 import Exchange, Headers, RequestHead, Response
from disagg_router.keyfile import KeyFile
from disagg_router.keys import why_refused
from disagg_router.metrics import Metrics
from disagg_router.passthrough import Passthrough
from disagg_router.relay import named
from disagg_router.turn import Turns

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_HEALTH, _MODELS = "/health", "/v1/models"

_POOLING = (
    "The model behind this router generates text. Call an engine that serves an embedding or scoring model."
)
_STORED = (
    "Responses are not stored, so they can neither be fetched nor cancelled: use `stream` for long answers."
)
_MEDIA = "The router serves text generation only. Call an engine that serves a model for this directly."
_KEPT = "The router keeps nothing between requests. Send them one by one to /v1/chat/completions or /v1/responses."
_OTHER_API = "Use /v1/chat/completions or /v1/responses with the same messages."
_ADAPTERS = "Adapters are a setting of the engines: give them in the DisaggInference's engine.extraArgs."
# What OpenAI's or vLLM's API has and a router does not: the path, and all below it, with what to do instead.
_UNSERVED: dict[str, str] = {
    **dict.fromkeys(("/v1/embeddings", "/v2/embed", "/pooling", "/classify"), _POOLING),
    **dict.fromkeys(("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"), _POOLING),
    **dict.fromkeys(("/v1/moderations", "/generative_scoring"), _POOLING),
    "/v1/responses": _STORED,
    **dict.fromkeys(("/v1/audio", "/v1/images", "/v1/videos", "/v1/realtime"), _MEDIA),
    **dict.fromkeys(("/v1/files", "/v1/uploads", "/v1/batches", "/v1/conversations", "/v1/evals"), _KEPT),
    **dict.fromkeys(("/v1/assistants", "/v1/threads", "/v1/vector_stores", "/v1/fine_tuning"), _KEPT),
    **dict.fromkeys(("/v1/chat/completions/batch", "/v1/messages", "/cohere"), _OTHER_API),
    **dict.fromkeys(("/inference/v1/generate", "/invocations"), _OTHER_API),
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), _ADAPTERS),
}


@dataclass(frozen=True, slots=True)
class _Route:
    methods: tuple[str, ...]
    answer: Callable[[Exchange], Awaitable[None]]


class App:
    """Routes requests. `admit` sees a request's head, before its body is read; `handle` answers the whole request.

    With `keys` a client needs one of them for everything but `/health`.
    """

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        turns: Turns,
        passthrough: Passthrough,
        metrics: Metrics,
        new_id: Callable[[], str],
        keys: KeyFile | None = None,
    ) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._new_id = new_id
        self._keys = keys
        self._model = {
            "id": config.model.name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "disagg-inference",
        }
        models = Response(200, msgspec.json.encode({"object": "list", "data": [self._model]}))
        self._routes = {
            **{path: _post(_turn(turns, endpoint)) for endpoint, path in legs.PATHS.items()},
            "/tokenize": _post(passthrough.serve),
            "/detokenize": _post(passthrough.serve),
            _MODELS: self._get(lambda path: models),
            _HEALTH: self._get(lambda path: self._health()),
            "/metrics": self._get(lambda path: Response(200, metrics.render(), METRICS_TYPE)),
        }
        self._one_model = self._get(self._model_at)

    def _route(self, path: str) -> _Route | None:
        # A model's name may itself have slashes.
        return self._routes.get(path) or (self._one_model if path.startswith(_MODELS + "/") else None)

    def admit(self, head: RequestHead) -> Response | None:
        """Refuse who has no key, and what no handler would take: an unknown path, a wrong method, a body that is not JSON."""
        refusal = self._why_not(head)
        return None if refusal is None else self._counted(named(refusal, head.headers, self._new_id))

    def _why_not(self, head: RequestHead) -> Response | None:
        if self._keys is not None and head.path != _HEALTH:
            why = why_refused(self._keys.ring, head.headers)
            if why is not None:
                return unauthorized(why)
        route = self._route(head.path)
        if route is None:
            return _unknown(head)
        if head.method not in route.methods:
            message = f"{head.method} is not allowed on {head.path}; use {route.methods[0]}."
            return error_response(405, message, headers={"allow": ", ".join(route.methods)})
        if head.method == "POST":
            kind = (head.headers.get(b"content-type") or b"application/json").split(b";")[0].strip().lower()
            if kind != b"application/json" or head.headers.get(b"content-encoding") not in (
                None,
                b"identity",
            ):
                message = (
                    "The body must be sent as Content-Type: application/json without a Content-Encoding."
                )
                return error_response(415, message)
        return None

    async def handle(self, exchange: Exchange) -> None:
        head = exchange.request.head
        route = self._route(head.path)
        assert route is not None  # else it was not admitted
        if head.method == "OPTIONS":
            self._respond(exchange, Response(200, headers={"allow": ", ".join(route.methods)}))
        else:
            await route.answer(exchange)

    def core_error(self, status: int, message: str, headers: Headers) -> Response:
        """The HTTP core's own refusals, in the API's shape."""
        response = error_response(status, message[:1].upper() + message[1:] + ".")
        return self._counted(named(response, headers, self._new_id))

    def _get(self, make: Callable[[str], Response]) -> _Route:
        async def answer(exchange: Exchange) -> None:
            self._respond(exchange, make(exchange.request.head.path))

        return _Route(("GET", "HEAD", "OPTIONS"), answer)

    def _respond(self, exchange: Exchange, response: Response) -> None:
        exchange.respond(named(response, exchange.request.head.headers, self._new_id))

    def _counted(self, response: Response) -> Response:
        self._metrics.requests.labels("refused", str(response.status)).inc()
        return response

    def _health(self) -> Response:
        why = self._fleet.why_not_ready()
        if why is not None:
            return not_ready(f"Not healthy: {why}.")
        return Response(200, b'{"status":"ok"}')

    def _model_at(self, path: str) -> Response:
        name = unquote(path.removeprefix(_MODELS + "/"))
        if name != self._model["id"]:
            return self._counted(model_not_found(name))
        return Response(200, msgspec.json.encode(self._model))


def _post(answer: Callable[[Exchange], Awaitable[None]]) -> _Route:
    return _Route(("POST", "OPTIONS"), answer)


def _turn(turns: Turns, endpoint: legs.Endpoint) -> Callable[[Exchange], Awaitable[None]]:
    return lambda exchange: turns.serve(endpoint, exchange)


def _unknown(head: RequestHead) -> Response:
    for path, what_to_do in _UNSERVED.items():
        if head.path == path or head.path.startswith(path + "/"):
            message = f"The router does not serve {head.method} {head.path}. {what_to_do}"
            return error_response(501, message, code="unsupported_endpoint")
    return error_response(404, f"Unknown path: {head.method} {head.path}.", code="unknown_url")
