"""What `on_failure` costs while nothing fails: steps of pipelines with and without it.

    python -m penstock.bench surviving [--workers ray] [--models gpt,tiny] [--seconds 60]
        [--steps 1] [--quick] [--json FILE] [--record]

Three pipelines with the same plan, one for each value of `on_failure`, have two worker processes
each, or two actors of a Ray cluster on this machine. They take turns of one or several whole steps:
gradients are dropped, the batch is trained, and Adam updates the parameters. Times are divided by
those of `"raise"` in the same turn; the ratios are medians, with the interval in which 95 % of the
medians of resampled turns lie. The ratio of all seconds is given as well, as actors do not copy
their state in every step.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

import penstock as ps
from penstock.bench import record
from penstock.bench.guarded import interval
from penstock.bench.subjects import Subject, subjects

_WARM_UP = 5  # steps; in the first ones optimizer state comes to shared memory
_FEWEST = 5  # turns, however long they take
_SETTINGS: tuple[Any, ...] = ("raise", "replace", "continue")


class _Side:
    """One pipeline with its optimizer.

    Args:
        subject: what is trained.
        settings: of the pipeline.
        stack: closes it.
    """

    def __init__(self, subject: Subject, settings: dict[str, Any], stack: ExitStack) -> None:
        self._x, self._y = subject.data()
        self._loss = subject.loss
        self.pipe = stack.enter_context(
            ps.Pipeline(
                subject.build(),
                (self._x,),
                devices=["cpu", "cpu"],
                audit=None,
                **settings,
            )
        )
        self._optimizer = self.pipe.optimizer(torch.optim.Adam, lr=1e-4)

    def turn(self, steps: int) -> tuple[float, float]:
        """Take some steps; returns the mean seconds of a step, and of the optimizer in it."""
        whole, optimizer = zip(*(self._step() for _ in range(steps)), strict=True)
        return statistics.mean(whole), statistics.mean(optimizer)

    def _step(self) -> tuple[float, float]:
        begun = time.perf_counter()
        self._optimizer.zero_grad()
        self.pipe.train_step(self._x, target=self._y, loss_fn=self._loss)
        trained = time.perf_counter()
        self._optimizer.step()
        ended = time.perf_counter()
        return ended - begun, ended - trained


def cost(
    subject: Subject, seconds: float, workers: str = "processes", steps: int = 1
) -> dict[str, Any]:
    """Train for a while, and say what a step takes with each setting.

    Args:
        subject: what is trained.
        seconds: how long; a few turns at least.
        workers: their kind.
        steps: of a turn.
    """
    with ExitStack() as stack:
        first = _Side(
            subject, {"workers": workers, "replicas": 1, "on_failure": _SETTINGS[0]}, stack
        )
        plan = first.pipe.plan
        sides = {_SETTINGS[0]: first}
        for setting in _SETTINGS[1:]:
            given = {"workers": workers, "plan": plan, "on_failure": setting}
            sides[setting] = _Side(subject, given, stack)
        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        warm_up = -(-_WARM_UP // steps)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(spent[_SETTINGS[0]]) < warm_up + _FEWEST:
            for name in random.sample([*sides], len(sides)):
                spent[name].append(sides[name].turn(steps))
    measured = {name: times[warm_up:] for name, times in spent.items()}
    without = measured[_SETTINGS[0]]
    ratios = {}
    for name in _SETTINGS[1:]:
        whole = [a[0] / b[0] for a, b in zip(measured[name], without, strict=True)]
        optimizer = [a[1] / b[1] for a, b in zip(measured[name], without, strict=True)]
        ratios[name] = {
            "step": [statistics.median(whole), *interval(whole)],
            "optimizer": [statistics.median(optimizer), *interval(optimizer)],
            "all": sum(a[0] for a in measured[name]) / sum(b[0] for b in without),
        }
    return {
        "model": subject.name,
        "workers": workers,
        "steps": steps,
        "turns": len(without),
        "milliseconds": 1e3 * statistics.median(step for step, _ in without),
        "optimizer_milliseconds": 1e3 * statistics.median(own for _, own in without),
        "ratios": ratios,
    }


def main(arguments: Sequence[str]) -> int:
    """Measure and print."""
    parser = record.parser("surviving", __doc__)
    parser.add_argument("--workers", choices=["processes", "ray"], default="processes")
    parser.add_argument("--models", default="gpt,tiny")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each model")
    parser.add_argument("--steps", type=int, default=1, help="steps of a turn")
    parser.add_argument("--quick", action="store_true", help="small models")
    options = parser.parse_args(arguments)
    found = []
    for name in options.models.split(","):
        asked = options.seconds, options.workers, options.steps
        each = cost(subjects(options.quick)[name], *asked)
        found.append(each)
        print(
            f"{each['model']}: {each['milliseconds']:.2f} ms a step, of which the optimizer takes "
            f"{each['optimizer_milliseconds']:.2f}; {each['turns']} turns of {each['steps']}",
            flush=True,
        )
        for setting, ratios in each["ratios"].items():
            texts = [
                "{} {:.4f} ({:.4f} to {:.4f})".format(part, *ratios[part])
                for part in ("step", "optimizer")
            ]
            texts.append(f"all seconds {ratios['all']:.4f}")
            print(f'  on_failure="{setting}": {", ".join(texts)}', flush=True)
    record.save("surviving", {"costs": found}, options)
    return 0
