"""Which micro-batch sizes to measure, within the time that there is."""

from __future__ import annotations

from penstock.profile.rows import split_rows

_MOST_DOUBLINGS = 6  # to 64 micro-batches
_FEWEST_SIZES = 2
_PROMISING = 1.1  # estimates up to this much longer than the best are worth measuring
_WORTH_AGAIN = 1.3  # and measured ones up to this much longer, a second time
_FASTER = 0.9  # of the best measured step: what a size has to promise to take more time
_BRIEF = 2.2  # times that a forward and backward take, if only the whole program is timed
_DOUBTFUL = 0.05  # sizes that take so much longer than the others promise as well


class Agenda:
    """Names the next size, one after the other, and learns from what was measured.

    How long a row takes depends on the size of the micro-batch in jumps (matrix and convolution
    kernels work in blocks), so that only a measured size is a safe choice. As far as there is time,
    sizes come in this order:

    1. The sizes of 1, 2, 4, ... micro-batches. The smallest is first, by which the time for others
       is estimated; then the one that gives every device one micro-batch, half of it, and so on,
       because a row takes less time in a larger micro-batch. Those that leave devices idle are
       last. The one for every device may take twice as much time again, if those that were measured
       let expect a step that is clearly faster: every step would pay for a choice without it.
    2. Measured sizes that took longer than their neighbours suggest, a second time: something else
       may have been running meanwhile.
    3. Sizes that split the batch evenly and whose estimate is near the best.
    4. Measured sizes that are near the best, a second time.

    Args:
        batch_size: rows of the batch.
        num_devices: how many stages there will be.
        seconds: to spend; the first two sizes are measured anyway.
        num_microbatches: the only count that matters, or `None`.
        long: seconds of a forward and backward. If a size is expected to take longer, only the
            whole program is timed, and not every call; the first size is timed in full anyway.
    """

    def __init__(
        self,
        batch_size: int,
        num_devices: int,
        seconds: float,
        num_microbatches: int | None,
        long: float = float("inf"),
    ) -> None:
        self._batch_size, self._num_devices = batch_size, num_devices
        self._left, self._more, self._long = seconds, 2 * seconds, long
        self._costs: dict[int, float] = {}
        self._tried: set[int] = set()
        self._again: set[int] = set()
        self._prices: dict[int, float] = {}  # seconds that it took to measure every call
        self._is_fixed = num_microbatches is not None
        if num_microbatches is not None:
            self._basic = sorted(set(split_rows(batch_size, num_microbatches)))
            self._even: list[int] = []
        else:
            self._basic = _of_powers_of_two(batch_size)
            self._even = [n for n in range(self._basic[0], batch_size) if batch_size % n == 0]

    @property
    def expected(self) -> int:
        """How many sizes there will be, as far as is known."""
        return max(len(self._basic), len(self._tried) + len(self._again) + 1)

    def next(self) -> int | None:
        """The size to measure next, in rows; `None` when it is enough."""
        if (basic := self._next_basic()) is not None:
            return basic
        doubtful = [
            rows
            for rows in self._costs
            if self._excess(rows) > _DOUBTFUL and rows not in self._again and self._affordable(rows)
        ]
        if doubtful:
            return max(doubtful, key=self._excess)
        best = min(map(self._estimate, self._costs), default=0.0)
        between = [
            rows
            for rows in self._even
            if rows not in self._tried
            and rows < max(self._costs, default=0)
            and self._affordable(rows)
            and self._estimate(rows) < _PROMISING * best
        ]
        if between:
            return min(between, key=self._estimate)
        again = [
            rows
            for rows in self._costs
            if rows not in self._again
            and self._affordable(rows)
            and self._estimate(rows) < _WORTH_AGAIN * best
        ]
        return min(again, key=self._estimate, default=None)

    def _next_basic(self) -> int | None:
        """The most promising that there is time for, but the smallest before all others."""
        left = [rows for rows in self._basic if rows not in self._tried]
        if left and (self._is_fixed or not self._costs):
            return left[0]
        each = -(-self._batch_size // self._num_devices)
        promising = sorted(left, key=lambda rows: rows if rows > each else -rows)
        best = min((rows for rows in self._basic if rows >= each), default=0)
        if best in left and self._is_faster(best) and self._affordable(best, self._more):
            return best
        affordable = filter(self._affordable, promising)
        return next(affordable, left[0] if left and len(self._costs) < _FEWEST_SIZES else None)

    def _is_faster(self, rows: int) -> bool:
        """Whether a size that was not measured is expected to be clearly faster than all others."""
        if len(self._costs) < _FEWEST_SIZES:
            return False
        step = (self._batch_size / rows + self._num_devices - 1) * self._expected(rows)
        return step < _FASTER * min(map(self._estimate, self._costs))

    def is_brief(self, rows: int) -> bool:
        """Whether only the whole program is timed at this size, because it takes so long."""
        return bool(self._costs) and self._expected(rows) > self._long

    def learn(self, rows: int, cost: float, took: float) -> None:
        """A size was measured, for the first or the second time; the better counts.

        Args:
            rows: the size.
            cost: seconds of its forward and backward.
            took: seconds that measuring it took.
        """
        if rows in self._tried:
            self._again.add(rows)
        is_brief = self.is_brief(rows)
        self._tried.add(rows)
        self._costs[rows] = min(cost, self._costs.get(rows, cost))
        self._left -= took
        if not is_brief:
            self._prices[rows] = took

    def refuse(self, rows: int, and_larger: bool = False) -> None:
        """Leave out a size, in rows, that the model does not take, and perhaps all larger ones."""
        larger = [n for n in (*self._basic, *self._even) if and_larger and n > rows]
        self._tried |= {rows, *larger}
        self._again |= self._costs.keys() & {rows, *larger}  # not a second time either

    def _affordable(self, rows: int, more: float = 0.0) -> bool:
        """Whether there is time for a size, with so many seconds more."""
        if self.is_brief(rows):
            return _BRIEF * self._expected(rows) <= self._left + more
        nearest = min(self._prices, key=lambda known: abs(known - rows))
        return self._prices[nearest] * rows / nearest <= self._left + more

    def _expected(self, rows: int) -> float:
        """About how long its forward and backward take, going by the nearest measured size.

        Beyond the largest it lies on the line through the last two, if that is less.
        """
        nearest = min(self._costs, key=lambda known: abs(known - rows))
        expected = self._costs[nearest] * rows / nearest
        *_, below, above = (nearest, *sorted(self._costs))
        if rows > above > below:
            expected = min(expected, max(self._between(rows, below, above), self._costs[above]))
        return expected

    def _estimate(self, rows: int) -> float:
        """In proportion to the step time of equal stages: (m + p - 1) micro-batches."""
        count = self._batch_size / rows
        return (count + self._num_devices - 1) * self._cost(rows)

    def _excess(self, rows: int) -> float:
        """How much longer a size takes than the ones around it let expect, relative.

        A row takes no longer in a larger micro-batch, fewer rows take no longer than more, and a
        size lies on the line through the two around it, or the two above.
        """
        below = sorted(r for r in self._costs if r < rows)[-1:]
        above = sorted(r for r in self._costs if r > rows)[:2]
        expected = [self._a_row(r) * rows for r in below] + [self._costs[r] for r in above[:1]]
        if below and above:
            expected.append(self._between(rows, below[0], above[0]))
        elif len(above) > 1:  # a launch is not negative
            expected.append(max(self._between(rows, *above), self._a_row(above[0]) * rows))
        return self._costs[rows] / min(expected, default=self._costs[rows]) - 1

    def _a_row(self, rows: int) -> float:
        """Seconds per row in a micro-batch of so many rows."""
        return self._costs[rows] / rows

    def _cost(self, rows: int) -> float:
        below = max((r for r in self._costs if r <= rows), default=min(self._costs))
        above = min((r for r in self._costs if r >= rows), default=below)
        return self._costs[below] if below == above else self._between(rows, below, above)

    def _between(self, rows: int, below: int, above: int) -> float:
        """On the line through two measured sizes."""
        share = (rows - below) / (above - below)
        return self._costs[below] + share * (self._costs[above] - self._costs[below])


def _of_powers_of_two(batch_size: int) -> list[int]:
    """The sizes of 1, 2, 4, ... micro-batches, ascending."""
    return sorted({-(-batch_size // 2**k) for k in range(_MOST_DOUBLINGS + 1)})
