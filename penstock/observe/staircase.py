"""The step that is under way, as it fills: what was seen of every worker, on an axis of time."""

from __future__ import annotations

from collections.abc import Mapping

_BEYOND = 12  # columns for what comes after the predicted end
_SHORT = 0.5  # seconds; of shorter steps too little is seen


class Staircase:
    """What workers were seen doing since the pass began that is under way, or was last.

    Args:
        predicted_seconds: the time of a step that the plan predicts.

    Attributes:
        is_under_way: whether the pass was under way at the latest look.
        seconds: the time from the beginning of the pass to the latest look at it.
    """

    def __init__(self, predicted_seconds: float) -> None:
        self._predicted = predicted_seconds
        self._begun = 0
        self._seen: dict[int, list[tuple[float, str]]] = {}
        self.is_under_way = False
        self.seconds = 0.0

    def look(self, now: int, begun: int, marks: Mapping[int, tuple[str, int]]) -> None:
        """Note what every worker is doing at this moment.

        Args:
            now: this moment, in nanoseconds of `time.monotonic_ns()`.
            begun: when the pass began; 0 between passes.
            marks: for every worker one character for what it does, and since when.
        """
        self.is_under_way = bool(begun)
        if not begun:
            return  # the last pass remains, so that it can be read
        if begun != self._begun:
            self._begun, self.seconds, self._seen = begun, 0.0, {}
        before, self.seconds = self.seconds, max(0.0, (now - begun) / 1e9)
        for worker, (mark, since) in marks.items():
            runs = self._seen.setdefault(worker, [(0.0, " ")])
            if mark != runs[-1][1]:
                runs.append((min(max(before, (since - begun) / 1e9), self.seconds), mark))

    def is_worth_it(self, usual_seconds: float | None) -> bool:
        """Whether steps are so long that something of them is seen.

        Args:
            usual_seconds: of the latest steps.
        """
        return max(self._predicted, usual_seconds or 0.0, self.seconds) >= _SHORT

    def lines(self, width: int) -> list[str]:
        """A line for every worker: the predicted time of a step between bars, and what is beyond.

        Args:
            width: columns of a line.
        """
        names = {worker: f"worker {worker}" for worker in sorted(self._seen)}
        beside = max(map(len, names.values()), default=0)
        inside = width - beside - _BEYOND - 3
        if inside < 1:
            return []
        return [
            f"{name:<{beside}} |{self._drawn(worker, inside)}" for worker, name in names.items()
        ]

    def _drawn(self, worker: int, inside: int) -> str:
        """What was seen of a worker, up to now."""
        cells = [" "] * (inside + _BEYOND)
        runs = self._seen[worker]
        ends = [start for start, _ in runs[1:]] + [self.seconds]
        for (start, mark), end in zip(runs, ends, strict=True):
            first, last = self._column(start, inside), self._column(end, inside)
            for column in range(first, max(first + 1, last)):
                cells[column] = mark
        return f"{''.join(cells[:inside])}|{''.join(cells[inside:])}".rstrip()

    def _column(self, seconds: float, inside: int) -> int:
        """The column of a moment, `seconds` after the pass began.

        The predicted time is linear over `inside` columns. Beyond it the scale is compressed: half
        of the `_BEYOND` columns reach twice the predicted time, and the last one has no end.
        """
        if seconds < self._predicted:
            return min(inside - 1, int(inside * seconds / self._predicted))
        share = 1 - self._predicted / seconds if seconds else 0.0
        return inside + min(_BEYOND - 1, int(_BEYOND * share))
