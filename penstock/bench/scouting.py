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
"""For every configuration, by name: the seconds of its steps, or why there are none."""

WARM_UP = 2  # steps that do not count
_SLOWER = 1.05  # times as slow as with fewer micro-batches: more are not tried
_SHARE, _FEWEST = 3, 3  # one in _SHARE is tried again, but at least _FEWEST
_REFUSALS = (RuntimeError, TypeError, ValueError, PenstockError)


class Scouts:
    """Runs configurations one after the other, in the same processes as long as these fit.

    They fit if a configuration needs as many, with as many threads and the same environment. At the
    exit of the context all processes are ended.
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
            make: returns the recipe of the configuration.
            steps: how many steps are measured.
            warm_up: how many steps run before, unmeasured.
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
        makes: the configurations by name, such as `m=4, 1F1B`: what stands before the first comma
            is the number of micro-batches. Configurations whose names differ in that alone have to
            follow one another, the fewest micro-batches first.
        steps: how many steps are measured of those that are tried again.
        tick: called before each try, with the name of the configuration.
    """
    found: Scouted = {}
    enough: dict[str, str] = {}
    fastest_so_far: dict[str, tuple[str, float]] = {}
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
            fewer, best = fastest_so_far.get(rest, ("", float("inf")))
            if seconds[0] > _SLOWER * best:
                enough[rest] = f"left out: {name} was slower than {fewer}"
            if seconds[0] < best:
                fastest_so_far[rest] = name, seconds[0]
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
