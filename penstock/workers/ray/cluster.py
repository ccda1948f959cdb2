"""The Ray cluster: joined or started, its nodes and what room they have, actors placed on them."""

from __future__ import annotations

import os
import socket
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from penstock.cadence import wait_until
from penstock.devices.cores import cores
from penstock.errors import InputError, PenstockError
from penstock.workers.ray.options import Ray

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

_PAUSE = 0.2  # seconds between two looks
_LITTLE = 0.001  # of a CPU
_LEVEL = "RAY_BACKEND_LOG_LEVEL"
_CONTROL = {"control": 2}  # threads of an actor that answer beside its jobs


def ray() -> Any:
    """The package.

    Raises:
        PenstockError: it is not installed.
    """
    try:
        import ray as package
    except ImportError as error:
        raise PenstockError(
            "workers=\"ray\" needs the package ray: pip install 'penstock[ray]'"
        ) from error
    return package


class Node(NamedTuple):
    """A node of the cluster that is alive.

    Attributes:
        id: that Ray has given it.
        host: its address.
        total: its resources, by name.
        free: those of them that nobody has reserved.
        leaves: whether Ray drains it: it is about to go.
    """

    id: str
    host: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    leaves: bool

    def room(self, each: Mapping[str, float], of: Mapping[str, float] | None = None) -> int:
        """For how many workers it has room.

        Args:
            each: what a worker needs.
            of: resources of the node; all that are free by default.
        """
        own = self.free if of is None else of
        return int(min(own.get(name, 0.0) / amount for name, amount in each.items() if amount))


class Cluster:
    """The Ray cluster that this process is connected to.

    Making a `Cluster` connects this process to one, if it is not connected yet. Such a connection
    is closed when the last `Cluster` is left.

    Args:
        options: what is wanted.
        workers: their number; a cluster that is started here has at least one CPU for each.

    Raises:
        PenstockError: Ray is not installed, or does not start.
    """

    _lock = threading.Lock()
    _joined: ClassVar[dict[Cluster, None]] = {}
    _is_ours: ClassVar[bool] = False
    """Whether what this process is connected to was joined here."""
    _is_new: ClassVar[bool] = False
    """Whether it was started here, so that nobody else uses it."""

    def __init__(self, options: Ray, workers: int) -> None:
        self.options = options
        package = ray()
        with self._lock:
            if not package.is_initialized():
                Cluster._joined.clear()  # of one that the script has shut down
                Cluster._is_new = _join(package, options, workers)
                Cluster._is_ours = True
            Cluster._joined[self] = None

    def leave(self) -> None:
        """Leave the cluster; who is last disconnects this process, if Penstock has connected it."""
        with self._lock:
            if Cluster._joined.pop(self, 0) is None and not Cluster._joined and Cluster._is_ours:
                Cluster._is_ours = Cluster._is_new = False
                ray().shutdown()

    def nodes(self) -> list[Node]:
        """Those that are alive."""
        package = ray()
        from ray._private.state import available_resources_per_node, state

        free, leaving = available_resources_per_node(), state.get_draining_nodes()
        return [
            Node(
                each["NodeID"],
                each["NodeManagerAddress"],
                each["Resources"],
                free.get(each["NodeID"], {}),
                each["NodeID"] in leaving,
            )
            for each in package.nodes()
            if each["Alive"]
        ]

    def needed(self, cpus: float) -> dict[str, float]:
        """What a worker needs that has so many CPUs."""
        return {"CPU": cpus, **self.options.resources}

    def cpus_for(self, workers: int) -> int:
        """CPUs that each of so many workers can have, so that all find room; 1 at least."""
        if self.options.cpus is not None:
            return self.options.cpus
        if self.options.max is not None:
            return 1
        nodes = [node.total for node in self.nodes()]
        most = max((int(total.get("CPU", 0)) for total in nodes), default=1)
        for cpus in range(most, 1, -1):
            if sum(int(total.get("CPU", 0)) // cpus for total in nodes) >= workers:
                return cpus
        return 1

    def share_of(self, threads: int, workers: int) -> float:
        """CPUs that each of so many workers reserves, which has so many intra-op threads.

        In a cluster that was started here they share the cores of the machine, as processes do.
        """
        options = self.options
        if Cluster._is_new and options.cpus is None and options.max is None:
            return _LITTLE
        return min(threads, self.cpus_for(workers))

    def room(self, cpus: int) -> int:
        """For how many more workers there is room, on nodes that stay."""
        need = self.needed(cpus)
        return sum(node.room(need) for node in self.nodes() if not node.leaves)

    def reserve(self, workers: int, cpus: float) -> PlacementGroup:
        """Reserve what so many workers need: a placement group.

        Raises:
            InputError: the cluster has not had so much room in time.
        """
        package = ray()
        from ray.util.placement_group import placement_group, remove_placement_group

        need, strategy = self.needed(cpus), self.options.placement.upper()
        with _quiet():
            group = placement_group([need] * workers, strategy=strategy)
        try:
            package.get(group.ready(), timeout=self.options.wait)
        except BaseException as error:
            with suppress(Exception):
                remove_placement_group(group)
            if not isinstance(error, package.exceptions.GetTimeoutError):
                raise
            raise InputError(
                f"the cluster had no room for {workers} workers with {_said(need)} each within "
                f"{self.options.wait:g} s ({self._said_of_nodes()}). Give fewer devices=, or other "
                f"ps.Ray(cpus=, resources=, placement=), or add nodes and a longer wait="
            ) from None
        return group

    def placed(self, group: PlacementGroup) -> dict[int, str]:
        """The bundles of a placement group that are on nodes which are there and stay; which."""
        from ray.util import placement_group_table

        staying = {node.id for node in self.nodes() if not node.leaves}
        table = placement_group_table(group)
        found: dict[int, str] = table["bundles_to_node_id"]
        return {bundle: node for bundle, node in found.items() if node in staying}

    def free_bundles(self, group: PlacementGroup, taken: Sequence[int], count: int) -> list[int]:
        """So many bundles of a placement group for actors that take the place of others.

        Where a node has gone, Ray looks for another one that has room for its bundles.

        Args:
            group: the placement group.
            taken: the bundles that have actors.
            count: how many are needed.

        Raises:
            InputError: the cluster has not had so much room in time.
        """
        free: list[int] = []

        def has_room() -> bool:
            free[:] = [bundle for bundle in self.placed(group) if bundle not in taken]
            return len(free) >= count

        if not wait_until(has_room, self.options.wait, _PAUSE):
            raise InputError(
                f"{count} workers of {len(taken) + count} have ended, and the cluster had no "
                f"room for {count - len(free)} others within {self.options.wait:g} s "
                f"({self._said_of_nodes()}). Add nodes and a longer wait=, or use "
                'on_failure="continue"'
            )
        return sorted(free)[:count]

    def _said_of_nodes(self) -> str:
        return "; ".join(
            f"node {node.host} has {node.free.get('CPU', 0):g} of "
            f"{node.total.get('CPU', 0):g} CPUs free{', and is leaving' * node.leaves}"
            for node in self.nodes()
        )

    def start(
        self,
        group: PlacementGroup,
        bundles: Sequence[int],
        cpus: float,
        kind: type,
        hands_over: bool,
    ) -> list[ActorHandle]:
        """Start actors of this class on bundles that were reserved; they are given the numbers.

        Args:
            group: the placement group.
            bundles: of it.
            cpus: that each reserves.
            kind: their class.
            hands_over: as of `Actor`.
        """
        package = ray()
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        remote = package.remote(concurrency_groups=_CONTROL)(kind)
        env = dict(self.options.runtime_env)
        found = []
        with _quiet():
            for bundle in bundles:
                strategy = PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=bundle
                )
                options = remote.options(
                    num_cpus=cpus,
                    resources=dict(self.options.resources) or None,
                    scheduling_strategy=strategy,
                    max_restarts=0,
                    max_task_retries=0,
                    runtime_env=env or None,
                )
                found.append(options.remote(bundle, hands_over))
        return found


