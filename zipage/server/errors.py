"""Errors as OpenAI's clients expect them: a status, and a body that names the field."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request

from zipage.errors import (
    EngineDeadError,
    EngineOverloadedError,
    ModelError,
    RequestError,
    RequestTimeoutError,
    ZipageError,
)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_CODES = {401: "invalid_api_key", 413: "request_too_large", 429: "engine_overloaded"}
#: Seconds after which a rejected client may try again.
RETRY_AFTER = 1


class ApiError(HTTPException):
    """An error that is sent to the client unchanged.

    Args:
        status: the HTTP status.
        message: text for people.
        param: the field of the request that is at fault.
        code: error code for programs.
        headers: headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.message, self.param = message, param
        self.code = code or _CODES.get(status)

    def body(self) -> dict[str, Any]:
        """The response's body."""
        kind = _TYPES.get(self.status_code)
        if kind is None:
            kind = "server_error" if self.status_code >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """The answer."""
        return JSONResponse(self.body(), self.status_code, headers=self.headers)


def bad_request(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A 400 about a field."""
    return ApiError(400, message, param, code)


def unavailable(message: str) -> ApiError:
    """A 503."""
    return ApiError(503, message, headers={"Retry-After": str(RETRY_AFTER)})


def from_exception(error: BaseException) -> ApiError | None:
    """The response to an error of the engine; None if the error is a bug."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError):
        return unavailable(str(error))
    if isinstance(error, EngineOverloadedError):
        return ApiError(429, str(error), headers={"Retry-After": str(RETRY_AFTER)})
    if isinstance(error, RequestTimeoutError):
        return ApiError(504, str(error))
    if isinstance(error, (RequestError, ModelError)):
        # The engine's messages start with the option and its value: `top_p=7 is not legal: ...`.
        named = re.match(r"([\w.]+)(?:\[\w+\])?(?:=| is | has | holds )", str(error))
        param = named.group(1) if named else None
        return bad_request({"prompt_token_ids": "prompt"}.get(param or "", param), str(error))
    if isinstance(error, ZipageError):
        return ApiError(500, str(error))
    return None


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The response to a body that does not fit its model; names the first field at fault."""
    first = errors[0]
    # Unions add the name of each alternative to the path; only the client's own names are shown.
    path = [str(part) for part in first["loc"][1:] if _is_client_name(part)]
    field = ".".join(path)
    if first["type"] == "missing" and not path:
        return bad_request(None, "the request has no body: send a JSON object")
    if len(first["loc"]) > 1 and _alternatives(errors, first["loc"][1]) > 1:
        wanted = " or ".join(
            dict.fromkeys(str(e["msg"]) for e in errors if e["loc"][1:2] == first["loc"][1:2])
        )
        return bad_request(field or None, f"{field or 'the body'}: {wanted}")
    return bad_request(field or None, f"{field or 'the body'}: {first['msg']}")


def _is_client_name(part: Any) -> bool:
    if part in ("str", "int", "float", "bool"):
        return False
    return isinstance(part, int) or re.fullmatch(r"[a-z_]+", str(part)) is not None


def _alternatives(errors: Sequence[Mapping[str, Any]], field: Any) -> int:
    return sum(1 for error in errors if error["loc"][1:2] == (field,))


async def on_http_exception(request: Request, error: Exception) -> JSONResponse:
    """Answers `ApiError` and errors of routing: unknown paths and methods."""
    if isinstance(error, ApiError):
        return error.response()
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 404:
        message = f"there is no {request.method} {request.url.path}"
    elif error.status_code == 405:
        message = f"{request.url.path} does not take {request.method}"
    return ApiError(error.status_code, message, headers=error.headers).response()


async def on_invalid_body(request: Request, error: Exception) -> JSONResponse:
    """Answers bodies that do not fit their model."""
    assert isinstance(error, RequestValidationError)
    return from_validation(error.errors()).response()


async def on_zipage_error(request: Request, error: Exception) -> JSONResponse:
    """Answers requests that the engine refuses."""
    answer = from_exception(error)
    assert answer is not None
    return answer.response()
