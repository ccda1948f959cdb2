"""Measuring what every call of a program costs, forward and backward, on every kind of device."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypedDict, TypeVar

import msgspec
import numpy as np
import torch

from penstock.capture import ROWS, Program, Ref, Sizes, TensorInfo
from penstock.capture.blame import lone_row
from penstock.capture.calls import INPUTS
from penstock.capture.cuts import Cuts, KeptInStages
from penstock.capture.explain import first_used
from penstock.capture.one_replica import why_no_recomputing, why_one_replica
from penstock.capture.preserve import objects_kept
from penstock.capture.randomness import generators_kept
from penstock.capture.states import check_parts, states_in
from penstock.devices.allocator import give_back_freed_memory
from penstock.devices.kinds import kind_of
from penstock.display.terminal import Progress
from penstock.profile.agenda import Agenda
from penstock.profile.data import DeviceProfile, Profile, check_count
from penstock.profile.halving import halving_seconds, launch_and_rate
from penstock.profile.rows import split_rows
from penstock.profile.team import SECONDS as A_SIZE
from penstock.profile.team import Team
from penstock.profile.timing import Timing, spread

T = TypeVar("T")
_Timings = dict[int, list[Timing]]  # by rows
_Turns = dict[int, list[float]]  # likewise

SECONDS = 30.0
"""About how long a profile takes, if nobody says otherwise."""

_QUICK = 0.4  # seconds of a forward and backward that can be repeated often
_ON_HALVES = 0.2  # of the time, for what halving costs
_ON_CONTENTION = 0.3  # of the time of a size's passes, for how workers slow each other down
_A_SIZE = 1 / 30  # of the time of a profile, for repeated passes over a size
_LONG = 2 / 30  # of the time of a profile: a size whose passes take longer is not repeated
_HALVINGS = 8  # passes over the smallest size that measuring what halving costs takes at least
_NESTS = (
    "There is one replica, as the backward of an autograd Function runs another backward, which "
    "adds to gradients by itself."
)
_MANY = 64  # rows, so many that what does not depend on them does not matter


def profile(
    program: Program,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    devices: Sequence[str],
    num_microbatches: int | Literal["auto"] = "auto",
    threads: int = 1,
    seconds: float = SECONDS,
    inference: bool = False,
    states: Collection[int | str] = (),
    progress: Progress | None = None,
) -> Profile:
    """Measure every call of `program` at several micro-batch sizes.

    Every call is timed on its own to see how the work is divided; the whole forward and backward
    are timed as they will run, and the calls are scaled to add up to that. All CPU workers are
    measured at the same time, because they share memory and caches when they train as well; by how
    much that is slower than one of them alone is measured, too. How backwards divide into halves,
    and what is held for them, is measured beside it.
    Parameters, buffers, gradients, hooks and random generators of the user's model are untouched.
    Sizes that are too small for the model are left out, and so are plans that would need them.

    Args:
        program: what to measure.
        args: positional arguments of a batch; the captured example if neither is given.
        kwargs: keyword arguments of a batch.
        devices: the devices to plan for, in order; one may be listed several times.
        num_microbatches: measure the micro-batches of just this many, if it is decided already.
        threads: intra-op threads of each CPU worker.
        seconds: about how long to measure. A slow model is measured at fewer sizes, but at two.
        inference: measure forwards alone, in evaluation mode, as a plan for inference needs them.
        states: parts of the result that are states, as of `Pipeline.session`.
        progress: called as the measurement goes on.

    Returns:
        seconds per call, on every kind of device.

    Raises:
        InputError: more micro-batches than rows, or `states` names no part of the result.
    """
    check_parts(program.train, states)
    (found,) = profiles(
        program,
        args,
        kwargs,
        choices=[(devices, threads)],
        num_microbatches=num_microbatches,
        seconds=seconds,
        inference=inference,
        progress=progress,
    )
    return with_states(found, program, states)


def with_states(profile: Profile, program: Program, states: Collection[int | str]) -> Profile:
    """The profile, in which these parts of the result are states as well.

    Args:
        profile: of the program.
        program: the captured program.
        states: as of `profile`.

    Raises:
        InputError: they are no parts of the result.
    """
    if not states:
        return profile
    check_parts(program.train, states)
    return msgspec.structs.replace(
        profile,
        states=_states(program, states),
        boundary=bytes_across(program, inference=profile.inference, states=states),
    )


def profiles(
    program: Program,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    choices: Sequence[tuple[Sequence[str], int]],
    num_microbatches: int | Literal["auto"] = "auto",
    seconds: float = SECONDS,
    inference: bool = False,
    progress: Progress | None = None,
) -> list[Profile]:
    """Profiles for several lists of devices, which are to be compared.

    They take turns, a size each, because a machine may be much slower in one minute than in the
    next.

    Args:
        choices: devices, and intra-op threads of each CPU worker.
        seconds: about how long to measure each.
        program, args, kwargs, num_microbatches, inference, progress: as of `profile`.

    Raises:
        InputError: more micro-batches than rows.
    """
    leaves = list(program.example)
    if args or kwargs:
        leaves = program.flatten_inputs(args, kwargs or {})
    count = None if num_microbatches == "auto" else num_microbatches
    if count is not None:
        check_count(count, program.varying.sizes(leaves)[ROWS])
    works = [
        _profiled(program, leaves, devices, count, threads, seconds, inference, progress)
        for devices, threads in choices
    ]
    kinds = dict.fromkeys(kind for devices, _ in choices for kind in devices)
    with objects_kept(program.model.modules()), generators_kept(map(torch.device, kinds)):
        try:
            return _in_turns(works)
        finally:
            give_back_freed_memory()  # workers may be other processes, and need it there


def _in_turns(works: Sequence[Generator[None, None, T]]) -> list[T]:
    """What these return; each goes on until it yields, then the next does."""
    found: dict[int, T] = {}
    while len(found) < len(works):
        for number, work in enumerate(works):
            if number not in found:
                try:
                    next(work)
                except StopIteration as end:
                    found[number] = end.value
    return [found[number] for number in range(len(works))]


def _profiled(
    program: Program,
    leaves: Sequence[Any],
    devices: Sequence[str],
    count: int | None,
    threads: int,
    seconds: float,
    inference: bool,
    progress: Progress | None,
) -> Generator[None, None, Profile]:
    """Measure a profile; yields after each size."""
    given = program.varying.sizes(leaves)
    batch_size = given[ROWS]
    on_sizes = seconds if inference else (1 - _ON_HALVES) * seconds
    agenda = Agenda(batch_size, len(devices), on_sizes, count, _LONG * seconds)
    of_a_size = min(_A_SIZE * seconds, A_SIZE)
    teams = {
        kind: Team(
            program, torch.device(kind), _team_size(kind, devices), threads, of_a_size, inference
        )
        for kind in dict.fromkeys(devices)
    }

    def batch_of(rows: int) -> tuple[list[Any], Sizes]:
        smaller = {**given, ROWS: rows}
        return program.varying.resized(leaves, smaller), smaller

    try:
        timings, turns = yield from _measured(
            teams, agenda, batch_of, _ON_CONTENTION * of_a_size, progress
        )
    except Exception as error:
        if (clearer := lone_row(error, split_rows(batch_size, count or 1))) is not None:
            raise clearer from error
        raise
    # On one device no other stage waits for the first half of a backward.
    on_halves = _ON_HALVES * seconds / len(teams) if len(devices) > 1 else 0.0
    halving = {k: _halving(teams[k], found, batch_of, on_halves) for k, found in timings.items()}
    if progress:
        progress(agenda.expected, agenda.expected, "profiled")
    nests = False
    saved: tuple[float, ...] = ()
    if not inference:
        least, most = min(timings[devices[0]]), max(timings[devices[0]])
        nests = teams[devices[0]].nests(*batch_of(least))
        held = teams[devices[0]].saved_bytes(*batch_of(most))
        saved = tuple(count / most for count in held)
    parameters = first_used(program.model, program.train)
    return Profile(
        fingerprint=program.fingerprint,
        batch_size=batch_size,
        devices=tuple(devices),
        kinds={
            k: device_profile(k, found, halving[k], contention(found, turns[k]))
            for k, found in timings.items()
        },
        labels=program.labels,
        weights=tuple(sum(p.nbytes for p in used) for used in parameters),
        parameters=tuple(map(len, parameters)),
        boundary=bytes_across(program, inference=inference),
        tied=weights_across(program),
        forbidden=dict(program.cuts.reasons),
        saved=saved,
        outputs=_outputs(program),
        states=_states(program),
        inference=inference,
        capacity=_capacity(teams),
        **not_measured(program, devices, threads, _NESTS if nests else ""),
    )


class NotMeasured(TypedDict):
    """What a profile says besides; the fields are `Profile`'s."""

    threads: int
    one_replica: str
    no_recomputing: str


