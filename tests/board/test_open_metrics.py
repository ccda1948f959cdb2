"""The state of a pipeline as OpenMetrics."""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
import os
import re
import socket
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.board.metrics import address
from penstock.board.server import read_all
from tests.support.threads import NewThreads


def pipeline(**options: object) -> ps.Pipeline:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    given = {"cuts": ["1"], "schedule": "1f1b", "num_microbatches": 2, "audit": None, **options}
    return ps.Pipeline(model, (torch.ones(4, 3),), devices=["cpu", "cpu"], **given)


def scraped(url: str) -> dict[tuple[str, str], float]:
    """Every sample, by its name and worker, as a scraper of OpenMetrics reads it."""
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=accept)) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        samples = [sample for family in families for sample in family.samples]
    return {(sample.name, sample.labels.get("worker", "")): sample.value for sample in samples}


def test_they_can_be_scraped() -> None:
    x = torch.ones(4, 3)
    with pipeline(metrics=0) as pipe:
        url = pipe.metrics
        assert url.startswith("http://127.0.0.1:")
        assert ("penstock_step_seconds", "") not in scraped(url)
        for _ in range(2):
            pipe.train_step(x, target=x, loss_fn=F.mse_loss)
        found = scraped(url)
        assert found["penstock_steps_total", ""] == 2
        assert found["penstock_samples_total", ""] == 8
        assert found["penstock_step_seconds", ""] > 0
        assert found["penstock_worker_worked_seconds_total", "1"] > 0
        assert found["penstock_worker_up", "0"] == 1
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url)


def test_the_dashboard_shows_every_series() -> None:
    """examples/grafana.json leaves none out, and names no other but those of a server."""
    x = torch.ones(4, 3)
    with pipeline(metrics=0, memory_limit="1GiB") as pipe:
        pipe.train_step(x, target=x, loss_fn=F.mse_loss)
        served = {name for name, _ in scraped(pipe.metrics)}
    dashboard = json.loads((Path(ps.__file__).parents[1] / "examples/grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    shown = {name for query in queries for name in re.findall(r"penstock_\w+", query)}
    assert {name for name in shown if not name.startswith("penstock_serving_")} == served


def test_the_environment_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address(None) is None
    monkeypatch.setenv("PENSTOCK_METRICS", "0.0.0.0:9100")
    assert address(None) == ("0.0.0.0", 9100, False)
    assert address(9200) == ("127.0.0.1", 9200, True)
    monkeypatch.setenv("PENSTOCK_METRICS", "on")
    with pytest.raises(ps.InputError, match="PENSTOCK_METRICS='on'"):
        address(None)


@pytest.mark.parametrize("wrong", ["here", 70000, -1, True, "a:b"])
def test_what_is_no_place(wrong: object) -> None:
    with pytest.raises(ps.InputError, match="give a port"):
        pipeline(metrics=wrong)


def test_a_port_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ps.InputError, match="Give another port"):
            pipeline(metrics=other.getsockname()[1])


def test_two_pipelines_with_a_port_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("PENSTOCK_METRICS", str(port))
    with pipeline() as first:
        with pytest.warns(UserWarning, match="Give another port"):
            second = pipeline()
        second.close()
        assert first.metrics
        assert not second.metrics


def test_a_forgotten_pipeline_serves_nothing() -> None:
    pipe = pipeline(metrics=0)
    url, path = pipe.metrics, pipe._workers.board.path
    assert path is not None
    del pipe
    gc.collect()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url)
    assert not path.exists()


def test_a_fork_may_close_it() -> None:
    with pipeline(metrics=0) as pipe:
        child = os.fork()
        if not child:
            pipe._running.metrics.close()  # type: ignore[union-attr]
            os._exit(7)
        end = time.monotonic() + 20
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            assert time.monotonic() < end
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(ended[1]) == 7
        assert scraped(pipe.metrics)["penstock_worker_up", "0"] == 1


def test_the_thread_that_serves_may_close_it() -> None:
    """As it does if it is the one that collects a forgotten pipeline."""
    with pipeline(metrics=0) as pipe:
        url, server = pipe.metrics, pipe._running.metrics
        assert server is not None
        thread = server._server.thread
        server._server._respond = lambda asked: server.close() or b""  # type: ignore[func-returns-value]
        with pytest.raises(http.client.HTTPException):
            urllib.request.urlopen(url)
        thread.join(20)
        assert not thread.is_alive()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url)


def spoken(url: str, said: bytes) -> bytes:
    """What the server says to this; nothing if it closes the connection."""
    where = urlsplit(url)
    with socket.create_connection((where.hostname, where.port), 20) as sock:
        sock.sendall(said)
        return read_all(sock, time.monotonic() + 20, 1 << 20)


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\n\r\n", b"200 OK"),
        (b"GET / HTTP/1.0\r\nHost: a\r\n\r\n", b"200 OK"),
        (b"GET /state?a=b HTTP/1.1\r\n\r\n", b"200 OK"),
        (b"GET /metrics HTTP/1.1\r\nAccept: text/plain;version=a.b\r\n\r\n", b"200 OK"),
        (b"GET /../../etc/passwd HTTP/1.1\r\n\r\n", b"404 Not Found"),
        (b"GET \xff\xfe HTTP/1.1\r\n\r\n", b"404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"400 Bad Request"),
        (b"GET /stacks HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n", b"200 OK"),
        (b"GET /stacks HTTP/1.1\r\nHost: [::1]:1\r\n\r\n", b"200 OK"),
        (b"GET /stacks HTTP/1.1\r\nHost: [::1]\r\n\r\n", b"200 OK"),
        (
            b"GET /stacks HTTP/1.1\r\nHost: 127.0.0.1\r\nSec-Fetch-Site: cross-site\r\n\r\n",
            b"403 Forbidden",
        ),
        (b"GET /stacks HTTP/1.1\r\nHost: evil.example:1\r\n\r\n", b"403 Forbidden"),
        (b"GET /history HTTP/1.1\r\n\r\n", b"403 Forbidden"),
        (b"POST /record HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n", b"200 OK"),
        (
            b"POST /record HTTP/1.1\r\nHost: 127.0.0.1:1\r\nOrigin: http://evil.example\r\n\r\n",
            b"403 Forbidden",
        ),
        (b"\x80\x04.\r\n\r\n", b"400 Bad Request"),
        (b"GET /metrics HTTP/1.1\r\nA: " + b"x" * 10_000, b""),
    ],
)
def test_what_is_answered(said: bytes, status: bytes) -> None:
    with pipeline(metrics=0) as pipe:
        answer = b""
        with contextlib.suppress(ConnectionError):  # it has not read all
            answer = spoken(pipe.metrics, said)
        assert answer.partition(b"\r\n")[0].partition(b" ")[2] == status
        assert scraped(pipe.metrics)["penstock_worker_up", "0"] == 1


def test_idle_connections_cost_no_threads_and_stop_nothing(new_threads: NewThreads) -> None:
    """Three times as many as are kept, and they stay."""
    with pipeline(metrics=0) as pipe, contextlib.ExitStack() as stack:
        threads = set(new_threads())
        where = urlsplit(pipe.metrics)
        for _ in range(200):
            stack.enter_context(socket.create_connection((where.hostname, where.port), 20))
        assert scraped(pipe.metrics)["penstock_worker_up", "0"] == 1
        assert set(new_threads()) == threads
