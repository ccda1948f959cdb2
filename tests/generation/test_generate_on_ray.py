"""`Pipeline.generate` and sessions with actors of a Ray cluster: the tokens of the model itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import penstock as ps
from tests.generation import subjects
from tests.generation.ranks import LONG, MODES, SCORED, language_loss
from tests.generation.subjects import expected, gpt2, padded, pipeline, t5, tokens
from tests.support.actors import lent_actors

HERE: Any = ps.Ray(cpus=1)


@pytest.fixture(autouse=True)
def _actors() -> Iterator[None]:
    with lent_actors():
        yield


@pytest.mark.parametrize(
    ("name", "stages", "replicas"),
    [
        ("gpt2", 1, 2),
        pytest.param("gpt2", 2, 1, marks=pytest.mark.slow),
        pytest.param("llama", 3, 1, marks=pytest.mark.slow),
        pytest.param("t5", 2, 1, marks=pytest.mark.slow),
    ],
)
def test_tokens_of_every_mode(name: str, stages: int, replicas: int) -> None:
    model, ids = getattr(subjects, name)(), tokens(6, 5)
    with pipeline(model, HERE, stages, replicas=replicas) as pipe:
        for mode, options in MODES.items():
            found = pipe.generate(ids, group_size=2, seed=7, **options)
            groups = [ids[:2], ids[2:4], ids[4:]]
            assert torch.equal(found, padded(expected(model, groups, seed=7, **options))), mode
        pipe._sessions.drop()
        assert not pipe._workers.fetch_states(range(10_000))


def test_leaving_the_loop_and_errors() -> None:
    """Passes that are under way are completed or given up, in whatever order."""
    model, ids = gpt2(), tokens(4)
    wrong = ids.clone()
    wrong[2, 0] = 1000  # no such token
    text = padded(expected(model, [ids[:2], ids[2:]], **LONG))
    with pipeline(model, HERE) as pipe:
        for count, _ in enumerate(pipe.generate(ids, stream=True, **LONG)):
            if count == 3:
                break
        assert torch.equal(pipe.generate(ids, **LONG), text)
        with pytest.raises((ps.WorkerError, IndexError), match="index out of range"):
            pipe.generate(wrong, **LONG)
        assert torch.equal(pipe.generate(ids, **LONG), text)


def test_training_between() -> None:
    """Scores of the weights that the actors have; an encoder runs in the script with them."""
    for model, given in ((gpt2(), {}), (t5(), {"decoder_input_ids": tokens(4, 3)})):
        ids = tokens(4)
        with pipeline(model.train(), HERE) as pipe:
            optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
            for _ in range(2):
                target = given.get("decoder_input_ids", ids)
                pipe.train_step(input_ids=ids, **given, target=target, loss_fn=language_loss)
                optimizer.step()
                optimizer.zero_grad()
                model.eval()
                found = pipe.generate(ids, **SCORED)
                pipe.fetch()
                groups = expected(model, [ids[:2], ids[2:]], **SCORED)
                steps = zip(*(each.scores for each in groups), strict=True)  # type: ignore[attr-defined]
                assert all(map(torch.equal, found.scores, map(torch.cat, steps)))
                model.train()


def test_other_actors() -> None:
    """Nobody has the states of a session any more; what is generated begins again."""
    model, ids = gpt2(), tokens(4)
    with pipeline(model, HERE) as pipe:
        session = pipe.session(dynamic={"input_ids": {1: "length"}})
        first = session(input_ids=ids)
        pipe.resize(devices=["cpu"] * 3, progress=None)
        with pytest.raises(ps.StatesLost, match="Begin the session again"):
            session(input_ids=ids[:, :1], past_key_values=first.past_key_values)
        wanted = padded(expected(model, [ids[:2], ids[2:]], **LONG))
        assert torch.equal(pipe.generate(ids, group_size=2, **LONG), wanted)


def test_an_actor_dies() -> None:
    model, ids = gpt2(), tokens(4)
    with pipeline(model, HERE) as pipe:
        stream = pipe.generate(ids, stream=True, max_new_tokens=40, min_new_tokens=40)
        for _ in range(4):
            next(stream)
        os.kill(pipe.members[1].pid, signal.SIGKILL)
        with pytest.raises(ps.WorkerDied):
            list(stream)
        with pytest.raises(ps.ClosedError):
            pipe.generate(ids, max_new_tokens=2)
