"""The script runs the model itself only when no worker is amid a forward of the same modules."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch import nn

import penstock as ps
from tests.support.models import uniform_plan

BUSY: set[int] = set()
"""The threads of workers that are amid a forward."""

SEEN: list[bool] = []
"""For every forward in another thread whether a worker was amid one."""


class Slow(nn.Linear):
    """Says who runs it, and takes its time in a worker."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Values (rows, length, 4); returns the same shape."""
        thread = threading.current_thread()
        if not thread.name.startswith("penstock-"):
            SEEN.append(bool(BUSY))
            return super().forward(x)
        BUSY.add(thread.native_id or 0)
        time.sleep(0.1)
        result = super().forward(x)
        BUSY.discard(thread.native_id or 0)
        return result


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Slow(4, 4), nn.Tanh(), Slow(4, 4)).eval()


def pipeline(of: nn.Module, x: torch.Tensor, **options: Any) -> ps.Pipeline:
    program = ps.capture(of, (x,), dynamic={0: {1: "length"}})
    return ps.Pipeline(
        *(of, (x,)),
        program=program,
        plan=uniform_plan(program, 2, 1),
        progress=None,
        audit=None,
        threads_per_worker=1,
        **options,
    )


def test_map_over_new_lengths() -> None:
    own = model()
    xs = [torch.randn(2, length, 4) for length in (3, 4, 5, 7, 8, 9)]
    with pipeline(own, xs[0]) as pipe:
        SEEN.clear()
        found = list(pipe.map([(x,) for x in xs], ahead=4))
        looked = list(SEEN)
        with torch.no_grad():
            assert all(map(torch.equal, found, map(own, xs)))
    assert looked  # new lengths are compared with the model
    assert not any(looked)


def test_sessions_at_new_lengths() -> None:
    own = model()
    xs = [torch.randn(2, length, 4) for length in (3, 4, 5, 7)]
    with pipeline(own, xs[0]) as pipe, torch.no_grad():
        sessions = pipe._sessions
        under_way = [
            sessions.start(pipe.session(dynamic={0: {1: "length"}}), (x,), {}) for x in xs[:1]
        ]
        SEEN.clear()
        for x in xs[1:]:
            under_way.append(sessions.start(pipe.session(dynamic={0: {1: "length"}}), (x,), {}))
        looked = list(SEEN)
        found = [sessions.finish(each) for each in under_way]
        assert all(map(torch.equal, found, map(own, xs)))
    assert looked
    assert not any(looked)


def test_other_pipelines_of_the_model() -> None:
    own = model()
    xs = [torch.randn(2, length, 4) for length in (3, 4, 5, 7)]
    with pipeline(own, xs[0]) as busy, pipeline(own, xs[0]) as other, torch.no_grad():
        SEEN.clear()
        under_way = busy.map([(xs[0],)] * 12, ahead=12)
        found = [next(under_way)]
        results = [other(x) for x in xs[1:]]
        found += under_way
        assert all(map(torch.equal, found, [own(xs[0])] * 12))
        assert all(map(torch.equal, results, map(own, xs[1:])))
    assert SEEN
    assert not any(SEEN)
