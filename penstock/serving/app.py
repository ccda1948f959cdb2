"""The HTTP interface: OpenAI's for completions, `/predict`, health and metrics."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.board.browsers import is_on_purpose
from penstock.errors import InputError
from penstock.serving.answers import Answer, Reason
from penstock.serving.completions import CompletionRequest, Reader
from penstock.serving.counting import Counts
from penstock.serving.engine import AnyJob, Engine, Ticket
from penstock.serving.plain import as_plain, prediction
from penstock.serving.refusal import Refusal
from penstock.serving.served import Served
from penstock.serving.text import Text

_LOG = logging.getLogger("penstock")
_BODY = 16 << 20  # bytes that a request may have
_WRITING = 10.0
"""Seconds for which a response may wait for its client after the time of the request."""
_OF_PAGES = ("origin", "sec-fetch-site")  # every POST that a page sends has one of them
_CLOSED = 499  # the status that nginx logs for a client that went away; nobody gets it


class _Gone(Exception):  # noqa: N818
    """The client went away."""


class _Events:
    """What comes of the jobs of one request, for the event loop.

    Args:
        engine: does them.
        jobs: of the request.
        timeout: seconds that the request may take in all.
        since: when it came, of `time.monotonic()`.
    """

    def __init__(
        self, engine: Engine, jobs: Sequence[AnyJob], timeout: float, since: float
    ) -> None:
        self._engine = engine
        self._jobs = jobs
        self._timeout = timeout
        self._queue: asyncio.Queue[tuple[int, Sequence[int], bool]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._ends_at = since + timeout
        self._left = len(jobs)
        self._ticket: Ticket = engine.submit(jobs, self._emit)

    def _emit(self, *event: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed, so nobody waits
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    async def each(self) -> AsyncIterator[tuple[int, Sequence[int], bool]]:
        """The number of a job, its new tokens, and whether it is over; until all are.

        If it is left before, the jobs are cancelled.

        Raises:
            Refusal: a job has failed, or time is over.
        """
        try:
            while self._left:
                number, tokens, is_over = await self._next()
                if is_over:
                    self._left -= 1
                    self._check(self._jobs[number])
                yield number, tokens, is_over
        finally:
            self.cancel()

    async def _next(self) -> tuple[int, Sequence[int], bool]:
        left = self._ends_at - time.monotonic()
        try:
            return await asyncio.wait_for(self._queue.get(), max(0.0, left))
        except TimeoutError:
            raise Refusal(
                504,
                f"it was not done within {self._timeout:g} s. Ask for fewer tokens, or start the "
                "server with a larger --timeout",
                code="timeout",
            ) from None

    def _check(self, job: AnyJob) -> None:
        """Raise what has become of a job that has failed.

        Raises:
            Refusal: it has.
        """
        error = job.error
        if isinstance(error, Refusal):
            raise error
        if error is not None:
            is_input = isinstance(error, InputError)
            name = type(error).__name__
            raise Refusal(400 if is_input else 500, f"{name}: {error}", code=name) from error

    def cancel(self) -> None:
        """End what is not over."""
        if self._left:
            self._engine.cancel(self._ticket)


@dataclass(frozen=True)
class _UnderWay:
    """A request that is answered.

    Attributes:
        wanted: what it asks for.
        answer: its form.
        events: the tokens as they come.
        texts: of every sequence.
        since: when the request came.
    """

    wanted: CompletionRequest
    answer: Answer
    events: _Events
    texts: Sequence[Text]
    since: float

    def usage(self) -> tuple[int, int]:
        """The tokens of the prompts, and those that were generated."""
        return sum(map(len, self.wanted.prompts)), sum(text.tokens for text in self.texts)


class Endpoints:
    """Answers requests.

    Args:
        served: the model.
        engine: does the work.
        counts: of requests.
        timeout: seconds that a request may take.
        reader: reads requests for completions.
        any_name: whether clients may call this machine by any name, as of `is_on_purpose`.
        origins: of pages that may ask from elsewhere.
    """

    def __init__(
        self,
        served: Served,
        engine: Engine,
        counts: Counts,
        timeout: float,
        reader: Reader,
        any_name: bool = False,
        origins: Collection[str] = (),
    ) -> None:
        self._served = served
        self._engine = engine
        self._counts = counts
        self._timeout = timeout
        self._reader = reader
        self._any_name, self._origins = any_name, origins
        self._since = int(time.time())
        self._example = served.example(1)

    def app(self) -> ASGIApp:
        """The application."""
        routes = [
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/v1/completions", self._answering(self._completions), methods=["POST"]),
            Route("/v1/chat/completions", self._answering(self._chat), methods=["POST"]),
            Route("/predict", self._answering(self._predict), methods=["POST"]),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _unknown})
        return _Limited(app, self._timeout + _WRITING)

    async def _health(self, request: Request) -> Response:
        ready = self._engine.ready
        state = {"status": "ok" if ready else "not serving", "model": self._served.name}
        return _json({**state, "open": self._engine.open}, 200 if ready else 503)

    async def _metrics(self, request: Request) -> Response:
        content, kind = self._counts.page(request.headers.get("accept", ""))
        return Response(content, headers={"Content-Type": kind})

    async def _models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._described()]})

    async def _model(self, request: Request) -> Response:
        if request.path_params["name"] == self._served.name:
            return _json(self._described())
        return _refused(_no_model(request.path_params["name"], self._served.name))

    def _described(self) -> dict[str, Any]:
        about = {"object": "model", "created": self._since, "owned_by": "penstock"}
        return {"id": self._served.name, **about}

    def _answering(
        self, answer: Callable[[Request, dict[str, Any], float], Awaitable[Response]]
    ) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """An endpoint: it reads the body, and what it raises becomes a response."""

        async def endpoint(request: Request) -> Response:
            since = time.monotonic()
            try:
                self._check_on_purpose(request)
                body = await asyncio.wait_for(_body(request), self._timeout)
                return await answer(request, body, since)
            except TimeoutError:
                refusal = Refusal(408, "the body of the request did not come", code="no_body")
                self._count(refusal, since)
                return _refused(refusal)
            except Refusal as refusal:
                self._count(refusal, since)
                return _refused(refusal)
            except (_Gone, ClientDisconnect):
                self._counts.ended("gone", since)
                return Response(status_code=_CLOSED)
            except Exception as error:
                _LOG.exception("a request has failed")
                failure = Refusal(500, f"{type(error).__name__}: {error}", code="internal_error")
                self._count(failure, since)
                return _refused(failure)

        return endpoint

    def _check_on_purpose(self, request: Request) -> None:
        """Raise if the page of a stranger may have had somebody's browser send this `POST`.

        Raises:
            Refusal: it may.
        """
        sent = {name: request.headers.get(name) for name in ("host", *_OF_PAGES)}
        is_of_page = any(sent[name] is not None for name in _OF_PAGES)
        if not is_of_page or sent["origin"] in self._origins:
            return
        if not is_on_purpose(request.headers, self._any_name):
            shown = ", ".join(f"{name}: {value}" for name, value in sent.items() if value)
            raise Refusal(
                403,
                f"this comes from a page of another site in a browser ({shown}). If that may use "
                f"the server, start it with --origin {sent['origin'] or 'URL'}",
                code="forbidden",
            )

    def _count(self, refusal: Refusal, since: float) -> None:
        if refusal.status == 504:
            self._counts.ended("timeout", since)
        elif refusal.status < 500:
            self._counts.ended("refused", since)
        else:
            self._counts.ended("failed", since)

    async def _completions(self, request: Request, body: dict[str, Any], since: float) -> Response:
        self._check_generates()
        wanted = await run_in_threadpool(self._reader.completion, body)  # long texts take long
        return await self._generate(request, wanted, False, since)

    async def _chat(self, request: Request, body: dict[str, Any], since: float) -> Response:
        self._check_generates()
        wanted = await run_in_threadpool(self._reader.chat, body)
        return await self._generate(request, wanted, True, since)

    def _check_generates(self) -> None:
        if not self._served.generates:
            raise Refusal(
                404,
                f"{self._served.name} has no generate(), so it completes nothing: POST /predict "
                "calls it",
                code="not_generative",
            )

    async def _generate(
        self, request: Request, wanted: CompletionRequest, is_chat: bool, since: float
    ) -> Response:
        seed = secrets.randbelow(1 << 31) if wanted.seed is None else wanted.seed
        events = _Events(self._engine, self._reader.jobs(wanted, seed), self._timeout, since)
        ends = self._reader.ends
        texts = [Text(self._served.tokenizer, ends, wanted.stop) for _ in wanted.prompts]
        under_way = _UnderWay(wanted, Answer(self._served.name, is_chat), events, texts, since)
        if wanted.stream:
            pieces = self._pieces(under_way)
            first = await _unless_gone(request, anext(pieces))  # what fails at once has its status
            stream = self._stream(first, pieces, events, since)
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            return _Stream(stream, media_type="text/event-stream", headers=headers)
        whole = await _unless_gone(request, self._whole(under_way))
        self._counts.ended("done", since)
        return _json(whole)

    async def _texts(self, of: _UnderWay) -> AsyncIterator[tuple[int, str, bool]]:
        """The number of a sequence, its new text, and whether it is over."""
        is_first = True
        async for number, tokens, is_over in of.events.each():
            if tokens:
                self._counts.came(len(tokens), of.since if is_first else None)
                is_first = False
            text = of.texts[number].add(tokens)
            yield number, text + of.texts[number].end() if is_over else text, is_over

    async def _whole(self, of: _UnderWay) -> dict[str, Any]:
        """The whole answer."""
        parts: list[list[str]] = [[] for _ in of.texts]
        async for number, text, _ in self._texts(of):
            parts[number].append(text)
        reasons = [_reason(text) for text in of.texts]
        return of.answer.whole(["".join(part) for part in parts], reasons, *of.usage())

    async def _pieces(self, of: _UnderWay) -> AsyncIterator[dict[str, Any]]:
        """The answer in pieces."""
        begun: set[int] = set()
        async for number, text, is_over in self._texts(of):
            if number not in begun:
                begun.add(number)
                for piece in of.answer.first(number):
                    yield piece
            if text:
                yield of.answer.piece(number, text)
            if is_over:
                yield of.answer.piece(number, "", _reason(of.texts[number]))
        if of.wanted.counts:
            yield of.answer.usage(*of.usage())

    async def _stream(
        self,
        first: dict[str, Any],
        pieces: AsyncIterator[dict[str, Any]],
        events: _Events,
        since: float,
    ) -> AsyncIterator[bytes]:
        """The pieces as server-sent events; an error is one, and ends them."""
        is_counted = False
        try:
            yield _event(first)
            async for piece in pieces:
                yield _event(piece)
            is_counted = True
            self._counts.ended("done", since)
            yield b"data: [DONE]\n\n"
        except Refusal as refusal:
            is_counted = True
            self._count(refusal, since)
            yield _event(refusal.body)
        finally:
            if not is_counted:
                self._counts.ended("gone", since)
            events.cancel()

    async def _predict(self, request: Request, body: dict[str, Any], since: float) -> Response:
        if self._served.generates:
            raise Refusal(
                404,
                f"{self._served.name} has generate(): POST /v1/completions",
                code="generative",
            )
        job = prediction(body, *self._example)
        events = _Events(self._engine, [job], self._timeout, since)

        async def done() -> Any:
            async for _ in events.each():
                pass
            return as_plain(job.result)

        result = await _unless_gone(request, done())
        self._counts.ended("done", since)
        return _json({"result": result})


class _Limited:
    """An application whose requests end in time, also where a client does not read what it gets.

    Args:
        app: the application.
        seconds: that a request may take, until its response is written.
    """

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self._app, self._seconds = app, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(TimeoutError):  # the connection is closed with its response unfinished
            async with asyncio.timeout(self._seconds):
                await self._app(scope, receive, send)


class _Stream(StreamingResponse):
    """A stream that is closed as soon as nobody reads it any more."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.body_iterator.aclose()  # type: ignore[attr-defined]


