"""A server on a real port, and its clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import httpx
import openai
import pytest
import torch

from penstock.generation.seeds import seed_of
from penstock.serving import Served
from penstock.serving.app import Endpoints
from penstock.serving.completions import Reader
from penstock.serving.counting import Counts
from tests.serving.expected import numbers, result_of, tokens_of
from tests.serving.models import CONTEXT, gpt2, letters, net, t5
from tests.serving.running import TIMEOUT, Running, running

GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    limits = ["--queue", "2", "--in-flight", "2", "--max-tokens", "60"]
    target = "tests.serving.models:gpt2_with_letters"
    cuts = ["--cuts", "transformer.h.1", "--workers", "threads", "--name", "letters"]
    with running(target, *cuts, *limits) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT
    ) as found:
        yield found


@pytest.fixture(scope="module")
def model() -> Any:
    return gpt2()


def text_of(model: Any, prompt: list[int], **options: Any) -> str:
    text: str = letters().decode(tokens_of(model, prompt, **options))
    return text


def test_a_completion_is_what_generate_gives(client: openai.OpenAI, model: Any) -> None:
    found = client.completions.create(model="letters", prompt="hello", max_tokens=9, temperature=0)
    ids = letters()("hello").input_ids
    assert found.choices[0].text == text_of(model, ids, most=9)
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (5, 9)
    assert found.choices[0].finish_reason == "length"


def test_a_sampled_completion_is_that_of_its_seed(server: Running, model: Any) -> None:
    options = {"temperature": 0.8, "top_p": 0.9, "seed": 11}
    found = server.complete([[3, 4], [3, 4]], max_tokens=12, **options).json()["choices"]
    own = {"do_sample": True, "temperature": 0.8, "top_p": 0.9}
    expected = [text_of(model, [3, 4], most=12, seed=seed_of(11, k), **own) for k in range(2)]
    assert [choice["text"] for choice in found] == expected
    assert expected[0] != expected[1]


def test_a_stream_is_the_same_in_pieces(client: openai.OpenAI, model: Any) -> None:
    pieces = list(
        client.completions.create(
            model="letters",
            prompt=[5, 6, 7],
            max_tokens=9,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *texts, last = pieces
    assert "".join(piece.choices[0].text for piece in texts) == text_of(model, [5, 6, 7], most=9)
    assert sum(bool(piece.choices[0].text) for piece in texts) == 9
    assert texts[-1].choices[0].finish_reason == "length"
    assert last.usage is not None
    assert last.usage.completion_tokens == 9


def test_a_chat_and_its_stream(client: openai.OpenAI, model: Any) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    ids = letters()("u hi a").input_ids
    asked: dict[str, Any] = {"model": "letters", "messages": messages, "temperature": 0}
    whole = client.chat.completions.create(**asked, max_completion_tokens=7)
    assert whole.choices[0].message.content == text_of(model, ids, most=7)
    assert whole.choices[0].message.role == "assistant"
    pieces = client.chat.completions.create(**asked, max_tokens=7, stream=True)
    deltas = [piece.choices[0].delta for piece in pieces]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content


def test_a_stop_sequence_ends_it(server: Running, model: Any) -> None:
    whole = text_of(model, [5, 6, 7], most=20)
    stop = whole[4:6]
    found = server.complete([5, 6, 7], max_tokens=20, stop=[stop], **GREEDY).json()
    assert found["choices"][0]["text"] == whole[: whole.index(stop)]
    assert found["choices"][0]["finish_reason"] == "stop"
    assert found["usage"]["completion_tokens"] <= whole.index(stop) + 2


def test_a_stop_sequence_that_begins_in_the_prompt_ends_nothing(
    server: Running, model: Any
) -> None:
    whole = text_of(model, [5, 6, 7], most=12)
    stop = letters().decode([7]) + whole[0]
    assert stop not in whole
    found = server.complete([5, 6, 7], max_tokens=12, stop=[stop], **GREEDY).json()
    assert found["choices"][0]["text"] == whole
    assert found["choices"][0]["finish_reason"] == "length"


@pytest.mark.slow
def test_a_model_whose_settings_ask_for_beams_is_served_without(model: Any) -> None:
    with running("tests.serving.models:gpt2_with_beams", "--workers", "threads") as own:
        found = own.complete([5, 6, 7], max_tokens=9, **GREEDY).json()
    assert found["choices"][0]["text"] == text_of(model, [5, 6, 7], most=9)


def test_requests_at_the_same_time_do_not_change_each_other(server: Running, model: Any) -> None:
    prompts = [[k + 1, 2 * k + 1] for k in range(12)]

    def complete(prompt: list[int]) -> str:
        while (found := server.complete(prompt, max_tokens=5 + prompt[0], **GREEDY)).is_error:
            assert found.status_code == 429
            assert int(found.headers["Retry-After"]) >= 1
        text: str = found.json()["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(complete, prompts))
    assert found == [text_of(model, prompt, most=5 + prompt[0]) for prompt in prompts]


def _wait_until_idle(server: Running) -> None:
    while server.client.get("/health").json()["open"]:
        pass


def test_a_full_queue_is_a_429(server: Running) -> None:
    """Four have room. Streams that have begun hold it until they are over or their client goes."""
    _wait_until_idle(server)
    options = {"max_tokens": 60, "stream": True, "repetition_penalty": 3.0, **GREEDY}
    body = {"prompt": [[3], [4], [5], [6]], **options}
    with server.client.stream("POST", "/v1/completions", json=body) as stream:
        assert stream.status_code == 200
        found = server.complete([[1], [2], [3], [4]])
    assert found.status_code == 429
    assert found.json()["error"]["type"] == "rate_limit_error"
    assert int(found.headers["Retry-After"]) >= 1
    too_many = server.complete([[1]] * 5)
    assert too_many.status_code == 400
    assert "--queue" in too_many.json()["error"]["message"]


def counted(server: Running, outcome: str) -> float:
    """Requests that have ended in this way."""
    name = f'penstock_serving_requests_total{{outcome="{outcome}"}} '
    lines = server.client.get("/metrics").text.splitlines()
    return next((float(each.removeprefix(name)) for each in lines if each.startswith(name)), 0.0)


def test_a_client_that_goes_away_cancels_its_request(server: Running) -> None:
    _wait_until_idle(server)
    before = counted(server, "gone")
    options = {"max_tokens": 60, "stream": True, "seed": 1, "temperature": 1}
    with server.client.stream(
        "POST", "/v1/completions", json={"prompt": [[3]] * 4, **options}
    ) as stream:
        next(stream.iter_lines())
    _wait_until_idle(server)
    body = {"prompt": [[3]] * 4, "max_tokens": 60}
    short = httpx.Timeout(TIMEOUT, read=0.02)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=short)
    _wait_until_idle(server)
    while counted(server, "gone") < before + 2:
        pass


def test_what_is_wrong_is_told_as_openai_does(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=f"context is {CONTEXT}") as found:
        client.completions.create(model="letters", prompt=[1] * 60, max_tokens=9)
    assert found.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="temperature") as found:
        client.completions.create(model="letters", prompt="a", temperature=-1)
    assert found.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="there is no model 'another'"):
        client.completions.create(model="another", prompt="a")


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        (b"{", 400, "no JSON"),
        (b"[]", 400, "an object"),
        (b"\xff", 400, "no JSON"),
        (b"[" * 100_000, 400, "nested too deeply"),
        (b'{"prompt": "' + b"a" * (17 << 20) + b'"}', 413, "more than"),
    ],
)
def test_bodies_that_are_no_request(
    server: Running, content: bytes, status: int, message: str
) -> None:
    found = server.client.post("/v1/completions", content=content)
    assert found.status_code == status
    assert message in found.json()["error"]["message"]


class Failing(Reader):
    def completion(self, body: dict[str, Any]) -> Any:
        raise LookupError("on purpose")


def test_a_failure_of_the_server_has_openais_form() -> None:
    served, nothing = Served.of((gpt2(), letters()), "gpt2"), cast(Any, None)
    counts = Counts(nothing, lambda: 0, dict)
    app = Endpoints(served, nothing, counts, TIMEOUT, Failing(served, 32)).app()

    async def answer() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post("/v1/completions", json={"prompt": "ab"})

    found = asyncio.run(answer())
    assert found.status_code == 500
    assert found.json()["error"]["message"] == "LookupError: on purpose"


def test_what_there_is(server: Running, client: openai.OpenAI) -> None:
    assert [each.id for each in client.models.list()] == ["letters"]
    assert client.models.retrieve("letters").owned_by == "penstock"
    assert server.client.get("/v1/models/other").status_code == 404
    assert server.client.get("/other").json()["error"]["code"] == "unknown_url"
    assert server.client.get("/predict").status_code == 405
    assert server.client.post("/predict", json={}).json()["error"]["code"] == "generative"
    assert server.client.get("/health").json()["status"] == "ok"


def test_metrics(server: Running) -> None:
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    found = server.client.get("/metrics", headers=accept)
    assert found.headers["Content-Type"].startswith("application/openmetrics-text")
    for name in ("serving_tokens_total", "serving_request_seconds_count", "worker_up"):
        assert f"\npenstock_{name}" in found.text


def test_models_without_generate_are_called() -> None:
    with running("tests.serving.models:net", "--workers", "threads", "--cuts", "second") as server:
        for rows in (1, 4, 2):
            given = {"x": torch.randn(rows, 3).tolist(), "scale": [[0.5]] * rows}
            found = server.client.post("/predict", json={"kwargs": given}).json()["result"]
            expected = result_of(net().model, **given)
            assert found == {name: value.tolist() for name, value in expected.items()}
        wrong = server.client.post("/predict", json={"kwargs": {"x": [[1]], "scale": [[1]]}})
        assert wrong.status_code == 400, wrong.text
        assert server.complete([1]).json()["error"]["code"] == "not_generative"
        assert server.stop() == 0


def test_an_encoder_and_decoder_without_a_tokenizer() -> None:
    with running(
        "tests.serving.models:t5", "--workers", "threads", "--cuts", "decoder.block.1"
    ) as server:
        found = server.complete([3, 4, 5], max_tokens=7, **GREEDY).json()
        assert found["choices"][0]["text"] == numbers(tokens_of(t5(), [3, 4, 5], most=7))
        body = {"prompt": [3, 4, 5], "max_tokens": 7, "stream": True, **GREEDY}
        lines = server.client.post("/v1/completions", json=body).text.split("\n\n")
        pieces = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
        text = "".join(piece["choices"][0]["text"] for piece in pieces)
        assert text == found["choices"][0]["text"]
