"""Where to cut a program for a schedule, and what to recompute so that it fits the memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from penstock.plan.layout import Layout, Memory, Span, Stretch
from penstock.plan.partition import partition
from penstock.plan.problem import Floats, Variant
from penstock.plan.recompute import Piece, choose_recomputed

RECOMPUTE = ("auto", "none", "all", "boundaries")
"""What may be recomputed: what is needed, nothing, everything of a stage at once, or everything,
a piece at a time, with the boundaries between the pieces held."""

_NAMED = "named"
_PIECES = 16  # of a worker's share: what is recomputed is chosen among them


class Cutter:
    """Cuts one layout for stages on these workers.

    Args:
        layout: the costs.
        placement: the worker of every stage.
        in_flight: how many micro-batches every stage holds at once.
        memory: what may be held.
        recompute: one of `RECOMPUTE`, or the spans of calls that are recomputed, in order.
        only: the positions at which cuts are allowed; by default all that the layout allows.
    """

    def __init__(
        self,
        layout: Layout,
        placement: Sequence[int],
        in_flight: Sequence[int],
        memory: Memory,
        recompute: str | tuple[Span, ...],
        only: Sequence[int] | None = None,
    ) -> None:
        self.layout = layout
        self.placement = tuple(placement)
        self.allowed = layout.allowed
        if only is not None:
            self.allowed = np.isin(np.arange(len(layout.allowed)), list(only))
        self.in_flight = np.asarray(in_flight, dtype=np.float64)[:, None]
        self.memory = memory
        self.recompute = recompute if isinstance(recompute, str) else _NAMED
        self.named = () if isinstance(recompute, str) else recompute
        # The stages of one worker share its memory evenly: exact for one stage each.
        homes = np.array(self.placement)
        self.caps = memory.caps(layout.profile)[homes] / np.bincount(homes)[homes]
        self.is_limited = bool(np.isfinite(self.caps).any())

    def best(self, fill: float) -> list[Stretch]:
        """The stages of the exact partition, for this weight of filling and draining.

        Raises:
            CapacityError: nothing fits the memory.
        """
        if self.recompute in ("auto", "none"):
            stretches = self._unlimited(fill)
            if all(self._needed(k, s) <= self.caps[k] for k, s in enumerate(stretches)):
                return stretches
        names, variants = self._variants()
        found = partition(
            variants,
            num_microbatches=self.layout.count,
            fill=fill,
            latency=self.layout.crossing(self.placement),
            allowed=self.allowed,
            tie=self.layout.boundary,
            caps=self.caps if self.is_limited else None,
        )
        return self._stretches(found.cuts, [names[v] for v in found.variants])

    def _unlimited(self, fill: float) -> list[Stretch]:
        """The best stages whatever they hold: the same for many schedules, so they are kept."""
        layout = self.layout
        key = self.placement, fill, self.allowed.tobytes()
        if key not in layout.partitions:
            layout.partitions[key] = partition(
                layout.seconds[list(self.placement)],
                num_microbatches=layout.count,
                fill=fill,
                latency=layout.crossing(self.placement),
                allowed=self.allowed,
                tie=layout.boundary,
            ).cuts
        return self._stretches(layout.partitions[key], ["none"] * len(self.placement))

    def at(self, cuts: Sequence[int]) -> list[Stretch] | None:
        """The stages between these cuts, recomputing what they must; `None` if they do not fit."""
        names = ["none" if self.recompute == "auto" else self.recompute] * len(self.placement)
        stretches = self._stretches(cuts, names)
        if not self.is_limited:
            return stretches
        fitting: list[Stretch] = []
        for stage, stretch in enumerate(stretches):
            if self._needed(stage, stretch) > self.caps[stage]:
                if self.recompute != "auto":
                    return None
                thrifty = self._recomputed(stage, stretch)
                if thrifty is None:
                    return None
                stretch = thrifty
            fitting.append(stretch)
        return fitting

    # -- variants -------------------------------------------------------------------------

    def _variants(self) -> tuple[list[str], list[Variant]]:
        """The ways to run a stage, with what each costs in time and memory."""
        names = [self.recompute]
        if self.recompute == "auto":
            names = ["none", "all", "boundaries"] if self.is_limited else ["none"]
        layout, flying = self.layout, self.in_flight
        homes = list(self.placement)
        seconds = layout.seconds[homes]
        again = seconds + layout.forward[homes]
        if self.recompute == _NAMED:
            return names, [self._named_variant(seconds)]
        if not self.is_limited:
            return names, [Variant(again if n != "none" else seconds) for n in names]
        weights = np.broadcast_to(
            layout.weights * self.memory.per_weight(layout.count), seconds.shape
        )
        entering = flying * layout.boundary + layout.tied + layout.passing
        joints, largest = self._joints()
        held = np.zeros(layout.profile.num_calls)
        held[joints] = layout.boundary[joints]
        made = {
            "none": Variant(seconds, weights + flying * layout.saved, entering),
            "all": Variant(again, weights + layout.saved, entering),
            "boundaries": Variant(again, weights + flying * held, entering + largest),
        }
        return names, [made[name] for name in names]

    def _named_variant(self, seconds: Floats) -> Variant:
        """What stages cost in which just the named spans are recomputed."""
        layout, flying = self.layout, self.in_flight
        named = np.zeros(layout.profile.num_calls, dtype=bool)
        for start, stop in self.named:
            named[start:stop] = True
        again = seconds + np.where(named, layout.forward[list(self.placement)], 0.0)
        if not self.is_limited:
            return Variant(again)
        held = np.where(named, 0.0, layout.saved)
        edges = sorted({k for span in self.named for k in span if k < len(held)})
        held[edges] += layout.boundary[edges]
        largest = max((float(layout.saved[a:b].sum()) for a, b in self.named), default=0.0)
        weights = layout.weights * self.memory.per_weight(layout.count)
        entering = flying * layout.boundary + layout.tied + layout.passing
        return Variant(again, weights + flying * held, entering + largest)

    def _joints(self) -> tuple[list[int], float]:
        """Where pieces that are recomputed one by one meet, and the most bytes that one saves."""
        joints = _joints_of(self.layout, _PIECES * len(self.layout.profile.devices))
        sizes = [self.layout.saved[a:b].sum() for a, b in pairwise([0, *joints, None])]
        return joints, float(max(sizes))

    # -- stretches ------------------------------------------------------------------------

    def _stretches(self, cuts: Sequence[int], names: Sequence[str]) -> list[Stretch]:
        edges = pairwise([0, *cuts, self.layout.profile.num_calls])
        stretches = []
        for stage, ((start, stop), name) in enumerate(zip(edges, names, strict=True)):
            stretch = Stretch(self.placement[stage], start, stop)
            if name == "all":
                stretch = stretch._replace(recompute=((start, stop),))
            elif name == _NAMED:
                clipped = ((max(a, start), min(b, stop)) for a, b in self.named)
                stretch = stretch._replace(recompute=tuple((a, b) for a, b in clipped if a < b))
            elif name == "boundaries":
                stretch = stretch._replace(recompute=self._pieces(start, stop))
            if name != "none" and self.recompute == "auto":
                stretch = self._recomputed(stage, stretch) or stretch
            stretches.append(stretch)
        return stretches

    def _pieces(self, start: int, stop: int) -> tuple[Span, ...]:
        joints = _joints_of(self.layout, _PIECES * len(self.layout.profile.devices))
        inner = [k for k in joints if start < k < stop]
        return tuple(pairwise([start, *inner, stop]))

    def _recomputed(self, stage: int, stretch: Stretch) -> Stretch | None:
        """The stage with as little recomputed as its memory allows; `None` if it never fits."""
        layout, worker = self.layout, stretch.worker
        pieces = self._pieces(stretch.start, stretch.stop)
        plain = stretch._replace(recompute=())
        segments = [
            Piece(
                seconds=float(layout.forward[worker, a:b].sum()),
                kept=float(layout.saved[a:b].sum()),
                entry=sum(float(layout.boundary[k]) for k in {a, b} - {plain.start, plain.stop}),
                working=float(layout.saved[a:b].sum()),
            )
            for a, b in pieces
        ]
        outside = plain._replace(stop=plain.start)  # nothing but what enters
        standing = layout.standing(plain, self.memory)
        flying = int(self.in_flight[stage, 0])
        room = float(self.caps[stage]) - standing - flying * layout.held(outside)
        choice = None
        if room >= 0:
            choice = choose_recomputed(segments, in_flight=flying, available=room)
        if choice is None:
            return None
        return plain._replace(recompute=tuple(pieces[k] for k in choice.segments))

    def _needed(self, stage: int, stretch: Stretch) -> float:
        standing = self.layout.standing(stretch, self.memory)
        return standing + float(self.in_flight[stage, 0]) * self.layout.held(stretch)


def _joints_of(layout: Layout, most: int) -> list[int]:
    """Up to so many places for a cut where little crosses, with equally much saved between."""
    total = layout.saved.cumsum()
    places = np.flatnonzero(layout.allowed[1:-1]) + 1
    if not len(places) or not total[-1]:
        return []
    around = layout.boundary[[0, *places, -1]]
    places = places[(around[1:-1] <= around[:-2]) & (around[1:-1] <= around[2:])]
    if not len(places):
        return []
    window = np.minimum((total[places - 1] / total[-1] * most).astype(int), most - 1)
    found = []
    for number in np.unique(window):
        inside = places[window == number]
        found.append(int(inside[np.argmin(layout.boundary[inside])]))
    return found
