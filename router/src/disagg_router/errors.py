"""Error answers in the shape of OpenAI's API: `{"error": {"message", "type", "param", "code"}}`. Pure."""

from __future__ import annotations

import msgspec

from disagg_router.http1.message import Response

_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    403: "invalid_request_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    417: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    501: "invalid_request_error",
    503: "service_unavailable_error",
    504: "timeout_error",
    505: "invalid_request_error",
}


def error_response(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """An error answer; its `type` follows from the status."""
    error = {"message": message, "type": _TYPES.get(status, "server_error"), "param": param, "code": code}
    return Response(status, msgspec.json.encode({"error": error}), headers=headers or {})


def unauthorized(message: str) -> Response:
    headers = {"www-authenticate": "Bearer"}
    return error_response(401, message, code="invalid_api_key", headers=headers)


def model_not_found(name: str) -> Response:
    return error_response(404, f"The model `{name}` does not exist.", param="model", code="model_not_found")


def overloaded(status: int, reason: str, code: str, retry_after_seconds: int = 5) -> Response:
    """More is asked than the engines can do."""
    return error_response(status, reason, code=code, headers={"retry-after": str(retry_after_seconds)})


def not_ready(reason: str, retry_after_seconds: int = 2) -> Response:
    """No engine can take the request now."""
    return error_response(
        503, reason, code="no_engine_ready", headers={"retry-after": str(retry_after_seconds)}
    )
