"""The results of the experiments with replicas, as plain data and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.bench.replica_memory import Memory
from penstock.bench.replica_sizes import Sizes
from penstock.bench.replica_training import Training


@dataclass
class DataParallelReport:
    """The results of the experiments C1 to C4.

    Attributes:
        settings: what was run, as plain data.
        origin: on what machine, at which commit, on which day, with which torch.
        sizes: of C1, for every kind of workers and every number of replicas.
        memory: of C2, for every model.
        training: of C3 and C4, for every model.
    """

    settings: dict[str, Any]
    origin: dict[str, Any]
    sizes: Sequence[Sizes]
    memory: Sequence[Memory]
    training: Sequence[Training]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, by the labels of the experiments."""
        return {
            **self.origin,
            "settings": self.settings,
            "C1": [each.to_dict() for each in self.sizes],
            "C2": [each.to_dict() for each in self.memory],
            "C3_C4": [each.to_dict() for each in self.training],
        }

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """All of it, in tables that are no wider than `width`."""
        shown = {k: v for k, v in self.origin["machine"].items() if v}
        lines = ["C1  what every replica saw"]
        for sizes in self.sizes:
            lines += [*sizes.lines(), ""]
        lines.append("C2  memory of every process")
        for memory in self.memory:
            lines += memory.lines(width)
        lines += [
            "private memory beyond that at rest; the driver's includes the audit's micro-batch",
            "",
        ]
        lines.append("C3, C4  steps in turns, median ± half the interquartile range")
        for training in self.training:
            lines += [*training.lines(width), ""]
        lines.append(", ".join(f"{name} {value}" for name, value in shown.items()))
        lines.append(f"commit {self.origin['commit']}, {self.origin['date']}")
        return "\n".join(lines)
