"""What a request may take: tokens of its prompt, and time, also where its client does not read."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

import penstock as ps
from penstock.serving import Served, app, server
from penstock.serving.completions import MOST_PROMPT, Reader
from penstock.serving.counting import Counts
from penstock.serving.engine import Engine
from penstock.serving.refusal import Refusal
from penstock.serving.server import Settings
from tests.serving.models import gpt2, gpt2_with_letters, letters, t5
from tests.serving.test_engine import PATIENCE, Slow, engine


def test_a_prompt_has_no_more_tokens_than_the_server_takes() -> None:
    """T5 has no limit of its own."""
    served = Served.of(t5(), "t5")
    body = {"prompt": [3] * 5, "max_tokens": 2}
    assert Reader(served, 8, 5).completion(body).prompts == [[3] * 5]
    for reader, most in ((Reader(served, 16, 5), 5), (Reader(served, 16), MOST_PROMPT)):
        with pytest.raises(Refusal, match=f"this server takes {most}: ") as found:
            reader.completion({"prompt": [3] * (most + 1)})
        assert found.value.status == 400
        assert "--max-prompt" in found.value.message


def test_messages_are_a_prompt() -> None:
    reader = Reader(Served.of(gpt2_with_letters(), "letters"), 8, 4)
    with pytest.raises(Refusal, match="and this server takes 4: "):
        reader.chat({"messages": [{"role": "user", "content": "abcd"}]})


@pytest.mark.parametrize(("seconds", "wanted"), [(500.0, 500.0), (2.0, 60.0)])
def test_a_pass_may_take_as_long_as_a_request(
    seconds: float, wanted: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "Pipeline", lambda *args, **kwargs: kwargs)
    settings = Settings(timeout=seconds, workers="threads")
    found: Any = server._pipeline(Served.of(gpt2(), "gpt2"), settings)
    assert found["timeout"] == wanted
    compiled = Served(gpt2(), pipeline={"compile": True})
    found = server._pipeline(compiled, settings)
    assert found["timeout"] is None  # as long as compiling takes


class Talking(Slow):
    """Work that gives token after token, and never ends."""

    def add(self, job: Any) -> None:
        super().add(job)
        job.put(torch.ones(1, 2))  # the prompt

    def step(self) -> Sequence[Any]:
        for job in self.jobs:
            job.put(torch.tensor([3]))
        time.sleep(0.001)
        return self.jobs


def states() -> dict[int, int]:
    return {0: 1024, 1: 512}


def counts_of(of: Engine | None = None) -> Counts:
    """Of a pipeline that has not done anything."""
    nothing: Any = dict.fromkeys(("steps", "evaluations", "rows", "tokens"), 0)
    nothing |= {"step_seconds": None, "predicted_seconds": None, "bound_seconds": None}
    nothing["workers"] = ()
    status: Any = SimpleNamespace(**nothing)
    return Counts(lambda: status, lambda: 0 if of is None else of.open, states)


def page(counts: Counts) -> str:
    return counts.page("application/openmetrics-text; version=1.0.0")[0].decode()


Application = Callable[..., Any]


async def request(application: Application, body: dict[str, Any], reads: int) -> list[Any]:
    """What a client gets that reads so many messages of the response, and then no more."""
    got: list[Any] = []
    given = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Any:
        if not given:
            await asyncio.Event().wait()
        return given.pop()

    async def send(message: Any) -> None:
        if len(got) == reads:
            await asyncio.Event().wait()
        got.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
    }
    await asyncio.wait_for(application(scope, receive, send), PATIENCE)
    return got


def test_a_stream_ends_though_its_client_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_WRITING", 0.1)
    served = Served.of(gpt2(), "gpt2")
    with engine(Talking(), 4) as made:
        counts = counts_of(made)
        application = app.Endpoints(served, made, counts, 1.0, Reader(served, 16)).app()
        got = asyncio.run(request(application, {"prompt": [3], "stream": True}, 3))
        assert got[0]["status"] == 200
        while made.open:
            pass
        assert 'penstock_serving_requests_total{outcome="gone"} 1.0' in page(counts)


def test_the_time_of_a_request_begins_with_its_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on by the whole time that a request has while its body comes."""
    now = [0.0]
    read = app._body

    async def late(of: Any) -> dict[str, Any]:
        now[0] += 3600.0
        return await read(of)

    clock = SimpleNamespace(time=time.time, monotonic=lambda: now[0])
    monkeypatch.setattr(app, "time", clock)
    monkeypatch.setattr(app, "_body", late)
    served = Served.of(gpt2(), "gpt2")
    with engine(Talking(), 4) as made:
        counts = counts_of(made)
        application = app.Endpoints(served, made, counts, 3600.0, Reader(served, 16)).app()
        got = asyncio.run(request(application, {"prompt": [3]}, 9))
        assert got[0]["status"] == 504
        while made.open:
            pass
        assert 'penstock_serving_requests_total{outcome="timeout"} 1.0' in page(counts)


def test_the_dashboard_and_the_docs_have_every_series_of_the_server() -> None:
    counts = counts_of()
    counts.ended("done", time.monotonic())
    counts.came(1, time.monotonic())
    text = page(counts)
    assert 'penstock_serving_state_bytes{stage="1"} 512.0' in text
    served = set(re.findall(r"^# TYPE (penstock_serving_\w+)", text, re.MULTILINE))
    home = Path(ps.__file__).parents[1]
    for shown in (home / "examples" / "grafana.json", home / "docs" / "serving.md"):
        names = re.findall(r"penstock_serving_\w+", shown.read_text())
        assert {re.sub("_(total|bucket|sum|count)$", "", name) for name in names} == served


def test_prompts_are_counted_before_anything_is_made_of_them() -> None:
    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a prompt was read")

    served = Served.of((gpt2(), never), "gpt2")
    with engine(Slow(), 4) as made:
        reader = Reader(served, 16, check_count=made.check_count)
        for prompts in (["a"] * 5, [[1]] * 5):
            with pytest.raises(Refusal, match=r"room for 4 in all.*--queue") as found:
                reader.completion({"prompt": prompts})
            assert found.value.status == 400
            assert found.value.body["error"]["param"] == "prompt"
        assert len(reader.completion({"prompt": [[1]] * 4}).prompts) == 4


def test_others_are_answered_while_a_long_text_is_read() -> None:
    begun, may_go_on, real = threading.Event(), threading.Event(), letters()

    def tokenizer(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        assert may_go_on.wait(2)
        return real(*args, **kwargs)

    async def answers(application: Any) -> list[int]:
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            body = {"prompt": "a" * 9}
            reading = asyncio.ensure_future(client.post("/v1/completions", json=body))
            while not begun.is_set():
                await asyncio.sleep(0)
            health = await client.get("/health")
            may_go_on.set()
            return [health.status_code, (await reading).status_code]

    served = Served.of((gpt2(), tokenizer), "gpt2")
    with engine(Slow(), 4) as made:
        reader = Reader(served, 16, 8)  # the text is too long, which is known when it is read
        application = app.Endpoints(served, made, counts_of(made), PATIENCE, reader).app()
        assert asyncio.run(answers(application)) == [200, 400]
