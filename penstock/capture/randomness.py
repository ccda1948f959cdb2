"""Random numbers that depend on (seed, step, micro-batch, call) and on nothing else.

A recorded call that draws random numbers runs with the device's generator seeded for just that
call, and the generator is put back afterwards. So dropout masks are the same whatever the number
of stages, the schedule and the kind of worker, and the user's own random stream is not consumed.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import chain
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from penstock.capture.trees import tree_leaves
from penstock.devices.kinds import kind_of

LOSS, METRICS = -1, -2
"""The numbers by which the loss and the metrics are seeded, as calls are by their identities."""

_MASK = (1 << 64) - 1
_CHECKS = "__beartype_getrandbits"  # an argument of the functions that beartype makes

# The generators are process-wide, so is what guards them. Reentrant: a closed module that draws
# may hold a recorded program of its own.
_GENERATOR_LOCK = threading.RLock()


class Key(NamedTuple):
    """Where random numbers are drawn: one micro-batch of one step, under the user's seed."""

    seed: int
    step: int
    microbatch: int

    def for_call(self, call: int) -> int:
        """A 64-bit seed for one call; neighbouring keys give unrelated seeds (splitmix64)."""
        state = 0
        for part in (self.seed, self.step, self.microbatch, call):
            state = (state ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
            state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
            state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
            state ^= state >> 31
        return state


def draw_in_python(
    key: Key | None, call: int, function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Like `draw`, for a call that draws from numpy's global generator or Python's as well."""
    if key is None:
        return function(*args, **kwargs)
    with _GENERATOR_LOCK, python_kept():
        seed_python(key.for_call(call))
        return draw(key, call, function, *args, **kwargs)


def undisturbed() -> AbstractContextManager[object]:
    """While open, no other thread runs a call that draws, for which generators are seeded."""
    return _GENERATOR_LOCK


@contextmanager
def undisturbed_within(seconds: float) -> Iterator[bool]:
    """Like `undisturbed`, but wait only for some time; yields whether that was enough.

    Args:
        seconds: how long to wait.
    """
    is_had = _GENERATOR_LOCK.acquire(timeout=seconds)
    try:
        yield is_had
    finally:
        if is_had:
            _GENERATOR_LOCK.release()


def user_seed() -> int:
    """Return the seed of `torch.manual_seed`, also while a call of another thread is seeded."""
    with undisturbed():
        return torch.initial_seed()


@contextmanager
def python_kept() -> Iterator[None]:
    """Afterwards, numpy's global generator and Python's are as they were."""
    with undisturbed():
        numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        with undisturbed():
            np.random.set_state(numpy_state)
            random.setstate(python_state)


@contextmanager
def type_checks_apart(model: nn.Module) -> Iterator[None]:
    """Let beartype draw from a generator of its own in the functions that come with the model.

    It checks one random item of each sequence that an annotated function is given. Nothing that
    the model does depends on that, but it draws from Python's generator, as the model might.
    """
    own = random.Random(0).getrandbits
    spaces = {id(space): space for space in map(vars, _around(model))}
    changed = []
    values = [value for space in spaces.values() for value in list(space.values())]
    for function in [value for value in values if type(value) is FunctionType]:
        defaults = function.__kwdefaults__
        if defaults and _CHECKS in defaults:
            changed.append((defaults, defaults[_CHECKS]))
            defaults[_CHECKS] = own
    try:
        yield
    finally:
        for defaults, original in changed:
            defaults[_CHECKS] = original


def _around(model: nn.Module) -> Iterator[Any]:
    """The classes of the model's modules, and the Python modules that these are from."""
    for kind in {kind for module in model.modules() for kind in type(module).__mro__}:
        if kind.__module__.partition(".")[0] not in ("torch", "builtins"):
            yield kind
            if kind.__module__ in sys.modules:
                yield sys.modules[kind.__module__]


def seed_python(seed: int) -> None:
    """Seed numpy's global generator and Python's."""
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def next_in_python() -> tuple[float, float]:
    """Draw the next numbers of numpy's global generator and of Python's.

    They differ from those right after seeding if anything has been drawn since.
    """
    return np.random.random_sample(), random.random()


class Draws:
    """While open, notes whether random numbers are drawn from these generators, or in Python.

    Args:
        drawn_from: the generators.
        seed: seeds these, numpy's global generator and Python's when it opens; `drawn_from` are put
            back afterwards. `None` leaves all of them as they are.

    Attributes:
        happened: whether any numbers were drawn.
        in_python: whether numpy's global generator or Python's gave some. It is known only with a
            seed, and these two generators are not put back.
    """

    def __init__(self, drawn_from: Sequence[torch.Generator], seed: int | None) -> None:
        self.happened = self.in_python = False
        self._generators = drawn_from
        self._seed = seed

    def __enter__(self) -> Draws:
        _GENERATOR_LOCK.acquire()
        self._before = self._start = [g.get_state() for g in self._generators]
        if self._seed is not None:
            for generator in self._generators:
                generator.manual_seed(self._seed)
            self._start = [g.get_state() for g in self._generators]
            seed_python(self._seed)
            self._next = next_in_python()
            seed_python(self._seed)
        return self

    def began_at(self, states: Sequence[torch.Tensor]) -> bool:
        """Whether the generators were in these states when it was opened."""
        return all(map(torch.equal, self._before, states))

    def __exit__(self, *_: object) -> None:
        after = [g.get_state() for g in self._generators]
        self.happened = any(not torch.equal(a, b) for a, b in zip(self._start, after, strict=True))
        if self._seed is not None:
            for generator, state in zip(self._generators, self._before, strict=True):
                generator.set_state(state)
            self.in_python = next_in_python() != self._next
            self.happened |= self.in_python
        _GENERATOR_LOCK.release()


def draw(
    key: Key | None, call: int, function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Run `function(*args, **kwargs)` with the generators seeded for this key and call.

    These are that of the CPU, where a module on an accelerator may draw as well, and those of the
    devices that the function, its tensors or its arguments are on.

    Without a key it draws from the generator as it stands, like plain PyTorch.
    """
    if key is None:
        return function(*args, **kwargs)
    with _seeded(generators(_devices_of((function, args), kwargs)), key.for_call(call)):
        return function(*args, **kwargs)


@contextmanager
def seeding(key: Key, call: int, device: torch.device) -> Iterator[None]:
    """While open, the generators of the device and of the CPU are seeded for this key and call."""
    with _seeded(generators([device]), key.for_call(call)):
        yield


@contextmanager
def _seeded(drawn_from: Sequence[torch.Generator], seed: int) -> Iterator[list[torch.Tensor]]:
    """While open, these generators are seeded; yields their states then."""
    with _GENERATOR_LOCK:
        states = [generator.get_state() for generator in drawn_from]
        try:
            yield [generator.manual_seed(seed).get_state() for generator in drawn_from]
        finally:
            for generator, state in zip(drawn_from, states, strict=True):
                generator.set_state(state)


class Watched:
    """A function of the user's, with random numbers of its own if it draws any.

    Its first call is seeded, like a call of the program, and watched. If it draws none, later calls
    are not seeded, so that they keep no other stage waiting; otherwise all are seeded.

    Args:
        function: the function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._draws: bool | None = None

    @property
    def draws(self) -> bool:
        """Whether the function draws random numbers; `True` until its first call has shown it."""
        return self._draws is not False

    def __call__(self, key: Key, call: int, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function.

        Args:
            key: the random key.
            call: the number by which the function is seeded, such as `LOSS`.
            args, kwargs: the function's arguments.
        """
        if self._draws is False:
            return self._function(*args, **kwargs)
        drawn_from = generators(_devices_of((self._function, args), kwargs))
        with _seeded(drawn_from, key.for_call(call)) as start:
            try:
                return self._function(*args, **kwargs)
            finally:
                if self._draws is None:
                    now = (generator.get_state() for generator in drawn_from)
                    self._draws = not all(map(torch.equal, start, now))


def _default_generator(device: torch.device) -> torch.Generator:
    """The generator that torch functions draw from on `device`."""
    return kind_of(device).generator(device)


def generators(devices: Iterable[torch.device]) -> list[torch.Generator]:
    """The generators of the CPU and of every accelerator among `devices`."""
    others = sorted({d for d in devices if kind_of(d).has_streams}, key=str)
    return [torch.default_generator, *(_default_generator(d) for d in others)]


@contextmanager
def generators_kept(devices: Iterable[torch.device]) -> Iterator[None]:
    """Afterwards, every generator is as it was: torch's on these devices, numpy's and Python's."""
    drawn_from = generators(devices)
    with undisturbed():
        states = [generator.get_state() for generator in drawn_from]
    try:
        with python_kept():
            yield
    finally:
        with undisturbed():
            for generator, state in zip(drawn_from, states, strict=True):
                generator.set_state(state)


def _devices_of(args: object, kwargs: Mapping[str, Any]) -> set[torch.device]:
    """The devices of tensors and modules among arguments, and those that they name."""
    leaves = tree_leaves((args, kwargs))
    found = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}
    found.update(leaf for leaf in leaves if isinstance(leaf, torch.device))
    for module in [leaf for leaf in leaves if isinstance(leaf, nn.Module)]:
        held = next(chain(module.parameters(), module.buffers()), None)
        found |= set() if held is None else {held.device}
    named = kwargs.get("device")
    if isinstance(named, str | int) and not isinstance(named, bool):
        with suppress(RuntimeError):  # something else of this name
            found.add(torch.device(named))
    return found
