"""Watches a cluster, for a script that wants as many workers as there is room for."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

from penstock.workers.ray.cluster import Cluster

_EVERY = 1.0  # seconds from look to look


class Watch:
    """Looks now and then how many workers there should be; by a thread that does nothing else.

    Args:
        cluster: whose room is looked at.
        nodes: of the present workers, as Ray calls them.
        cpus: that a worker needs.
    """

    def __init__(self, cluster: Cluster, nodes: Sequence[str], cpus: float) -> None:
        self._seen: list[int] = []
        self._over = threading.Event()
        self.close = weakref.finalize(self, self._over.set)
        arguments = cluster, tuple(nodes), cpus, self._seen, self._over
        thread = threading.Thread(target=_look, args=arguments, name="penstock-ray", daemon=True)
        thread.start()

    def wanted(self) -> int | None:
        """How many workers there should be, by the last two looks; `None` if they differ."""
        latest = self._seen[-2:]
        return latest[0] if len(latest) == 2 and latest[0] == latest[1] else None


def number_for(cluster: Cluster, nodes: Sequence[str], cpus: float) -> int:
    """As many workers as there is room for on nodes that stay, within the limits of the options.

    Args:
        cluster: where.
        nodes: of the present workers.
        cpus: that a worker needs.
    """
    need, options = cluster.needed(cpus), cluster.options
    staying = [node for node in cluster.nodes() if not node.leaves]
    present = sum(nodes.count(node.id) for node in staying)
    found = present + sum(node.room(need) for node in staying)
    most = found if options.max is None else min(found, options.max)
    return max(most, options.min)


def _look(
    cluster: Cluster, nodes: Sequence[str], cpus: float, seen: list[int], over: threading.Event
) -> None:
    """Look every second; runs in a thread of its own."""
    while not over.wait(_EVERY):
        try:
            seen.append(number_for(cluster, nodes, cpus))
        except Exception:  # the connection to the cluster is gone, which others notice
            seen.clear()
        del seen[:-2]
