"""Finding the fastest configuration of a peer before it takes turns with others."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from penstock.bench.peers.peer import Peer, PeerError, Recipe, reason_of
from penstock.bench.turns import Tick
from penstock.errors import PenstockError

Make = Callable[[], Recipe]
Scouted = dict[str, list[float] | str]
"""Of every configuration the seconds of its steps, or why it does not run."""

WARM_UP = 2  # steps that do not count
_SLOWER = 1.05  # than with fewer micro-batches: more of them are not tried
_SHARE, _FEWEST = 3, 3  # one in so many is tried again, and so many at least
_REFUSALS = (RuntimeError, TypeError, ValueError, PenstockError)


class Scouts:
    """Runs configurations one after the other, in the same processes where they have as many.

    A context: no process is left after it.
    """

    def __init__(self) -> None:
        self._peer: Peer | None = None
        self._recipe: Recipe | None = None

    def __enter__(self) -> Scouts:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def seconds(self, make: Make, steps: int, warm_up: int = WARM_UP) -> list[float] | str:
        """The seconds of a configuration's steps, alone and warm; or why it does not run.

        Args:
            make: gives it.
            steps: that count.
            warm_up: steps before, which do not.
        """
        try:
            peer = self._started(make())
        except _REFUSALS as error:
            self._close()
            return f"does not run: {reason_of(error)}"
        try:
            return [peer.step() for _ in range(warm_up + steps)][warm_up:]
        except PeerError as error:
            self._close()
            return f"failed: {reason_of(error)}"

    def _started(self, recipe: Recipe) -> Peer:
        if self._peer is not None and self._recipe is not None:
            if recipe.has_processes_of(self._recipe):
                self._peer.become(recipe.name, recipe.builds)
                return self._peer
            self._close()
        self._peer, self._recipe = recipe.start(), recipe
        return self._peer

    def _close(self) -> None:
        peer, self._peer, self._recipe = self._peer, None, None
        if peer is not None:
            peer.close()


def scout(makes: Mapping[str, Make], steps: int, tick: Tick) -> Scouted:
    """Try all configurations, each alone; the fastest third of them again, for longer.

    Once one is a little slower than with fewer micro-batches, it is not tried with more of them.

    Args:
        makes: by name. Those whose names differ in what stands before the first comma alone, the
            number of micro-batches, come one after the other, the fewest first.
        steps: of those that are tried again.
        tick: called before each, with its name.
    """
    found: Scouted = {}
    enough: dict[str, str] = {}
    before: dict[str, tuple[str, float]] = {}
    with Scouts() as scouts:
        for name, make in makes.items():
            tick(name)
            rest = name.partition(",")[2]
            if rest in enough:
                found[name] = enough[rest]
                continue
            found[name] = seconds = scouts.seconds(make, 1, 1)
            if isinstance(seconds, str):
                continue
            fewer, best = before.get(rest, ("", float("inf")))
            if seconds[0] > _SLOWER * best:
                enough[rest] = f"left out: {name} was slower than {fewer}"
            before[rest] = name, min(seconds[0], best)
        ranking = by_speed(found)
        for name in ranking[: max(_FEWEST, -(-len(makes) // _SHARE))]:
            tick(name)
            found[name] = scouts.seconds(makes[name], steps)
    return found


def tries(makes: Mapping[str, Any]) -> int:
    """How many times `scout` calls `tick` at most."""
    return len(makes) + min(len(makes), max(_FEWEST, -(-len(makes) // _SHARE)))


def by_speed(scouted: Mapping[str, list[float] | str]) -> list[str]:
    """The configurations that ran, by the median of their steps, the fastest first.

    Those that were tried for longer come before all others.
    """
    ran = {name: s for name, s in scouted.items() if not isinstance(s, str)}
    return sorted(ran, key=lambda name: (-len(ran[name]), statistics.median(ran[name])))


def fastest(scouted: Mapping[str, list[float] | str]) -> str | None:
    """The fastest configuration; `None` if none ran."""
    return next(iter(by_speed(scouted)), None)