def not_measured(
    program: Program, devices: Sequence[str], threads: int, nests: str = ""
) -> NotMeasured:
    """What a profile of a program says besides.

    Args:
        program, devices, threads: as of `profile`.
        nests: why there can be one replica only, as far as that had to be tried.
    """
    return {
        "threads": threads if any(torch.device(name).type == "cpu" for name in devices) else 0,
        "one_replica": why_one_replica(program) or nests,
        "no_recomputing": why_no_recomputing(program),
    }


def _team_size(kind: str, devices: Sequence[str]) -> int:
    """How many workers of this kind measure at the same time."""
    return list(devices).count(kind) if torch.device(kind).type == "cpu" else 1


def _measured(
    teams: Mapping[str, Team],
    agenda: Agenda,
    batch_of: Callable[[int], tuple[list[Any], Sizes]],
    on_contention: float,
    progress: Progress | None,
) -> Generator[None, None, tuple[dict[str, _Timings], dict[str, _Turns]]]:
    """All sizes on all kinds of devices, by kind and by rows, ascending; yields after each size.

    Beside them comes how many times as long they take as on one worker alone, in every turn.
    """
    found: dict[str, _Timings] = {kind: {} for kind in teams}
    turns: dict[str, _Turns] = {kind: {} for kind in teams}
    refusal: Exception | None = None
    done = 0
    while (rows := agenda.next()) is not None:
        if progress:
            progress(done, agenda.expected, f"profiling {rows} rows on {', '.join(teams)}")
        done += 1
        start, brief = time.perf_counter(), agenda.is_brief(rows)
        try:
            new = {kind: team.measure(*batch_of(rows), brief) for kind, team in teams.items()}
        except Exception as error:  # BatchNorm, for one, refuses a single value per channel
            too_large = isinstance(error, torch.OutOfMemoryError)
            if too_large:
                traceback.clear_frames(error.__traceback__)  # they hold its activations
            if not any(found.values()):
                refusal = error
            elif not too_large:
                raise
            agenda.refuse(rows, and_larger=too_large)
            continue
        for kind, passes in new.items():
            found[kind][rows] = _better(found[kind].get(rows, passes), passes)
        cost = max(map(_total, new.values()))
        for kind, team in teams.items() if cost < _QUICK else ():
            ratios = team.contention(*batch_of(rows), on_contention)
            turns[kind].setdefault(rows, []).extend(ratios)
        agenda.learn(rows, cost, time.perf_counter() - start)
        yield
    if refusal is not None and not any(found.values()):
        raise refusal
    if progress:
        progress(done, agenda.expected, f"profiling halves on {', '.join(teams)}")
    return {kind: dict(sorted(timings.items())) for kind, timings in found.items()}, turns


