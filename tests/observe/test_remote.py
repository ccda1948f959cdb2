"""A pipeline of another machine, and the one that writes a folder, in `penstock top`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.account.history import read_run
from penstock.board import served as module
from penstock.board.served import Remote, url_of
from penstock.cli import main
from penstock.observe.on_demand import history_of
from penstock.observe.remote import Served
from penstock.observe.watch import Watch

pytestmark = pytest.mark.usefixtures("boards")


def pipeline(**options: object) -> ps.Pipeline:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    given = {"cuts": ["1"], "schedule": "1f1b", "num_microbatches": 2, "audit": None, **options}
    return ps.Pipeline(model, (torch.ones(4, 3),), devices=["cpu", "cpu"], **given)


def top(*arguments: str) -> tuple[int, str, str]:
    found = CliRunner().invoke(main, ["top", *arguments])
    return found.exit_code, found.stdout, found.stderr


@contextmanager
def answering(data: bytes, pause: float = 0.0) -> Iterator[str]:
    """A server that says this to everybody, byte by byte if there is a pause between them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    other, _ = listener.accept()
                    with other:
                        other.recv(1 << 12)
                        pieces = [data[k : k + 1] for k in range(len(data))] if pause else [data]
                        for piece in pieces:
                            other.sendall(piece)
                            time.sleep(pause)
                except OSError:
                    if listener.fileno() < 0:
                        return

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def test_a_pipeline_is_shown_from_its_address() -> None:
    x = torch.ones(4, 3)
    with pipeline(metrics=0) as pipe:
        for _ in range(3):
            pipe.train_step(x, target=x, loss_fn=F.mse_loss)
        code, out, err = top(pipe.metrics, "--json", "--stacks", "--interval", "0.1")
        assert code == 0, err
        found = json.loads(out)
        (status,) = found["pipelines"]
        assert status["steps"] == 3
        assert [worker["state"] for worker in status["workers"]] == ["running", "running"]
        assert status["workers"][0]["memory"] > 0
        host = socket.gethostname()
        assert list(found["stacks"]) == [
            f"process {os.getpid()} on {host}, worker {k}" for k in range(2)
        ]
        assert all("File " in stack for stack in found["stacks"].values())


def test_what_the_pipeline_says_is_shown(tmp_path: Path) -> None:
    x = torch.ones(4, 3)
    with pipeline(metrics=0) as pipe:
        pipe.train_step(x, target=x, loss_fn=F.mse_loss)
        pipe._runner.steps.kept.happened("a worker was replaced")
        for which in (pipe.metrics, str(os.getpid())):
            code, out, err = top(which, "--json", "--interval", "0.1")
            assert code == 0, err
            (status,) = json.loads(out)["pipelines"]
            (event,) = status["events"]
            assert (event["step"], event["what"]) == (1, "a worker was replaced")
            code, out, err = top(which, "--once", "--interval", "0.1")
            assert "after step 1: a worker was replaced" in out
        assert tuple(status["notes"]) == pipe.status().notes
        assert pipe.status().to_dict()["events"] == status["events"]


def test_a_report_from_an_address(tmp_path: Path) -> None:
    x = torch.ones(4, 3)
    with pipeline(metrics=0) as pipe:
        pipe.train_step(x, target=x, loss_fn=F.mse_loss)
        code, _, err = top(pipe.metrics, "--report", str(tmp_path / "a.html"))
        assert code == 0, err
        assert "Sequential" in (tmp_path / "a.html").read_text()


