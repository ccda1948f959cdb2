"""Watches a cluster, for a script that wants as many workers as there is room for."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from penstock.workers.ray.cluster import Cluster

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

_EVERY = 1.0  # seconds from look to look


class ClusterWatch:
    """Looks now and then how many workers there should be; by a thread that does nothing else.

    Args:
        cluster: whose room is looked at.
        nodes: of the present workers, as Ray calls them.
        cpus: that a worker needs.
        group: the placement group of the workers.
        bundles: the numbers of the bundles in it that have workers; the rest is room for more.
    """

    def __init__(
        self,
        cluster: Cluster,
        nodes: Sequence[str],
        cpus: float,
        group: PlacementGroup,
        bundles: Sequence[int],
    ) -> None:
        self._seen: list[int] = []
        self._over = threading.Event()
        self.close = weakref.finalize(self, self._over.set)
        is_whole = len(bundles) == group.bundle_count
        reserved = None if is_whole else partial(_unused, cluster, group, tuple(bundles))
        arguments = cluster, tuple(nodes), cpus, self._seen, self._over, reserved
        thread = threading.Thread(target=_look, args=arguments, name="penstock-ray", daemon=True)
        thread.start()

    def wanted(self) -> int | None:
        """How many workers there should be, by the last two looks; `None` if they differ."""
        latest = self._seen[-2:]
        return latest[0] if len(latest) == 2 and latest[0] == latest[1] else None


def number_for(cluster: Cluster, nodes: Sequence[str], cpus: float, unused: int = 0) -> int:
    """As many workers as there is room for on nodes that stay, within the limits of the options.

    Args:
        cluster: where.
        nodes: of the present workers.
        cpus: that a worker needs.
        unused: for how many more the pipeline has reserved room.
    """
    need, options = cluster.needed(cpus), cluster.options
    staying = [node for node in cluster.nodes() if not node.leaves]
    present = sum(nodes.count(node.id) for node in staying)
    found = present + unused + sum(node.room(need) for node in staying)
    most = found if options.max is None else min(found, options.max)
    return max(most, options.min)


def _unused(cluster: Cluster, group: PlacementGroup, bundles: Sequence[int]) -> int:
    """How many bundles of a placement group have no actor: those of workers that have ended."""
    return sum(bundle not in bundles for bundle in cluster.placed(group))


def _look(
    cluster: Cluster,
    nodes: Sequence[str],
    cpus: float,
    seen: list[int],
    over: threading.Event,
    reserved: Callable[[], int] | None = None,
) -> None:
    """Look every second; runs in a thread of its own."""
    while not over.wait(_EVERY):
        try:
            unused = reserved() if reserved is not None else 0
            seen.append(number_for(cluster, nodes, cpus, unused))
        except Exception:  # the connection to the cluster is gone, which others notice
            seen.clear()
        del seen[:-2]