def _better(before: Sequence[Timing], now: Sequence[Timing]) -> list[Timing]:
    """The faster passes of two times that a size was measured, and what is known of its calls.

    The second time it may have been the whole program alone.
    """
    faster = list(before if _total(before) < _total(now) else now)
    if faster[0].forward or not before[0].forward:
        return faster
    pairs = zip(before, faster, strict=False)
    return [
        replace(known, wholes=timing.wholes, launching=timing.launching) for known, timing in pairs
    ]


def _whole(passes: Sequence[Timing]) -> tuple[float, float]:
    """Seconds of the whole program, forward and backward."""
    forwards, backwards = zip(*(timing.whole for timing in passes), strict=True)
    return statistics.median(forwards), statistics.median(backwards)


def _total(passes: Sequence[Timing]) -> float:
    """Seconds of the forward and the backward together."""
    return sum(_whole(passes))


def device_profile(
    kind: str,
    timings: Mapping[int, Sequence[Timing]],
    halving: Sequence[float],
    contention: Sequence[float] = (),
) -> DeviceProfile:
    """What calls cost on one kind of device.

    Where only the whole program was timed, calls have the parts of it that they have in the nearest
    size.

    Args:
        kind: its name.
        timings: the passes over each size, by rows.
        halving: seconds at each size, see `DeviceProfile`.
        contention: at each size, likewise.
    """
    forward, backward, weight = [], [], []
    least = halving_seconds(torch.device(kind))  # shorter halves are not worth putting off
    of_calls = {rows: passes for rows, passes in timings.items() if passes[0].forward}
    for rows, passes in timings.items():
        whole_forward, whole_backward = _whole(passes)
        calls = of_calls[min(of_calls, key=lambda known: abs(known - rows))]
        forward.append(_scaled([t.forward for t in calls], whole_forward))
        backward.append(_scaled([t.backward for t in calls], whole_backward))
        measured = [t.shares for t in calls if t.shares is not None]
        shares = _medians(measured) if measured else [0.0] * len(backward[-1])
        halves = [b * share for b, share in zip(backward[-1], shares, strict=True)]
        weight.append(tuple(half if half > least else 0.0 for half in halves))
    return DeviceProfile(
        kind=kind,
        rows=tuple(timings),
        forward=tuple(forward),
        backward=tuple(backward),
        weight=tuple(weight),
        spread=statistics.median(spread(passes) for passes in timings.values()),
        halving=tuple(halving) if any(map(any, weight)) else (),
        contention=tuple(contention),
        launching=_launching(timings),
    )


