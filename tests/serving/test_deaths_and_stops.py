"""A server whose workers are processes: some die while it serves, and none is left at the end."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.serving.expected import numbers, tokens_of
from tests.serving.models import gpt2
from tests.serving.running import Running, running

PROCESSES = ("tests.serving.models:gpt2", "--workers", "processes", "--cuts", "transformer.h.1")
SAMPLED = {"seed": 3, "temperature": 1.0}


def expected(prompt: list[int], most: int) -> str:
    return numbers(tokens_of(gpt2(), prompt, most=most, seed=3, do_sample=True, temperature=1.0))


def alive(pids: list[int]) -> list[int]:
    """Those of these processes that have not ended."""

    def runs(pid: int) -> bool:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state != "Z"

    return [pid for pid in pids if runs(pid)]


@pytest.mark.timeout(300)
def test_workers_that_die_while_requests_run_are_replaced_and_nothing_is_left() -> None:
    """Two die, each in the midst of streams, whose tokens are right; then SIGTERM in another."""
    with running(*PROCESSES) as server:
        for victim in (0, 1):
            before = server.workers()
            body = {"prompt": [3 + victim], "max_tokens": 50, "stream": True, **SAMPLED}
            with (
                ThreadPoolExecutor(3) as pool,
                server.client.stream("POST", "/v1/completions", json=body) as stream,
            ):
                lines = stream.iter_lines()
                first = json.loads(next(lines).removeprefix("data: "))
                others = [
                    pool.submit(server.complete, [k], max_tokens=9, **SAMPLED) for k in (7, 8, 9)
                ]
                os.kill(before[victim], signal.SIGKILL)
                rest = [json.loads(x.removeprefix("data: ")) for x in lines if x and x[6] != "["]
            text = "".join(piece["choices"][0]["text"] for piece in [first, *rest])
            assert text == expected([3 + victim], 50)
            found = [other.result().json()["choices"][0]["text"] for other in others]
            assert found == [expected([k], 9) for k in (7, 8, 9)]
            assert server.workers() != before
        _stops_in_the_midst_of_a_stream(server)


def _stops_in_the_midst_of_a_stream(server: Running) -> None:
    processes = [*server.children(), server.process.pid]
    body = {"prompt": [5], "max_tokens": 50, "stream": True, **SAMPLED}
    with server.client.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        first = json.loads(next(lines).removeprefix("data: "))
        server.process.send_signal(signal.SIGTERM)
        rest = [json.loads(x.removeprefix("data: ")) for x in lines if x and x[6] != "["]
    text = "".join(piece["choices"][0]["text"] for piece in [first, *rest])
    assert text == expected([5], 50)
    assert server.end() == 0
    assert server.said[-1] == "stopped\n"
    with pytest.raises(httpx.ConnectError):
        server.complete([5])
    assert alive(processes) == []


def test_a_worker_that_dies_while_there_is_nothing_to_do_and_ctrl_c() -> None:
    with running(*PROCESSES, "--grace", "0") as server:
        os.kill(server.workers()[0], signal.SIGKILL)
        assert server.complete([4], max_tokens=9, **SAMPLED).json()["choices"][0][
            "text"
        ] == expected([4], 9)
        processes = [*server.children(), server.process.pid]
        body = {"prompt": [5], "max_tokens": 60, "stream": True, **SAMPLED}
        with server.client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGINT)
            *_, last = [json.loads(x.removeprefix("data: ")) for x in lines if x]
        assert last["error"]["code"] == "stopped"
        assert server.end() == 130
        assert alive(processes) == []