def test_a_timeline_from_an_address(tmp_path: Path) -> None:
    pytest.importorskip("perfetto")
    x, ended = torch.ones(4, 3), threading.Event()
    with pipeline(metrics=0) as pipe:

        def train() -> None:
            while not ended.is_set():
                pipe.train_step(x, target=x, loss_fn=F.mse_loss)
                time.sleep(0.02)

        thread = threading.Thread(target=train)
        thread.start()
        try:
            code, out, err = top(pipe.metrics, "--record", str(tmp_path / "a.pftrace"), "--json")
        finally:
            ended.set()
            thread.join()
        assert code == 0, err
        assert json.loads(out)["step"] > 0
        assert b"forward 0 in stage 0" in (tmp_path / "a.pftrace").read_bytes()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b'{"answer": 7}', "does not answer: Expected `object`"),
        (b'{"answer": [1e999]}', "does not answer"),
        (b'{"answer": ' + b"[" * 100_000, "does not answer"),
        (b'{"error": "\x1b[2J"}', "does not answer"),
        (b"<html>", "does not answer"),
    ],
)
def test_answers_that_make_no_sense(
    answer: bytes, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = module._page

    def lying(url: str, *rest: Any) -> bytes:
        return page(url, *rest) if url.endswith(module.STATE) else answer

    with pipeline(metrics=0) as pipe:
        monkeypatch.setattr(module, "_page", lying)
        code, _, err = top(pipe.metrics, "--report", "a.html")
        assert code == 1
        assert said in " ".join(err.split())
        assert "\x1b" not in err
        code, out, _ = top(pipe.metrics, "--once", "--stacks", "--interval", "0.1")
        assert code == 0
        assert "no answer" in out
        assert "\x1b" not in out


def test_a_history_that_nobody_could_show(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = module._page

    def lying(url: str, *rest: Any) -> bytes:
        found = page(url, *rest)
        if not url.endswith("/history"):
            return found
        history = json.loads(found)
        history["answer"]["about"]["plan"]["stages"] = []
        return json.dumps(history).encode()

    x = torch.ones(4, 3)
    with pipeline(metrics=0) as pipe:
        pipe.train_step(x, target=x, loss_fn=F.mse_loss)
        monkeypatch.setattr(module, "_page", lying)
        code, _, err = top(pipe.metrics, "--report", str(tmp_path / "a.html"))
        assert code == 1
        assert "makes no sense" in " ".join(err.split())
    assert not (tmp_path / "a.html").exists()


def test_times_are_those_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(4, 3)
    with pipeline(metrics=0) as pipe:
        pipe.train_step(x, target=x, loss_fn=F.mse_loss)
        fetched = module._fetched
        monkeypatch.setattr(module, "_fetched", lambda url: fetched(url).later(10**15))
        remote = Remote(url_of(pipe.metrics))
        remote.wait()
        assert 0 <= time.monotonic_ns() - remote.counted().latest[-1].end < 20e9
        remote.close()


def test_one_that_goes_away_is_gone() -> None:
    with pipeline(metrics=0) as pipe:
        served = Served(pipe.metrics)
        watch = Watch(source=served.find)
        watch.find()
        assert len(watch.jobs) == 1
    end = time.monotonic() + 20
    while watch.jobs:
        assert time.monotonic() < end
        time.sleep(0.1)
        watch.look()
        watch.find()
    assert "the pipeline is gone" in served.nothing
    assert "nobody listens there" in served.nothing
    served.close()


HEAD = b"HTTP/1.0 200 OK\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (HEAD + b"<html>", "not the state of a pipeline"),
        (HEAD + b"{}", "not the state of a pipeline"),
        (HEAD + b"x" * (5 << 20), "more than 4 MiB"),
        (b"HTTP/1.0 404 Not Found\r\n\r\n", "404 Not Found"),
        (b"SSH-2.0\r\n", "not the state"),
        (b"", "no pipeline is to be seen"),
    ],
)
def test_other_servers(answer: bytes, said: str) -> None:
    with answering(answer) as where:
        code, _, err = top(where, "--once")
    assert code == 2
    assert said in " ".join(err.split())


def test_a_slow_server() -> None:
    with answering(HEAD + b" " * 1000, pause=0.05) as where:
        code, _, err = top(where, "--once")
    assert code == 2
    assert "no answer within 3 s" in " ".join(err.split())


@pytest.mark.parametrize("wrong", ["host:", "https://a:1/", "a:99999", "nothing"])
def test_what_is_no_address(wrong: str) -> None:
    code, _, err = top(wrong, "--once")
    assert code == 2
    assert "HOST:PORT" in err


