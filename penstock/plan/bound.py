"""Lower bounds that no schedule can beat.

`step_bound` is the simple one, for choosing cuts. `schedule_bound` is tighter and knows more: what
the forwards and the backwards take apart, several stages per worker, backwards in halves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from penstock.errors import InputError
from penstock.schedule.costs import Costs


def step_bound(
    stage_seconds: Sequence[float], latency: Sequence[float], num_microbatches: int
) -> float:
    """The least seconds that a training step can take, whatever the schedule.

        max over s of [ sum over i < s of (T_i + 2 c_i)  +  m T_s ]

    Proof. Look at stage `s`. Its first action is the forward of some micro-batch, which has come
    through the stages before it: it starts no earlier than the sum of `F_i + c_i` over `i < s`.
    From there its device works for `m T_s` at least. Its last action is the backward of some
    micro-batch, which then still has to go back through the stages before it: the step ends no
    earlier than the sum of `B_i + c_i` over `i < s` later. With `T_i = F_i + B_i` the three add up
    to the bracket, and the step takes at least the largest one.

    The proof needs one contiguous stage per device and whole backwards.

    Args:
        stage_seconds: `T_s`, the seconds of a forward and a backward of one micro-batch.
        latency: `c_s`, the one-way seconds between stages `s` and `s+1`. Empty means none.
        num_microbatches: `m`.

    Raises:
        InputError: no stage, no micro-batch, or a number of latencies that does not fit.
    """
    links = len(stage_seconds) - 1
    if links < 0 or num_microbatches < 1:
        raise InputError(
            f"a step needs at least one stage and one micro-batch, "
            f"got {len(stage_seconds)} stages and num_microbatches={num_microbatches}"
        )
    if len(latency) not in (0, links):
        raise InputError(
            f"{len(stage_seconds)} stages have {links} links between them, "
            f"but latency has {len(latency)} entries; give one per link, or none"
        )
    bound = elapsed = 0.0
    for stage, seconds in enumerate(stage_seconds):
        bound = max(bound, elapsed + num_microbatches * seconds)
        elapsed += seconds + (2 * latency[stage] if stage < len(latency) else 0.0)
    return bound


def schedule_bound(
    costs: Costs,
    num_microbatches: int,
    placement: Sequence[int] | None = None,
    *,
    split: bool = False,
) -> float:
    """The least seconds that a training step can take on this placement.

    Write `head(s)` for the sum of `F_i + c_i` over `i < s`, `tail(s)` for that
    of `B_i + c_i`, where `c_i` is the latency and the transfer between `i` and `i+1` (nothing on
    one worker), and `D(s)` for the time between the end of a forward of `s` and the earliest start
    of its backward, which is spent on the stages after `s`. The step takes at least the largest of
    these, over all stages and workers.

    **One micro-batch after the other.** `(m - 1) max F_i`, or `(m - 1) max B_i`, and one whole
    pass: the stage with the longest forwards starts its last one no earlier than `head + (m-1) F`,
    and the last micro-batch has the rest of its pass ahead. The backwards mirror it in time.

    **A worker with several stages**, `a` the first of them: its first action is a forward of `a`
    and its last a backward of `a`, so `head(a)`, then `m` times the work of its stages, then
    `tail(a)`. It also waits. Follow one micro-batch on its way: before it can first come to some
    action `x` of this worker, the worker runs nothing but what comes before `x` on that path, at
    most `m` times; what that leaves of the time to get to `x` is waited. In the same way, after
    the last time that some `y` can end, nothing is left but what comes after `y`. If `x` is not
    after `y`, the first of these times ends before the second begins, as one pass leads through
    both, and the waits add.

    **A worker with one stage.** Let `f` be the longest forward (or transfer) up to `s`. Its
    `k`-th forward starts no earlier than `head + (k-1) f`. If it runs `k` forwards before its
    first backward, that starts `F + max(D, (k-1) f)` after `head` at the earliest, of which `k F`
    is work: it waits at least `max(D, (k-1) f) - (k-1) F`, and so at least the least of that over
    `k`. Mirrored in time, with `b` the longest backward up to `s`: between its last forward and
    its last backward it waits at least the least of `max(D, (k-1) b) - (k-1) B`. If some forward
    comes after the first backward, then `k < m` in both, the two times do not overlap, and both
    waits add to `m (F + B)`. If none does, all forwards and then all backwards take at least
    `F + B + max(D, (m-1) f) + (m-1) b`, and mirrored `F + B + (m-1) f + max(D, (m-1) b)`.

    **Backwards in halves.** Without the weight halves, which nobody waits for, a step is no
    longer than with them: all of the above holds with `I` for `B`, and after the last `I` of stage
    0 comes its `W`. With them a worker works `m (F + I + W)` and need not wait for a tail, but
    before the first `I` it has no `W` to fill the time with, and waits as above. A schedule with
    whole backwards does no better than one with halves, as a whole one can be cut in halves that
    follow each other.

    Args:
        costs: what the stages take. `costs.weight` counts only where backwards come in halves.
        num_microbatches: the number of micro-batches, `m`.
        placement: the worker of every stage. By default every stage has its own.
        split: whether backwards may come in halves.

    Raises:
        InputError: there is no micro-batch, or the placement is of another number of stages.
    """
    homes = range(costs.num_stages) if placement is None else placement
    if num_microbatches < 1 or len(homes) != costs.num_stages:
        raise InputError(
            f"a step needs at least one micro-batch, and a worker for each of {costs.num_stages} "
            f"stages; got num_microbatches={num_microbatches} and {len(homes)} workers"
        )
    path = _Path.of(costs, homes, split)
    one_by_one = (num_microbatches - 1) * max(
        *path.forward, *path.backward, *path.wire
    ) + path.whole
    bounds = [one_by_one + path.weight[0]]
    for worker in sorted(set(homes)):
        own = [stage for stage, home in enumerate(homes) if home == worker]
        bounds.append(path.worker_bound(own, num_microbatches))
        if split:
            bounds.append(path.worker_bound_without_tail(own, num_microbatches))
    return max(bounds)


class _Leg(NamedTuple):
    """An action of a micro-batch that passes through the pipeline without any other.

    `start` and `end` are seconds since the step began. `work_before` and `work_through` are the
    seconds that its worker has spent on this micro-batch before the action and after it.
    """

    start: float
    end: float
    work_before: float
    work_through: float


@dataclass(frozen=True)
class _Path:
    """The path of a micro-batch through all stages and back, with its times in seconds.

    Attributes:
        forward: `forward[s]`, of the forward of stage `s`.
        backward: `backward[s]`, of its backward, or of the input half.
        weight: `weight[s]`, of its weight half; 0 where backwards are whole.
        wire: `wire[s]`, for which a transfer from stage `s` to `s+1` occupies the link.
        head: `head[s]`, from the start of the step to the start of the first forward of `s`.
        tail: `tail[s]`, from the end of a backward of `s` to the end of that of stage 0.
        whole: of one micro-batch through the whole path, without weight halves.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    weight: Sequence[float]
    wire: Sequence[float]
    head: Sequence[float]
    tail: Sequence[float]
    whole: float

    @classmethod
    def of(cls, costs: Costs, homes: Sequence[int], split: bool) -> _Path:
        links = range(costs.num_stages - 1)
        apart = [homes[i] != homes[i + 1] for i in links]
        wire = [costs.transfer[i] if costs.transfer and apart[i] else 0.0 for i in links]
        delay = [wire[i] + (costs.latency[i] if costs.latency and apart[i] else 0.0) for i in links]
        backward = costs.inputs if split else costs.backward
        head = [0.0, *accumulate(costs.forward[i] + delay[i] for i in links)]
        tail = [0.0, *accumulate(backward[i] + delay[i] for i in links)]
        whole = head[-1] + costs.forward[-1] + backward[-1] + tail[-1]
        weight = costs.weights if split else (0.0,) * costs.num_stages
        return cls(costs.forward, backward, weight, wire, head, tail, whole)

    def turn(self, stage: int) -> float:
        """`D`: from the end of a forward to the earliest start of its backward."""
        own = self.forward[stage] + self.backward[stage]
        return self.whole - self.head[stage] - self.tail[stage] - own

    def worker_bound(self, own: Sequence[int], count: int) -> float:
        """The bound of the worker with these stages; only one weight half, of stage 0, counts."""
        first = own[0]
        if len(own) == 1:
            busy = self._alone(first, count)
        else:
            legs = self._legs(own)
            opening, waits = 0.0, 0.0
            for leg in legs:
                opening = max(opening, leg.start - self.head[first] - count * leg.work_before)
                work_after = legs[-1].work_through - leg.work_through
                closing = self.whole - leg.end - self.tail[first] - count * work_after
                waits = max(waits, opening + max(0.0, closing))
            busy = count * legs[-1].work_through + waits
        return self.head[first] + busy + self.tail[first] + self.weight[0]

    def worker_bound_without_tail(self, own: Sequence[int], count: int) -> float:
        """The bound of its work, weight halves included, which may come last of all."""
        first = own[0]
        work = sum(self.forward[s] + self.backward[s] + self.weight[s] for s in own)
        if len(own) == 1:
            pace = self._pace(first, self.forward)
            waits = _wait(self.turn(first), pace, self.forward[first], count)
        else:
            # Up to its first backward, which is of its last stage, there is no weight half.
            early = self._legs(own)[: len(own) + 1]
            waits = max(leg.start - self.head[first] - count * leg.work_before for leg in early)
        return self.head[first] + count * work + waits

    def _legs(self, own: Sequence[int]) -> list[_Leg]:
        """One micro-batch's actions on the worker with these stages, in order."""
        legs: list[_Leg] = []
        done = 0.0
        for stage in own:
            seconds = self.forward[stage]
            start = self.head[stage]
            legs.append(_Leg(start, start + seconds, done, done + seconds))
            done += seconds
        for stage in reversed(own):
            seconds = self.backward[stage]
            end = self.whole - self.tail[stage]
            legs.append(_Leg(end - seconds, end, done, done + seconds))
            done += seconds
        return legs

    def _alone(self, stage: int, count: int) -> float:
        """From its first forward to the end of its last backward, for a worker with one stage."""
        forward, backward, turn = self.forward[stage], self.backward[stage], self.turn(stage)
        f, b = self._pace(stage, self.forward), self._pace(stage, self.backward)
        apart = (
            forward
            + backward
            + max(
                max(turn, (count - 1) * f) + (count - 1) * b,
                (count - 1) * f + max(turn, (count - 1) * b),
            )
        )
        if count == 1:
            return apart
        opening = _wait(turn, f, forward, count - 1)
        closing = _wait(turn, b, backward, count - 1)
        return min(apart, count * (forward + backward) + opening + closing)

    def _pace(self, stage: int, seconds: Sequence[float]) -> float:
        """The least time from one micro-batch to the next, at this stage or any before it."""
        return max(*seconds[: stage + 1], *self.wire[:stage], 0.0)


def _wait(turn: float, pace: float, seconds: float, most: int) -> float:
    """The least of `max(turn, k pace) - k seconds` over `k` from 0 to `most - 1`.

    With `pace >= seconds` it falls until `k pace` reaches `turn`, and rises from there.
    """
    k = most - 1 if pace * (most - 1) <= turn else int(turn / pace)
    choices = (k, min(k + 1, most - 1))
    return min(max(turn, k * pace) - k * seconds for k in choices)
