"""What the machine allows a pipeline: the stages of passes without anything of Penstock between.

Three contestants run the same calls of the stages, which passes in threads have made, and take
turns. *In turn*: one thread runs them all. *Handed on*: a thread for each stage runs its calls, and
waits before each for the thread of the stage before; as one sequence goes through a pipeline.
*Side by side*: a thread for each stage runs its calls and waits for nobody, as in a pipeline that
is always full. So the speed-up that two workers allow is what *in turn* takes of *side by side*,
which is below two where stages are uneven or share what they are limited by: memory, caches, the
interpreter's lock.
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
        handed_on: whether each waits for the call of the stage before, and the first one for the
            last stage.

    Attributes:
        name: what they are called.
        results: of the last call of each stage.
    """

    def __init__(self, work: Work, handed_on: bool) -> None:
        self.name = HANDED_ON if handed_on else SIDE_BY_SIDE
        self._work, self._handed_on = work, handed_on
        self.results: dict[int, Any] = {}

    def step(self) -> float:
        """All calls once; the mean seconds of a pass.

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
            except BaseException as error:  # it is raised where somebody waits
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
        decoder: what passes run.
        plan: of the stages; by default two with equally many calls.
        rounds: that count.
        count: passes in a round.
        tick: called before every turn.
    """
    with ExitStack() as stack:
        passes = Passes(decoder, "threads", count, stack, plan)
        passes.step()  # lengths that are new are looked at
        work = Work(passes, count)
    contestants: list[Timed] = [work, Threads(work, True), Threads(work, False)]
    names = [IN_TURN, HANDED_ON, SIDE_BY_SIDE]
    return dict(zip(names, take_turns(contestants, rounds, tick, warm_up=WARM_UP), strict=True))
