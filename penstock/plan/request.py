"""`Request`: the options of planning, and what the names of modules in them mean."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import index
from typing import Literal

from penstock.errors import InputError, RequestError
from penstock.plan.cutting import RECOMPUTE
from penstock.plan.decisions import HALF
from penstock.plan.layout import Memory, Span
from penstock.plan.shares import Sums
from penstock.profile.data import check_count
from penstock.schedule import SCHEDULES
from penstock.units import parse_bytes

Auto = Literal["auto"]

Cut = int | str
"""A cut before the call of this number, or before the first call of the module of this name."""

Recompute = str | Sequence[str]
"""What to recompute: a keyword, or names of modules; see `Request`."""


@dataclass(frozen=True)
class Request:
    """The options of planning.

    Attributes:
        num_microbatches: the number of micro-batches, or `"auto"` for the best number whose
            micro-batch size was measured.
        schedule: a name in `penstock.schedule.SCHEDULES`, or `"auto"` for the best.
        cuts: where to cut: modules by their qualified names, or calls by their numbers. `None`
            chooses the cuts.
        recompute: `"none"`; `"all"`: hold only the inputs of every stage; `"boundaries"`: hold
            the inputs of pieces of a stage and recompute one piece at a time; `"auto"`: recompute
            only what is needed to fit the memory. Or a list of qualified names of modules, each of
            which is recomputed as a whole.
        memory_limit: bytes that every worker may hold, or a string such as `"8GiB"`. By default
            the memory of the devices, if known.
        optimizer_state: bytes of optimizer state per byte of weights; 2 for Adam.
        stages_per_worker: for schedules that take any number; `"auto"` means two for those.
        any_order: whether the devices may be reordered.
        boundary_dtype: `"bfloat16"` or `"float16"` to round boundary values to it; `None` to send
            them unchanged.
        replicas: the number of replicas of all stages. `"auto"` takes the fastest plan of all
            kinds: stages, replicas, replicas of stages, or one device alone. A schedule, cuts or
            stages per worker that are asked for leave out the plans without stages.
        inference: whether the plan is for a steady flow of forwards, see `penstock.plan.flow`.
            There is one stage per worker, nothing is recomputed, and there is no optimizer.
        in_flight: for how many groups of sequences, of all replicas together, a plan for inference
            has room for states. `None` for one more than keep all stages busy, which is what
            `generate` and `penstock serve` have under way.
        states: parts of the model's result that are states besides those in objects of plain
            classes, as of `Pipeline.session`; for plans for inference.

    Raises:
        InputError: there is no such schedule, recomputation or limit; or the plan is for inference,
            and what is asked for is about training; or the other way round.
    """

    num_microbatches: int | Auto = "auto"
    schedule: str = "auto"
    cuts: Sequence[Cut] | None = None
    recompute: Recompute = "auto"
    memory_limit: int | str | None = None
    optimizer_state: float = 2.0
    stages_per_worker: int | Auto = "auto"
    any_order: bool = False
    boundary_dtype: str | None = None
    replicas: int | Auto = "auto"
    inference: bool = False
    in_flight: int | None = None
    states: Sequence[int | str] = ()

    def __post_init__(self) -> None:
        if self.schedule != "auto" and self.schedule not in SCHEDULES:
            raise InputError(
                f'schedule={self.schedule!r} is unknown; choose {", ".join(SCHEDULES)} or "auto"'
            )
        if not isinstance(self.recompute, str):
            _check_modules(self.recompute)
        elif self.recompute not in RECOMPUTE:
            known = ", ".join(f'"{name}"' for name in RECOMPUTE)
            raise InputError(
                f"recompute={self.recompute!r} is unknown; choose {known}, or a list of modules"
            )
        per_worker = self.stages_per_worker
        if per_worker != "auto" and not (isinstance(per_worker, int) and per_worker > 0):
            raise InputError(
                f'stages_per_worker={per_worker!r} must be an integer of at least 1, or "auto"'
            )
        if self.boundary_dtype not in (None, *HALF):
            raise InputError(
                f"boundary_dtype={self.boundary_dtype!r} is not supported; give "
                f"{' or '.join(HALF)}, or None"
            )
        replicas = self.replicas
        if replicas != "auto" and not (type(replicas) is int and replicas > 0):
            raise InputError(f'replicas={replicas!r}; give a number from 1, or "auto"')
        if not 0 <= self.optimizer_state < float("inf"):
            raise InputError(
                f"optimizer_state={self.optimizer_state} must be a finite number of at least 0"
            )
        if self.memory.limit is not None and self.memory.limit <= 0:
            raise InputError(f"memory_limit={self.memory_limit!r} must be greater than 0")
        self._check_groups()
        if self.inference:
            self._check_inference()

    def _check_groups(self) -> None:
        """Raise unless states and groups have a meaning, if they are given."""
        if self.in_flight is not None and not (type(self.in_flight) is int and self.in_flight > 0):
            raise InputError(f"in_flight={self.in_flight!r} must be a positive integer")
        if isinstance(self.states, (str, int)):
            raise InputError(
                f"states={self.states!r} is not a list; write states=[{self.states!r}]"
            )
        if not self.inference and (self.in_flight is not None or self.states):
            name = "states" if self.in_flight is None else "in_flight"
            raise InputError(
                f"{name}={getattr(self, name)!r} is about states of sessions, which are in plans "
                f"for inference only: give inference=True, or leave out {name}="
            )

    def _check_inference(self) -> None:
        """Raise if something is asked for that only training has."""
        asked = {
            "schedule": (self.schedule, ("auto",)),
            "recompute": (self.recompute, ("auto", "none")),
            "stages_per_worker": (self.stages_per_worker, ("auto", 1)),
        }
        for name, (value, possible) in asked.items():
            if value not in possible:
                raise InputError(
                    f"{name}={value!r} is about backwards or their order, and a plan for inference "
                    f"has forwards only, one stage per worker: leave out {name}=, or inference="
                )

    @property
    def asks_for_stages(self) -> bool:
        """Whether a schedule, cuts or stages per worker are asked for, so that there are stages."""
        is_free = self.schedule == "auto" and self.cuts is None and self.stages_per_worker == "auto"
        return not is_free

    @property
    def least_workers(self) -> int:
        """How few workers can do what is asked for."""
        each = 2 if self.asks_for_stages else 1
        if isinstance(self.cuts, (list, tuple)):
            each = len(self.cuts) + 1
        return each * (1 if self.replicas == "auto" else self.replicas)

    def replica_numbers(self, devices: int, only_one: bool = False) -> list[int]:
        """The numbers of replicas that are considered for so many devices.

        Args:
            devices: of all replicas.
            only_one: whether there can be one only, if the number may be chosen.
        """
        if self.replicas != "auto":
            return [self.replicas]
        if only_one:
            return [1]
        numbers = [n for n in range(1, devices + 1) if devices % n == 0]
        return [n for n in numbers if n == 1 or n < devices or not self.asks_for_stages]

    @property
    def memory(self) -> Memory:
        """The optimizer state, and the memory limit in bytes."""
        limit = None if self.memory_limit is None else parse_bytes(self.memory_limit)
        return Memory(self.optimizer_state, limit)

    def check_count(self, batch_size: int) -> None:
        """Check that a batch has at least one row per micro-batch.

        Raises:
            InputError: it has fewer rows.
        """
        if self.num_microbatches != "auto":
            check_count(self.num_microbatches, batch_size)

    def recomputed(
        self, labels: Sequence[str], forbidden: Mapping[int, str]
    ) -> str | tuple[Span, ...]:
        """What to recompute: one of `RECOMPUTE`, or spans of calls.

        Raises:
            RequestError: a named module has no calls, or none that can be recomputed.
        """
        if isinstance(self.recompute, str):
            return self.recompute
        return spans(labels, forbidden, self.recompute)

    def positions(
        self, labels: Sequence[str], forbidden: Mapping[int, str], devices: int
    ) -> tuple[int, ...] | None:
        """The calls before which to cut; `None` if the cuts are to be chosen.

        Raises:
            RequestError: a cut is not possible, or the cuts do not fit devices and schedule.
            InputError: `cuts` is not a list of names and numbers.
        """
        if self.cuts is None:
            return None
        stages = devices
        if self.schedule != "auto" and isinstance(self.cuts, (list, tuple)):
            given = len(self.cuts) + 1
            stages = given if SCHEDULES[self.schedule].takes(given, devices) else devices
        return positions(labels, forbidden, stages, self.cuts)


@dataclass(frozen=True)
class Limits:
    """What the workers allow, and what they need.

    Attributes:
        one_replica: why there can be one replica only; empty if there can be several.
        all_devices: whether every device has to be used.
        in_one_memory: whether replicas on CPUs have the weights in common.
        in_one_process: whether replicas on other devices have twins of the first one's modules, see
            `penstock.engine.twins`.
        copies_gradients: as of `penstock.plan.layout.Memory`.
    """

    one_replica: str = ""
    all_devices: bool = False
    in_one_memory: bool = True
    in_one_process: bool = False
    copies_gradients: bool = False

    def memory(self, request: Request) -> Memory:
        """What one replica of what is asked for holds, besides activations."""
        return replace(request.memory, copies_gradients=self.copies_gradients)

    def sums(self, devices: Sequence[str]) -> Sums:
        """How replicas on these devices add up gradients."""
        if self.in_one_memory and set(devices) == {"cpu"}:
            return "shared"
        return "gathered" if self.in_one_process else "chained"


def positions(
    labels: Sequence[str], forbidden: Mapping[int, str], devices: int, cuts: Sequence[Cut]
) -> tuple[int, ...]:
    """The calls before which these cuts are.

    Args:
        labels: of every call of the program.
        forbidden: where no cut is possible, and why.
        devices: how many there are, for a stage each.
        cuts: one fewer, in the order of the program.

    Raises:
        InputError: they are no list of names and numbers.
        RequestError: a cut is not possible, or they are too many, too few or not in order.
    """
    _check_kinds(cuts)
    found = tuple(_before(labels, cut) if isinstance(cut, str) else index(cut) for cut in cuts)
    if len(cuts) != devices - 1:
        raise RequestError(
            f"{len(cuts)} cuts make {len(cuts) + 1} stages, but there are {devices} devices: "
            "one stage on each"
        )
    for cut, name in zip(found, cuts, strict=True):
        if not 0 < cut < len(labels):
            raise RequestError(
                f"no cut is possible before {_named(name)}: it has to be between two of the "
                f"{len(labels)} calls, so from 1 to {len(labels) - 1}"
            )
        if cut in forbidden:
            raise RequestError(f"no cut is possible before {_named(name)}: {forbidden[cut]}")
    if any(b <= a for a, b in pairwise(found)):
        listed = ", ".join(f"{name!r} at call {k}" for name, k in zip(cuts, found, strict=True))
        raise RequestError(f"the cuts are not in the order of the program: {listed}")
    return found


def _check_kinds(cuts: object) -> None:
    if not isinstance(cuts, (list, tuple)):
        raise InputError(f'cuts={cuts!r} is not a list; write cuts=["layer2", "layer4"]')
    for cut in cuts:
        if isinstance(cut, bool) or not (isinstance(cut, str) or hasattr(cut, "__index__")):
            raise InputError(f"cuts: {cut!r} is neither a module's name nor the number of a call")


def spans(
    labels: Sequence[str], forbidden: Mapping[int, str], modules: Sequence[str]
) -> tuple[tuple[int, int], ...]:
    """The calls of these modules that are to be recomputed, in the order of the program.

    A module whose calls are not all in a row has several spans. One inside another adds nothing.

    Args:
        labels: of every call of the program.
        forbidden: where no cut is possible, and why: nor can a span begin or end there.
        modules: their qualified names.

    Returns:
        for every span its first call, and the one after its last.

    Raises:
        RequestError: a module is not in the program, or cannot be recomputed on its own.
    """
    found: dict[tuple[int, int], str] = {}
    for name in modules:
        numbers = _calls_of(labels, name, f"recompute {name!r}", "recompute that as a whole")
        firsts = [k for k in numbers if k - 1 not in numbers]
        ends = [k + 1 for k in numbers if k + 1 not in numbers]
        found |= dict.fromkeys(zip(firsts, ends, strict=True), name)
    outer = [s for s in found if not any(o != s and o[0] <= s[0] and s[1] <= o[1] for o in found)]
    for span in outer:
        for edge in span:
            if edge in forbidden:
                where = "begins" if edge == span[0] else "ends"
                raise RequestError(
                    f"{found[span]!r} cannot be recomputed on its own, as no cut is possible where "
                    f"it {where}: {forbidden[edge]}. Name a module around it"
                )
    return tuple(sorted(outer))


def _calls_of(labels: Sequence[str], name: str, what: str, instead: str) -> list[int]:
    """The numbers of a module's calls.

    Raises:
        RequestError: it has none; `what` is not possible, `instead` may be.
    """
    numbers = [k for k, label in enumerate(labels) if _is_in(label, name)]
    if numbers:
        return numbers
    whole = next((label for label in labels if name.startswith(f"{label}.")), None)
    if whole is not None:
        raise RequestError(
            f"it is not possible to {what}: it is inside {whole!r}, which is one call of "
            f"the program (program.explain() says why); {instead}"
        )
    close = difflib.get_close_matches(name, _modules(labels), n=3, cutoff=0.4)
    hint = ", ".join(map(repr, close or _modules(labels)[:5]))
    raise RequestError(f"no call of the program is in a module named {name!r}; there are {hint}")


def _before(labels: Sequence[str], name: str) -> int:
    """The number of the module's first call."""
    return _calls_of(labels, name, f"cut before {name!r}", "cut before that, or after")[0]


def _is_in(label: str, module: str) -> bool:
    return label == module or label.startswith(f"{module}.")


def _modules(labels: Sequence[str]) -> list[str]:
    """The names of all modules that make a call or are one."""
    names: dict[str, None] = {}
    for label in labels:
        path = label.rpartition(".")[0] if label.endswith("()") else label
        while path:
            names.setdefault(path)
            path = path.rpartition(".")[0]
    return list(names)


def _named(cut: Cut) -> str:
    return repr(cut) if isinstance(cut, str) else f"call {cut}"


def _check_modules(recompute: object) -> None:
    if not isinstance(recompute, (list, tuple)) or not all(isinstance(n, str) for n in recompute):
        raise InputError(
            f"recompute={recompute!r} is not a list of modules; write "
            'recompute=["layer2", "layer4"]'
        )
