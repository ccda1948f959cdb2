"""Generation goes on when workers die, and ends with an error that says so where it cannot."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch

import penstock as ps
from tests.generation.subjects import expected, gpt2, padded, pipeline, tokens
from tests.support.interrupts import interrupting


def kill(pipe: ps.Pipeline, number: int) -> None:
    os.kill(pipe.members[number].pid, signal.SIGKILL)


@pytest.mark.parametrize("on_failure", ["replace", "continue"])
def test_a_worker_dies(on_failure: Any) -> None:
    """Groups begin again, the same tokens come, and none of them twice."""
    model, ids = gpt2(), tokens(4)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": True}
    streamed: dict[int, list[int]] = {}
    with pipeline(model, "processes", on_failure=on_failure) as pipe:
        for number, new in enumerate(
            pipe.generate(ids, stream=True, seed=3, group_size=2, **options)
        ):
            if number == 9:
                kill(pipe, 1)
            for row, token in zip(new.rows, new.tokens.tolist(), strict=True):
                streamed.setdefault(row, []).append(token)
        again = pipe.generate(ids, seed=3, group_size=2, **options)
    wanted = padded(expected(model, [ids[:2], ids[2:]], seed=3, **options))
    assert [streamed[row] for row in range(4)] == wanted[:, 7:].tolist()
    assert torch.equal(again, wanted)


class Streamer:
    """Gets the prompt and then the tokens; ends a worker's process in the midst of them."""

    def __init__(self, pipe: ps.Pipeline) -> None:
        self.pipe = pipe
        self.values: list[list[int]] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value.flatten().tolist())
        if len(self.values) == 6:
            kill(self.pipe, 1)

    def end(self) -> None:
        self.ends += 1


def test_a_streamer_gets_nothing_twice_when_a_worker_dies() -> None:
    model, ids = gpt2(), tokens(1)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": True}
    with pipeline(model, "processes", on_failure="replace") as pipe:
        streamer = Streamer(pipe)
        found = pipe.generate(ids, seed=3, streamer=streamer, **options)
        assert pipe.members.number == 1
    assert streamer.values == [ids[0].tolist(), *([token] for token in found[0, 7:].tolist())]
    assert streamer.ends == 1


def test_a_worker_dies_and_nobody_takes_over() -> None:
    model, ids = gpt2(), tokens(4)
    with pipeline(model, "processes") as pipe:
        stream = pipe.generate(ids, stream=True, max_new_tokens=40, min_new_tokens=40)
        for _ in range(4):
            next(stream)
        kill(pipe, 0)
        with pytest.raises(ps.WorkerDied):
            list(stream)
        with pytest.raises(ps.ClosedError):
            pipe.generate(ids, max_new_tokens=2)
    assert not [t for t in threading.enumerate() if t.name == "generate"]


def test_a_stage_that_fails() -> None:
    """The error names the stage; the next text is right."""
    model, ids = gpt2(), tokens(2)
    with pipeline(model) as pipe:
        pipe.generate(ids, max_new_tokens=3)
        wrong = ids.clone()
        wrong[0, 0] = 1000  # no such token
        with pytest.raises((ps.WorkerError, ps.InputError, IndexError)):
            pipe.generate(wrong, max_new_tokens=3)
        found = pipe.generate(ids, max_new_tokens=3, group_size=2)
    assert torch.equal(found, expected(model, [ids], max_new_tokens=3)[0])


# The one that is lost in a finalizer of torch's, which says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupted() -> None:
    """Ctrl-C in the midst leaves no thread, and the pipeline goes on."""
    model, ids = gpt2(), tokens(4)
    with pipeline(model) as pipe:
        with pytest.raises(KeyboardInterrupt), interrupting(1.0):
            generate_for_ever(pipe, ids)
        assert not [t for t in threading.enumerate() if t.name == "generate"]
        found = pipe.generate(ids, max_new_tokens=3)
    assert torch.equal(found, padded(expected(model, [ids[:2], ids[2:]], max_new_tokens=3)))


def generate_for_ever(pipe: ps.Pipeline, ids: torch.Tensor) -> None:
    while True:
        pipe.generate(ids, max_new_tokens=60, min_new_tokens=60)


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_generation_that_fails_leaves_no_states(kind: Any) -> None:
    """Though the error is kept, whose traceback has them."""
    model, ids = gpt2(), tokens(4)

    def failing(seen: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if seen.shape[1] > 9:
            raise LookupError("on purpose")
        return scores

    with pipeline(model, kind) as pipe:
        errors = []
        for _ in range(2):
            with pytest.raises(LookupError) as found:
                pipe.generate(ids, max_new_tokens=8, logits_processor=[failing])
            errors.append(found.value)
        assert not [note for note in pipe.status().notes if "states of sessions" in note]
        again = pipe.generate(ids, max_new_tokens=8, group_size=2)
    assert torch.equal(again, padded(expected(model, [ids[:2], ids[2:]], max_new_tokens=8)))