def _launching(timings: Mapping[int, Sequence[Timing]]) -> float:
    """See `DeviceProfile`."""
    known = (t.launching for passes in timings.values() for t in passes)
    return min((seconds for seconds in known if seconds is not None), default=0.0)


def _halving(
    team: Team,
    timings: Mapping[int, Sequence[Timing]],
    batch_of: Callable[[int], tuple[list[Any], Sizes]],
    seconds: float,
) -> list[float]:
    """The seconds that halving costs at every size: launch + rate * rows, from two sizes.

    These are the smallest, and the largest that can be repeated often. If even the smallest takes
    too long, only the cost of halving this many tiny calls is counted (`halving_seconds`).
    """
    shares = [t.shares for passes in timings.values() for t in passes if t.shares]
    halved = max((sum(map(bool, of_calls)) for of_calls in shares), default=0)
    if not halved:
        return [0.0] * len(timings)
    totals = {rows: _total(passes) for rows, passes in timings.items()}
    few, many = _small_and_large(totals)
    if _HALVINGS * totals[few] > seconds:
        return [halved * halving_seconds(team.members[0].device)] * len(timings)
    end = time.perf_counter() + seconds
    found = {few: team.halving(*batch_of(few), seconds if many == few else seconds / 2)}
    if many > few:
        found[many] = team.halving(*batch_of(many), end - time.perf_counter())
    launch, rate = launch_and_rate(found, totals)
    return [launch + rate * rows for rows in timings]


def contention(sizes: Iterable[int], turns: _Turns) -> list[float]:
    """How many times as long every size takes beside other workers as alone, at least 1.

    A turn is short, and something else may have run in it; so what is known of a size are its own
    turns and those of the sizes below and above.

    Args:
        sizes: rows that were measured.
        turns: the ratios that were found, by rows, of as many sizes as there was time for.

    Returns:
        a ratio for every size; nothing if there are no turns.
    """
    known = sorted(rows for rows, ratios in turns.items() if ratios)
    if not known:
        return []
    around = {
        rows: [ratio for near in known[max(0, k - 1) : k + 2] for ratio in turns[near]]
        for k, rows in enumerate(known)
    }
    ratios = [max(1.0, statistics.median(around[rows])) for rows in known]
    return [float(ratio) for ratio in np.interp(list(sizes), known, ratios)]


