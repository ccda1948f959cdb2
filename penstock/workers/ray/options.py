"""What a script says of the workers that it wants in a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from penstock.errors import InputError

Placement = Literal["pack", "spread", "strict_pack", "strict_spread"]
"""How Ray is to place workers: on few nodes, or on many; strictly, or as far as it can."""


@dataclass(frozen=True)
class Ray:
    """Workers in a Ray cluster, `Pipeline(workers=ps.Ray(...))`; `workers="ray"` means `Ray()`.

    Attributes:
        min: the fewest workers with which the pipeline starts; it waits until the cluster has room
            for them.
        max: the most workers. With it, `Pipeline` takes as many workers as the cluster has room
            for, and changes their number between two training steps when nodes come, or are about
            to go (`Pipeline.resize`). Without it there are as many as `devices=` says, or as the
            plan takes.
        cpus: CPUs that Ray reserves for each worker, which has as many intra-op threads. By default
            an equal share of the CPUs of the cluster, such that each worker's share is on one node.
            With `max` the default is 1: results depend bit for bit on the number of threads, so it
            must not change with the number of workers. In a cluster that Penstock starts, workers
            reserve next to nothing unless `cpus` or `max` is given.
        resources: other resources that every worker needs, as in `ray.remote(resources=...)`.
        placement: see `Placement`. Neighbours in the pipeline are put on one node where possible.
        address: of the cluster, as `ray.init` takes it. By default the cluster that this process is
            connected to, or the one that `RAY_ADDRESS` names, or else one on this machine. If none
            runs there, it is started, and shut down again when the pipeline is closed.
        runtime_env: of the workers, as in Ray: packages, environment variables, a working
            directory. Penstock and the modules of the model have to be importable in it.
        wait: seconds to wait until the cluster has room for the workers.

    Raises:
        InputError: an option has no meaning.
    """

    min: int = 1
    max: int | None = None
    cpus: int | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    placement: Placement = "pack"
    address: str | None = None
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    wait: float = 60.0

    def __post_init__(self) -> None:
        for name in ("min", "max", "cpus"):
            value = getattr(self, name)
            is_number = isinstance(value, int) and not isinstance(value, bool)
            if not (is_number and value > 0) and not (value is None and name != "min"):
                raise InputError(f"{name}={value!r} of ps.Ray must be a positive integer")
        if self.max is not None and self.max < self.min:
            raise InputError(f"max={self.max} of ps.Ray is less than min={self.min}")
        if self.placement not in get_args(Placement):
            raise InputError(
                f"placement={self.placement!r} of ps.Ray is unknown; choose one of "
                f"{', '.join(get_args(Placement))}"
            )
        if "GPU" in self.resources:
            raise InputError(
                "workers in a Ray cluster run on CPUs so far, so they need no GPU; for GPUs of "
                "several machines start the script with torchrun, or within Ray Train"
            )
        if not self.wait > 0:
            raise InputError(f"wait={self.wait!r} of ps.Ray must be a positive number of seconds")
