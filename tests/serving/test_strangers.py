"""Pages of other sites, and connections on which no request comes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.serving import Served, app, connections, server
from penstock.serving.completions import Reader
from penstock.serving.engine import Engine
from tests.serving.models import gpt2
from tests.serving.test_engine import PATIENCE, Slow, engine
from tests.serving.test_limits_of_requests import counts_of


@pytest.mark.parametrize(
    ("headers", "here", "elsewhere"),
    [
        ({}, 400, 400),
        ({"Host": "docker.internal"}, 400, 400),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, 403, 400),
        ({"Origin": "https://app.example", "Sec-Fetch-Site": "cross-site"}, 400, 400),
        ({"Origin": "https://evil.example"}, 403, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403, 403),
    ],
    ids=str,
)
def test_pages_of_other_sites_have_nothing_done(
    headers: dict[str, str], here: int, elsewhere: int
) -> None:
    """What is sent on purpose gets as far as its prompt, which is wrong."""
    served = Served.of(gpt2(), "gpt2")

    async def answer(made: Engine, any_name: bool) -> httpx.Response:
        reader, counts = Reader(served, 16), counts_of(made)
        allowed: Any = any_name, ["https://app.example"]
        application = app.Endpoints(served, made, counts, PATIENCE, reader, *allowed).app()
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            assert (await client.get("/health", headers=headers)).status_code == 200
            return await client.post("/v1/completions", json={"prompt": []}, headers=headers)

    with engine(Slow(), 1) as made:
        assert asyncio.run(answer(made, False)).status_code == here
        assert asyncio.run(answer(made, True)).status_code == elsewhere


LONG = 64 << 20  # bytes, far more than sockets hold


async def long(request: Request) -> Response:
    return Response(b"x" * LONG)


async def late(request: Request) -> Response:
    await request.body()
    await asyncio.sleep(0.8)
    return Response("late")


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Of a server that waits 0.3 s for a request, and then takes longer than that itself."""
    monkeypatch.setattr(connections, "_PATIENCE", 0.3)
    endpoints: Any = SimpleNamespace(
        app=lambda: Starlette(routes=[Route("/", late), Route("/long", long)])
    )
    serving = uvicorn.Server(server._config(endpoints, 0.0))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serving.run, kwargs={"sockets": [listener]})
        thread.start()
        yield listener.getsockname()[1]
        serving.should_exit = True
        thread.join(PATIENCE)


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"])
@pytest.mark.parametrize("drips", [False, True])
def test_who_asks_for_nothing_is_given_up(port: int, said: bytes, drips: bool) -> None:
    with (
        socket.create_connection(("127.0.0.1", port), 5) as sock,
        contextlib.suppress(ConnectionError),
    ):
        sock.sendall(said)
        sock.settimeout(0.05 if drips else 5)
        end = time.monotonic() + 5
        while time.monotonic() < end:
            try:
                assert sock.recv(1) == b""
                return
            except TimeoutError:
                sock.sendall(b"G" if drips else b"")
        pytest.fail("it was waited for")


def test_a_long_response_may_be_read_slowly(port: int) -> None:
    """As long as some of it is read from time to time."""
    with socket.create_connection(("127.0.0.1", port), 5) as sock:
        sock.sendall(b"GET /long HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        size = 0
        for pause in [0.15] * 8 + [0.0] * 10_000:
            time.sleep(pause)
            try:
                size += len(found := sock.recv(2 << 20))
            except ConnectionError:
                break
            if not found or size > LONG:
                break
        assert size > LONG


def test_who_asks_is_answered_however_long_it_takes(port: int) -> None:
    with httpx.Client(timeout=PATIENCE) as client:
        for _ in range(2):  # on one connection
            assert client.get(f"http://127.0.0.1:{port}/").text == "late"
