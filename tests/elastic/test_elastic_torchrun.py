"""Real agents of torchrun: ranks that are killed or asked to end, machines that come and go."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import penstock as ps
from tests.elastic.job import Job, send
from tests.elastic.torchrun import run
from tests.elastic.training import reference

STEPS = 60
ARGUMENTS = ["--steps", str(STEPS), "--every", "5", "--pause", "0.05"]


def starts(job: Job) -> list[tuple[int, int]]:
    """From which step ranks 0 have gone on, and of how many."""
    return [
        (int(line.what.split()[1]), line.world)
        for line in job.log()
        if line.rank == 0 and line.what.startswith("from ")
    ]


def trains(job: Job, start: int, steps: int) -> None:
    """Wait until ranks that were started the nth time have trained some steps."""

    def is_so() -> bool:
        lines = job.log()
        begun = [k for k, line in enumerate(lines) if line.rank == 0 and "from " in line.what]
        own = lines[begun[start] :] if len(begun) > start else []
        return sum(line.step >= 0 and line.rank == 0 for line in own) >= steps

    job.until(is_so)


def done(job: Job) -> int:
    """The steps that were done when ranks were asked to end: all before the one that began."""
    return next(line.step for line in reversed(job.log()) if line.step >= 0)


def assert_same_bits(job: Job, model: str = "gpt") -> None:
    found = torch.load(job.folder / "end.pt", weights_only=True)
    for name, value in reference(model, STEPS).items():
        assert torch.equal(found[name], value), name


@pytest.mark.timeout(600)
def test_one_agent(tmp_path: Path) -> None:
    """Its rank 0 is killed; one rank gets SIGTERM; the agent does; with other numbers of ranks."""
    (tmp_path / "job").mkdir()
    with Job(tmp_path / "job", ARGUMENTS) as job:
        first = job.start(2)
        trains(job, 0, 9)
        killed = job.step
        send(next(line.pid for line in job.log() if line.rank == 0), signal.SIGKILL)
        trains(job, 1, 3)
        assert starts(job)[1] in [(number, 2) for number in range(5, killed + 1, 5)]
        send(job.ranks_of(first)[1], signal.SIGTERM)
        assert first.wait(60) == 0  # as all ranks have ended well
        assert job.left() == []
        saved = ps.load(job.folder / "run").batches
        assert saved == done(job)  # no step is lost

        second = job.start(3)
        trains(job, 2, 3)
        assert starts(job)[2] == (saved, 3)
        second.send_signal(signal.SIGTERM)
        assert second.wait(60) != 0  # the agent's own
        assert job.left() == []
        saved = ps.load(job.folder / "run").batches
        assert saved == done(job)

        third = job.start(1)
        assert third.wait(100) == 0
        assert starts(job)[3] == (saved, 1)
        assert_same_bits(job)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_machine_that_joins_and_leaves(tmp_path: Path) -> None:
    """No step is lost when it joins, nor when it leaves because it was asked to."""
    (tmp_path / "job").mkdir()
    with Job(tmp_path / "job", ARGUMENTS) as job:
        first = job.start(1)
        trains(job, 0, 3)
        second = job.start(1)
        trains(job, 1, 3)
        alone = [line.step for line in job.log() if line.world == 1]
        assert starts(job)[1] == (max(alone), 2)
        second.send_signal(signal.SIGTERM)
        trains(job, 2, 3)
        assert starts(job)[2][1] == 1
        assert second.wait(60) != 0
        third = job.start(2)
        trains(job, 3, 3)
        assert starts(job)[3][1] == 3
        job.lose(first)  # with the rank 0 of then
        trains(job, 4, 3)
        assert starts(job)[4][1] == 2
        assert third.wait(100) == 0
        assert_same_bits(job)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("model", "seed"), [("gpt", 1), ("resnet", 2)])
def test_random_events(tmp_path: Path, model: str, seed: int) -> None:
    (tmp_path / "job").mkdir()
    assert run(model, seed, tmp_path / "job", steps=100, events=8).problems == []


def test_what_is_not_right_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ends with other bits."""

    class Ended(Job):
        """Whose end was written by nobody."""

        def __init__(self, folder: Path, arguments: object) -> None:
            super().__init__(folder)
            state = reference("resnet", 3)
            state["0.0.weight"] = state["0.0.weight"] + 1e-7
            torch.save(state, folder / "end.pt")

        def start(self, ranks: int) -> None:  # type: ignore[override]
            """Nobody."""

    monkeypatch.setattr("tests.elastic.torchrun.Job", Ended)
    outcome = run("resnet", 0, tmp_path, steps=3, events=0)
    assert outcome.problems == ["0.0.weight differs"]
    assert '"same_bits": false' in outcome.line()
    assert os.listdir(tmp_path) == ["end.pt"]
