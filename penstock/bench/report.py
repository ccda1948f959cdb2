"""What the experiments gave: as plain data, and as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.bench.toy import ToyResult
from penstock.bench.turns import Contestant
from penstock.display.tables import aligned
from penstock.units import show_seconds


@dataclass
class BenchReport:
    """The measurements of experiments A1 to A4.

    Attributes:
        settings: what was run, as plain data.
        machine: the machine that it ran on.
        toy: experiment A1.
        bars: experiments A2 and A3; the first one is one device.
        sweep: experiment A4; the last one is Penstock's own choice.
        notes: what a reader should know.
    """

    settings: dict[str, Any]
    machine: dict[str, Any]
    toy: ToyResult
    bars: list[Contestant]
    sweep: list[Contestant]
    notes: list[str] = field(default_factory=list)

    @property
    def best(self) -> Contestant:
        """The fastest of the sweep's sizes."""
        return min(self.sweep[:-1], key=lambda c: c.median)

    @property
    def chosen(self) -> Contestant:
        """The contestant with the plan that Penstock chose: the last of the sweep."""
        return self.sweep[-1]

    @property
    def auto_excess(self) -> float:
        """How much slower Penstock's choice is than the best of the sweep, as a share."""
        return self.chosen.median / self.best.median - 1

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, by the labels of the experiments."""
        return {
            "settings": self.settings,
            "machine": self.machine,
            "A1": self.toy.to_dict(),
            "A2_A3": [c.to_dict() for c in self.bars],
            "A4": [c.to_dict() for c in self.sweep],
            "best_microbatch_size": self.best.facts["microbatch_size"],
            "auto_microbatch_size": self.chosen.facts["microbatch_size"],
            "auto_excess_over_best": self.auto_excess,
            "notes": self.notes,
        }

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """All of it, in tables that are no wider than `width`."""
        best, chosen = (c.facts["microbatch_size"] for c in (self.best, self.chosen))
        shown = {k: v for k, v in self.machine.items() if v}
        return "\n".join(
            [
                str(self.toy),
                "",
                *_table(self.bars, "A2, A3", "speed-up", self._speed_up, width),
                "",
                *_table(self.sweep, "A4", "of the best", self._excess, width),
                "",
                f"the best micro-batch size of the sweep is {best}; Penstock chose {chosen}, whose "
                f"time differs by {self.auto_excess:+.1%} from the best one's",
                *self.notes,
                ", ".join(f"{name} {value}" for name, value in shown.items()),
            ]
        )

    def _speed_up(self, contestant: Contestant) -> float:
        return self.bars[0].median / contestant.median

    def _excess(self, contestant: Contestant) -> float:
        return contestant.median / self.best.median


def _table(
    contestants: Sequence[Contestant],
    title: str,
    ratio_name: str,
    ratio: Callable[[Contestant], float],
    width: int | None,
) -> list[str]:
    heading = (title, "mean", "std", "median", ratio_name, "one step", "predicted", "of bound")
    rows = [heading, *((*_times(c), f"{ratio(c):.2f}x", *_step(c)) for c in contestants)]
    return aligned(rows, width=width)


def _times(contestant: Contestant) -> tuple[str, ...]:
    measured = (contestant.mean, contestant.deviation, contestant.median)
    return (contestant.name, *(show_seconds(seconds) for seconds in measured))


def _step(contestant: Contestant) -> tuple[str, ...]:
    """The median of a `train_step`, what was predicted for it, and its percent of bound."""
    taken, share = contestant.train_step, contestant.percent_of_bound
    if taken is None or share is None:
        return ("", "", "")
    return (
        show_seconds(taken),
        show_seconds(contestant.facts["predicted_seconds"]),
        f"{share:.0f} %",
    )
