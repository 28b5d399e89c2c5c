"""Errors as OpenAI's clients expect them: ``{"error": {"message", "type", "param", "code"}}``, whatever went wrong."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ptqpipe.errors import PtqError, UsageError, one_line
from ptqpipe.serving.engine import ContextTooLong, Overloaded, Unavailable

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
RETRY_S = 5


class ApiError(Exception):
    """An error for the client. ``param`` names the field at fault, ``code`` the kind in one word."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, one_line(message), param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON body of the response."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


def api_error(error: Exception) -> ApiError:
    """The response for an error."""
    match error:
        case ApiError():
            return error
        case Overloaded():
            headers = {"Retry-After": str(error.retry_s)}
            return ApiError(429, str(error), code="queue_full", headers=headers)
        case Unavailable():
            return ApiError(503, str(error), code="unavailable", headers={"Retry-After": str(RETRY_S)})
        case ContextTooLong():
            return ApiError(400, str(error), code="context_length_exceeded")
        case UsageError():
            return ApiError(400, str(error))
        case RequestValidationError():
            return _invalid(error)
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        case PtqError():
            return ApiError(500, str(error))
        case _:
            return ApiError(500, f"the server failed on this request ({type(error).__name__}); its log says more")


def _invalid(error: RequestValidationError) -> ApiError:
    """A body that is no JSON (400) or has a field of the wrong type (422)."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    name = ".".join(place) or None
    return ApiError(422, f"{name or 'the body'}: {first['msg']}", param=name)


def _misdirected(app: FastAPI, request: Request, error: Exception) -> ApiError | None:
    """The error for a path or method without a route, and for a body that is not said to be JSON; None for others.

    Such a body is refused because browsers send one to any server without asking it first, whatever page they show.
    """
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        call = f"{request.method} {request.url.path}"
        return ApiError(
            error.status_code, f"there is no {call} here; there are {', '.join(_routes(app))}", headers=error.headers
        )
    if not isinstance(error, RequestValidationError) or not isinstance(error.body, bytes):
        return None
    content_type = request.headers.get("content-type")
    problem = "no content-type" if content_type is None else f"the content-type {content_type!r}"
    return ApiError(415, f"the body has {problem}; add the header content-type: application/json")


def _routes(app: FastAPI) -> list[str]:
    return [f"{method.upper()} {path}" for path, methods in app.openapi()["paths"].items() for method in methods]


def install(app: FastAPI) -> None:
    """Makes every error of the app one of these."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        return (_misdirected(app, request, error) or api_error(error)).response()

    for kind in (ApiError, PtqError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, handle)
