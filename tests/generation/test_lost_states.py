"""Generation goes on, with the same tokens, when a worker dies and its states are lost."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from penstock.generation.generate import Generator, Job
from penstock.generation.groups import Group
from tests.generation.subjects import expected, gpt2, pipeline, tokens


def jobs(count: int) -> list[Job]:
    groups = [tokens(1, 3 + 2 * k, seed=k) for k in range(count)]
    options = {"max_new_tokens": 12, "do_sample": True}
    return [
        Job(Group(range(1), (ids,), {**options, "attention_mask": torch.ones_like(ids)}), k)
        for k, ids in enumerate(groups)
    ]


@pytest.mark.parametrize("victim", [0, 1])
def test_jobs_begin_again(victim: int) -> None:
    """Each has ways of its own, which those that take over do not know yet."""
    model, made = gpt2(), jobs(4)
    with pipeline(model, "processes", on_failure="replace") as pipe:
        generator = Generator(model, pipe._sessions, 3, 1)
        for job in made:
            generator.add(job)
        for _ in range(14):
            generator.step()
        os.kill(pipe.members[victim].pid, signal.SIGKILL)
        while not generator.is_idle:
            generator.step()
        assert not pipe._runner.is_busy
        assert pipe.members.number == 1
        generator.close()
        kept = range(pipe._sessions._kept)
        assert pipe._workers.fetch_states(kept) == {}
    assert [job.error for job in made] == [None] * len(made)
    for k, job in enumerate(made):
        options = {"max_new_tokens": 12, "do_sample": True}
        (wanted,) = expected(model, [job.group.args[0]], seed=k, **options)
        assert torch.equal(job.result, wanted)


def test_a_pass_that_fails_has_the_others_begin_again_and_leaves_nothing() -> None:
    """A token that the model does not have fails in the first stage."""
    model, made = gpt2(), jobs(3)
    made[1].group.args[0][0, 0] = 999
    with pipeline(model) as pipe:
        generator = Generator(model, pipe._sessions, 3, 1)
        for job in made:
            generator.add(job)
        while not generator.is_idle:
            generator.step()
        assert not pipe._runner.is_busy
    assert made[1].error is not None
    for k in (0, 2):
        options = {"max_new_tokens": 12, "do_sample": True}
        (wanted,) = expected(model, [made[k].group.args[0]], seed=k, **options)
        assert torch.equal(made[k].result, wanted)