def _small_and_large(totals: Mapping[int, float]) -> tuple[int, int]:
    """The smallest size, and the largest that can be repeated often.

    Args:
        totals: seconds of forward and backward, by rows.
    """
    few = min(totals)
    return few, max((rows for rows, total in totals.items() if total < _QUICK), default=few)


def _scaled(passes: Sequence[Sequence[float]], total: float) -> tuple[float, ...]:
    medians = _medians(passes)
    scale = total / sum(medians) if sum(medians) > 0 else 1.0
    return tuple(seconds * scale for seconds in medians)


def _medians(passes: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(call) for call in zip(*passes, strict=True)]


def bytes_across(
    program: Program,
    boundary_dtype: torch.dtype | None = None,
    inference: bool = False,
    states: Collection[int | str] = (),
) -> tuple[float, ...]:
    """Bytes per row across every cut, without weights.

    Args:
        program: what is cut.
        boundary_dtype: the dtype in which wider values travel, if they do.
        inference: whether the states in its result stay where they are made, as in a session.
        states: parts of the result that are states as well.
    """
    sizes, places = program.sizes(_MANY), range(len(program) + 1)
    cuts = program.cuts
    if inference and (kept := _kept(program, states)):
        cuts = Cuts(program.train, apart=KeptInStages(outputs=frozenset(kept)))
    return tuple(cuts.num_bytes(k, sizes, boundary_dtype) / _MANY for k in places)


def weights_across(
    program: Program, boundary_dtype: torch.dtype | None = None
) -> tuple[float, ...]:
    """Bytes of the weights across every cut, whose gradients come back for every micro-batch.

    Args:
        program: what is cut.
        boundary_dtype: the dtype in which wider gradients travel, if they do.
    """
    sizes, cuts = program.sizes(1), program.cuts
    found = [float(cuts.weight_bytes(k, sizes, boundary_dtype)) for k in range(len(program) + 1)]
    return tuple(found) if any(found) else ()


def _kept(program: Program, states: Collection[int | str] = ()) -> dict[int, Ref]:
    """The states in the result, by leaf: tensors that calls make."""
    trace = program.train
    leaves = {k: trace.outputs[k] for k in sorted(states_in(trace, states))}
    return {
        k: leaf
        for k, leaf in leaves.items()
        if isinstance(leaf, Ref)
        and leaf.call != INPUTS
        and isinstance(trace.info(leaf), TensorInfo)
    }


def _states(program: Program, states: Collection[int | str] = ()) -> tuple[float, ...]:
    """Bytes per row of the memory that the states occupy which every call makes.

    A state that is a view keeps all of what it is a view of.
    """
    trace, sizes = program.train, program.sizes(_MANY)
    known = [*trace.inputs, *(output for call in trace.calls for output in call.outputs)]
    memory: dict[int, int] = {}
    for info in known:
        if isinstance(info, TensorInfo):
            memory[info.storage] = max(memory.get(info.storage, 0), info.num_bytes(sizes))
    found = [0.0] * len(trace.calls)
    for leaf in _kept(program, states).values():
        info = trace.info(leaf)
        if isinstance(info, TensorInfo):
            found[leaf.call] += memory.pop(info.storage, 0) / _MANY
    return tuple(found)


def _outputs(program: Program) -> tuple[float, ...]:
    """Bytes per row of the memory that every call's results are the first to occupy."""
    trace, sizes = program.train, program.sizes(_MANY)
    known = [*trace.inputs, *trace.attributes.values()]
    seen = {info.storage for info in known if isinstance(info, TensorInfo)}
    found = []
    for call in trace.calls:
        new = {o.storage: o for o in reversed(call.outputs) if isinstance(o, TensorInfo)}
        found.append(sum(o.num_bytes(sizes) for k, o in new.items() if k not in seen) / _MANY)
        seen.update(new)
    return tuple(found)


def _capacity(kinds: Iterable[str]) -> dict[str, int]:
    """Bytes of memory of the GPUs. Workers on CPUs share theirs."""
    found = {kind: kind_of(kind).memory(torch.device(kind)) for kind in kinds}
    return {kind: memory.total for kind, memory in found.items() if memory is not None}
