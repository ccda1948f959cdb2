"""What the experiments with a master and two workers gave: as plain data, and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.bench.turns import Contestant
from penstock.display.tables import aligned
from penstock.units import show_seconds

TUTORIAL = "RPC tutorial"
PLAIN = "Penstock, plain style"
STEPPED = "Penstock, train_step"
ALONE = "one device"
WAYS = (TUTORIAL, PLAIN, STEPPED)


@dataclass
class Line:
    """One way of training, at every number of micro-batches.

    Attributes:
        way: what it is called.
        contestants: by ascending number of micro-batches, from 1.
    """

    way: str
    contestants: list[Contestant]

    @property
    def counts(self) -> list[int]:
        """The number of micro-batches of every contestant."""
        return [c.facts["num_microbatches"] for c in self.contestants]


@dataclass
class RpcReport:
    """The measurements of B1 and B2.

    Attributes:
        settings: what was run, as plain data.
        machine: the machine that it ran on.
        contestants: all contestants; their facts have the `way` and `num_microbatches`. `ALONE` is
            among them once for each number of micro-batches.
    """

    settings: dict[str, Any]
    machine: dict[str, Any]
    contestants: list[Contestant]

    @property
    def lines(self) -> list[Line]:
        """The contestants by way, the tutorial's first."""
        return [
            Line(way, sorted(own, key=lambda c: int(c.facts["num_microbatches"])))
            for way in WAYS
            if (own := [c for c in self.contestants if c.facts["way"] == way])
        ]

    @property
    def limits(self) -> dict[int, float]:
        """For each number m of micro-batches a lower bound of the seconds of two equal stages.

        It is (m + 1) / 2m of the median of one device in the same rounds, which has as many
        micro-batches, as kernels are not as fast for every number of rows. Several stages a
        worker, or halves of backwards, may take less.
        """
        alone = [c for c in self.contestants if c.facts["way"] == ALONE]
        medians = {int(c.facts["num_microbatches"]): c.median for c in alone}
        return {m: median * (m + 1) / (2 * m) for m, median in sorted(medians.items())}

    def share(self, contestant: Contestant) -> float:
        """The limit as a share of the contestant's median: 1 if it takes no longer than that."""
        return self.limits[contestant.facts["num_microbatches"]] / contestant.median

    def speed_up(self, contestant: Contestant) -> float:
        """Its speed-up over the tutorial's way in as many micro-batches, by their medians."""
        tutorial = self.lines[0]
        at = tutorial.counts.index(contestant.facts["num_microbatches"])
        return tutorial.contestants[at].median / contestant.median

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data: a row for every contestant of every line; and one device's."""
        rows = [
            {
                **contestant.to_dict(),
                "limit": self.limits[contestant.facts["num_microbatches"]],
                "share_of_limit": self.share(contestant),
                "speed_up": self.speed_up(contestant),
            }
            for line in self.lines
            for contestant in line.contestants
        ]
        alone = [c.to_dict() for c in self.contestants if c.facts["way"] == ALONE]
        more = {"settings": self.settings, "machine": self.machine}
        return {**more, "one_device": alone, "B1_B2": rows}

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """All of it, in a table that is no wider than `width`."""
        heading = ("B1, B2", "m", "mean", "std", "median", "limit", "of it", "speed-up")
        rows = [row for line in self.lines for row in self._rows(line)]
        shown = {k: v for k, v in self.machine.items() if v}
        return "\n".join(
            [
                *aligned([heading, *rows], width=width),
                "",
                "limit: (m + 1) / 2m of one device's median in the same rounds; of it: the limit "
                "as a share of the median; speed-up: over the tutorial's way, of medians; "
                "all with as many micro-batches",
                ", ".join(f"{name} {value}" for name, value in shown.items()),
            ]
        )

    def _rows(self, line: Line) -> Sequence[tuple[str, ...]]:
        return [
            (
                line.way,
                str(contestant.facts["num_microbatches"]),
                *map(show_seconds, (contestant.mean, contestant.deviation, contestant.median)),
                show_seconds(self.limits[contestant.facts["num_microbatches"]]),
                f"{self.share(contestant):.0%}",
                f"{self.speed_up(contestant):.2f}x",
            )
            for contestant in line.contestants
        ]
