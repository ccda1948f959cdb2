"""Errors that a client gets, in the form of OpenAI's interface."""

from __future__ import annotations

from typing import Any


class Refusal(Exception):  # noqa: N818 - most of them are the client's
    """A request that is not done, or not to its end.

    Args:
        status: of HTTP.
        message: what is wrong, why, and what would work.
        param: the field of the request that is at fault, if it is one.
        code: a name of the error for programs; `None` if it has none.
        retry_after: seconds after which it may be tried again, if that helps.

    Attributes:
        status, message, retry_after: as given.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.retry_after = retry_after
        self._param = param
        self._code = code

    @property
    def body(self) -> dict[str, Any]:
        """The response: an `error` with message, type, parameter and code, in OpenAI's form."""
        kind = "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        elif self.status < 500:
            kind = "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": self._param, "code": self._code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP headers of the response: `Retry-After`, in seconds, if that is known."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def wrong(param: str, message: str, code: str | None = None) -> Refusal:
    """The error for a field of a request that is not what it has to be."""
    return Refusal(400, message, param=param, code=code)