def _join(package: Any, options: Ray, workers: int) -> bool:
    """Connect this process to a cluster; starts one if there is none, and returns whether."""
    given: dict[str, Any] = {"address": options.address}
    is_new = options.address is None and not os.environ.get("RAY_ADDRESS")
    if is_new:
        given = {"num_cpus": max(cores(), workers), "include_dashboard": False}
        if options.resources:
            given["resources"] = {n: v * workers for n, v in options.resources.items()}
        if _is_stale():
            given["address"] = "local"
    level = os.environ.get(_LEVEL)
    try:
        if is_new and level is None:
            os.environ[_LEVEL] = "fatal"  # or each process says that there is no dashboard
        with _quiet():
            try:
                package.init(logging_level="ERROR", **given)
            except ValueError:
                if not is_new:
                    raise
                package.init(logging_level="ERROR")  # one runs on this machine already
                is_new = False
    except Exception as error:
        where = f" at {options.address}" if options.address else ""
        raise PenstockError(
            f"Ray{where} cannot be used: {type(error).__name__}: {error}"
        ) from error
    finally:
        if level is None:
            os.environ.pop(_LEVEL, None)
    return is_new


def _is_stale() -> bool:
    """Whether the last cluster of this machine, which Ray would join, does not run any more."""
    from ray._private.utils import read_ray_address

    host, _, port = (read_ray_address() or "").rpartition(":")
    if not port.isdecimal():
        return False
    try:
        socket.create_connection((host, int(port)), 2.0).close()
    except OSError:
        return True
    return False


class _quiet(warnings.catch_warnings):  # noqa: N801 - it is used like a function
    """While open, Ray gives no advice about its future versions."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", ResourceWarning)


def _said(need: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in need.items())


def kill(actors: Sequence[ActorHandle], reserved: Sequence[PlacementGroup]) -> None:
    """End actors at once, and let go of the placement groups that were reserved for them."""
    package = ray()
    if not package.is_initialized():
        return
    from ray.util.placement_group import remove_placement_group

    for actor in actors:
        with suppress(Exception):
            package.kill(actor)
    for group in reserved:
        with suppress(Exception):
            remove_placement_group(group)
