"""A pass that ends whoever runs it is given up, and all others go on."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.generation.generate import Generator, Job
from penstock.generation.groups import Group
from tests.generation.subjects import VOCABULARY, Plain, pipeline, tokens

DEADLY = VOCABULARY - 1


class Guard(nn.Module):
    """Ends its process at a token, as the system does to one that needs too much memory."""

    def __init__(self) -> None:
        super().__init__()
        self.script = os.getpid()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if int(ids.max()) == DEADLY and os.getpid() != self.script:
            os.kill(os.getpid(), signal.SIGKILL)
        return ids


class Guarded(Plain):
    """The model, with that."""

    def __init__(self) -> None:
        super().__init__()
        self.guard = Guard()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(self.guard(ids))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_request_fails_and_the_others_have_their_tokens() -> None:
    model = Guarded().eval()
    prompts = [tokens(1, 5, seed=k).clamp(max=DEADLY - 1) for k in range(3)]
    wanted = [model.generate(prompt, 2) for prompt in (prompts[0], prompts[2])]
    assert all(int(each.max()) < DEADLY for each in wanted)
    prompts[1][0, 2] = DEADLY
    jobs = [Job(Group(range(1), (prompt, 2), {}), 0) for prompt in prompts]
    with pipeline(model, "processes", on_failure="replace") as pipe:
        generator = Generator(model, pipe._sessions, 3, 1)
        for job in jobs:
            generator.add(job)
        while not generator.is_idle:
            generator.step()
        again = pipe.generate(prompts[0], 2)
    assert isinstance(jobs[1].error, ps.WorkerError)
    assert not isinstance(jobs[1].error, ps.WorkerDied)
    assert "It was given up, and the pipeline goes on" in str(jobs[1].error)
    for job, want in zip((jobs[0], jobs[2]), wanted, strict=True):
        assert job.error is None
        assert torch.equal(job.result, want)
    assert torch.equal(again, wanted[0])
