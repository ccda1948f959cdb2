"""How fast the machine can run the stages of passes without any part of Penstock between them.

Three contestants take turns. They run the same calls of the stages, recorded from passes of a
pipeline of threads. *In turn*: one thread runs all calls. *Handed on*: a thread for each stage runs
its calls, and waits before each for the thread of the stage before, as one sequence goes through a
pipeline. *Side by side*: a thread for each stage runs its calls without waiting, as in a pipeline
that is always full. So the largest speed-up of two workers is the time *in turn* over the time
*side by side*. It is below two where stages are uneven, or compete for memory bandwidth, caches or
the interpreter's lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any

import torch

import penstock as ps
from penstock.bench.decoding import DEVICES, Call, Decoder, Passes, Work
from penstock.bench.turns import Tick, Timed, take_turns
from penstock.devices.cores import use_threads

IN_TURN, HANDED_ON, SIDE_BY_SIDE = "in turn", "handed on", "side by side"
WARM_UP = 1  # rounds that do not count
_PATIENCE = 60.0
"""Seconds that a thread may wait for another."""


class Threads:
    """A thread for each stage, which runs the calls of the stage.

    Args:
        work: the calls.
        handed_on: whether each call waits for that of the stage before, and a call of the first
            stage for that of the last stage in the pass before.

    Attributes:
        name: the name of the contestant.
        results: the results of the last call of each stage, by stage.
    """

    def __init__(self, work: Work, handed_on: bool) -> None:
        self.name = HANDED_ON if handed_on else SIDE_BY_SIDE
        self._work, self._handed_on = work, handed_on
        self.results: dict[int, Any] = {}

    def step(self) -> float:
        """Run all calls once; returns the mean seconds of a pass.

        Raises:
            queue.Empty: a thread has waited for too long.
        """
        count = len(DEVICES)
        calls = [self._work.calls[stage::count] for stage in range(count)]
        turns: list[SimpleQueue[None]] = [SimpleQueue() for _ in range(count)]
        ready = threading.Barrier(count + 1)
        errors: list[BaseException] = []

        def run(stage: int, own: Sequence[Call]) -> None:
            try:
                use_threads(1)
                ready.wait(_PATIENCE)
                with torch.no_grad():
                    for module, args in own:
                        if self._handed_on:
                            turns[stage].get(timeout=_PATIENCE)
                        self.results[stage] = module(*args)
                        turns[(stage + 1) % count].put(None)
            except BaseException as error:  # raised in the thread that waits for this one
                errors.append(error)

        threads = [threading.Thread(target=run, args=each) for each in enumerate(calls)]
        for thread in threads:
            thread.start()
        ready.wait(_PATIENCE)
        start = time.perf_counter()
        turns[0].put(None)
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
        if errors:
            raise errors[0]
        return seconds / len(calls[0])


def limits(
    decoder: Decoder, plan: ps.Plan | None, rounds: int, count: int, tick: Tick
) -> dict[str, list[float]]:
    """The mean seconds of a pass in every round: in turn, handed on and side by side.

    Args:
        decoder: the model and its passes.
        plan: the plan of the stages; by default two with equally many calls.
        rounds: the number of measured rounds.
        count: the number of passes in a round.
        tick: called before every turn.
    """
    with ExitStack() as stack:
        passes = Passes(decoder, "threads", count, stack, plan)
        passes.step()  # the first passes of a new length take longer
        work = Work(passes, count)
    contestants: list[Timed] = [work, Threads(work, True), Threads(work, False)]
    names = [IN_TURN, HANDED_ON, SIDE_BY_SIDE]
    return dict(zip(names, take_turns(contestants, rounds, tick, warm_up=WARM_UP), strict=True))