def _reason(text: Text) -> Reason:
    return "stop" if text.stopped else "length"


def _no_model(name: str, served: str) -> Refusal:
    message = f"there is no model {name!r}; {served!r} is served"
    return Refusal(404, message, param="model", code="model_not_found")


async def _body(request: Request) -> dict[str, Any]:
    """The body of a request, as JSON.

    Raises:
        Refusal: it is too long, or no object of JSON.
    """
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > _BODY:
            raise Refusal(413, f"the body has more than {_BODY} bytes", code="too_large")
    try:
        found = msgspec.json.decode(bytes(content))
    except msgspec.DecodeError as error:
        raise Refusal(400, f"the body is no JSON: {error}", code="no_json") from error
    except RecursionError as error:
        raise Refusal(400, "the body is nested too deeply", code="no_json") from error
    if not isinstance(found, dict):
        raise Refusal(400, "the body must be an object of JSON", code="no_object")
    return found


async def _unless_gone(request: Request, work: Awaitable[Any]) -> Any:
    """What some work gives; it is cancelled if the client goes away.

    Raises:
        _Gone: it has gone.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _Gone
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    """Return when the client has gone away; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def _json(data: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(data), status, media_type="application/json")


def _refused(refusal: Refusal) -> Response:
    response = _json(refusal.body, refusal.status)
    response.headers.update(refusal.headers)
    return response


async def _unknown(request: Request, error: Exception) -> Response:
    """The response to what no endpoint is for."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    known = "/v1/completions, /v1/chat/completions, /v1/models, /predict, /health and /metrics"
    message = f"{request.method} {request.url.path}: there are {known}"
    response = _refused(Refusal(status, message, code="unknown_url"))
    response.headers.update(getattr(error, "headers", None) or {})
    return response