def test_the_folder_of_a_run(tmp_path: Path) -> None:
    folder = tmp_path / "first"
    with pipeline(run=folder), pipeline():
        code, out, err = top(str(folder), "--json", "--interval", "0.1")
        assert code == 0, err
        assert len(json.loads(out)["pipelines"]) == 1
    code, _, err = top(str(folder), "--once")
    assert code == 2
    assert "was closed" in err
    assert f"penstock report {folder}" in err


RANKS = """
import time, torch
from torch import nn
from torch.nn import functional as F
import penstock as ps
model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
x = torch.ones(4, 3)
pipe = ps.Pipeline(
    model, (x,), devices=["cpu", "cpu"], cuts=["1"], schedule="1f1b", num_microbatches=2, audit=None
)
while True:
    pipe.train_step(x, target=x, loss_fn=F.mse_loss)
    time.sleep(0.02)
"""


def test_all_ranks_from_the_address_of_the_first(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANKS)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(tmp_path / "train.py")]
    environment = {**os.environ, "PENSTOCK_METRICS": str(port)}
    job = subprocess.Popen(command, env=environment)
    try:
        end, states = time.monotonic() + 90, []
        while states != ["running", "running"]:
            assert time.monotonic() < end, states
            code, out, _ = top(f"127.0.0.1:{port}", "--json", "--interval", "0.1")
            (status,) = json.loads(out)["pipelines"] if code == 0 else [{"workers": []}]
            states = [worker["state"] for worker in status["workers"]]
            time.sleep(0.2)
        assert status["ranks"] == 2
        where = f"127.0.0.1:{port}"
        code, out, err = top(where, "--json", "--stacks", "--interval", "0.1")
        assert code == 0, err
        stacks = json.loads(out)["stacks"]
        assert [name.rpartition(", ")[2] for name in stacks] == ["worker 0", "worker 1"]
        assert all("File " in stack for stack in stacks.values())
        code, out, err = top(where, "--record", str(tmp_path / "a.pftrace"), "--json")
        assert code == 0, err
        trace = (tmp_path / "a.pftrace").read_bytes()
        assert b"forward 0 in stage 0" in trace
        assert b"forward 0 in stage 1" in trace
        code, _, err = top(where, "--report", str(tmp_path / "a.html"))
        assert code == 0, err
    finally:
        job.terminate()
        job.wait(30)


def test_what_is_predicted_anew_is_said_to_all() -> None:
    x = torch.ones(4, 3)
    with pipeline(metrics=0) as pipe:
        pipe.train_step(x, target=x, loss_fn=F.mse_loss)
        plan = msgspec.structs.replace(pipe.plan, predicted_step_seconds=7.0)
        pipe._running._predict(plan, None)
        assert pipe.status().predicted_seconds == 7.0
        for which in (pipe.metrics, str(os.getpid())):
            code, out, _ = top(which, "--json", "--interval", "0.1")
            assert code == 0
            assert json.loads(out)["pipelines"][0]["predicted_seconds"] == 7.0
        served = Served(pipe.metrics)
        assert history_of(served.find()[0]).about.plan.predicted_step_seconds == 7.0
        served.close()


def test_others_ask_for_records_once_in_a_second_and_fill_no_folder(tmp_path: Path) -> None:
    x = torch.ones(4, 3)
    with pipeline(metrics=0, run=tmp_path / "first") as pipe:
        for _ in range(40):
            pipe.train_step(x, target=x, loss_fn=F.mse_loss)
        remote = Remote(url_of(pipe.metrics))
        remote.wait()
        before = len(read_run(tmp_path / "first").records)
        known = {record.step for record in pipe.history().records}
        for _ in range(5):
            remote.ask("record", 5.0)
            pipe.train_step(x, target=x, loss_fn=F.mse_loss)
        asked = {record.step for record in pipe.history().records} - known
        assert 1 <= len(asked) < 5
        assert len(read_run(tmp_path / "first").records) == before
        remote.close()
