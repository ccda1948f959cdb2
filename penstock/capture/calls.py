"""What a recording is made of: values, sizes, calls, and the trace that lists them in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import chain
from math import prod
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from penstock.capture.equality import same_constant
from penstock.capture.numbers import Given, Number, Outcome, name_of
from penstock.capture.places import MISSING, SCALARS, Place, frozen
from penstock.capture.trees import Leaf, Structure, flatten, map_leaves, tree_leaves

INPUTS = -1
"""The call number of the model's own inputs."""


class Unrecordable(Exception):  # noqa: N818 - never reaches a user: it closes a module
    """Something in the open module `path` cannot be recorded; `why` is for `explain()`.

    Attributes:
        path: the module's qualified name.
        why: the reason, in words.
        within: the plain function that does it and may be closed instead of the module; `None` if
            there is none.
    """

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path or '(the model itself)'}: {why}")
        self.path = path
        self.why = why
        self.within: FunctionType | None = None


class OutsideTorch(Unrecordable):
    """The Python of the open module `path` draws random numbers itself, or uses arrays."""


class Assigned(Unrecordable):
    """The forward of the open module `path` assigns to an attribute of its own."""


class Changed(Unrecordable):
    """The forward of the open module `path` changes an attribute of an object that it has read.

    Attributes:
        place: the attribute.
        before: the value that was read; `MISSING` if there was none, or it was no plain data.
        after: the value at the end of the forward.
        is_plain: whether both values are plain data.
    """

    def __init__(self, path: str, place: Place, before: Any, after: Any) -> None:
        super().__init__(path, f"the forward changes {place}")
        self.place, self.before, self.after = place, before, after
        self.is_plain = isinstance(before, SCALARS) and isinstance(after, SCALARS)


@dataclass(frozen=True, slots=True)
class Ref(Leaf):
    """A value: leaf `leaf` of the result of call `call`, or of the inputs if that is `INPUTS`."""

    call: int
    leaf: int

    def __str__(self) -> str:
        return f"input {self.leaf}" if self.call == INPUTS else f"%{self.call}.{self.leaf}"


@dataclass(frozen=True, slots=True)
class Attribute(Leaf):
    """A parameter, buffer or plain tensor of the model, read by its qualified name."""

    name: str

    def __str__(self) -> str:
        return self.name


Value = Ref | Attribute


def input_leaves(values: Sequence[Value], leaves: Sequence[Any]) -> list[Any]:
    """The leaves of a program's inputs to which the `Ref`s among these values refer."""
    return [leaves[value.leaf] for value in values if isinstance(value, Ref)]


GRADIENT = -1
"""Stands for `requires_grad` among the dimensions that `Call.inspected` lists for a tensor."""

ROWS = "B"
"""The name of the dimension that micro-batches are split along."""

Sizes = Mapping[str, int]
"""The size of every dimension that varies in the inputs, by name: the rows and the user's own."""


@dataclass(frozen=True, slots=True)
class Size(Leaf):
    """A whole number that depends on the sizes of the inputs: a sum of products, `2B·length+1`.

    Attributes:
        terms: for every product its factor and the names of the sizes that are multiplied; a
            constant has no names.
        kind: the type that the number has in Python; a `float` may come from a division.
    """

    terms: tuple[tuple[int, tuple[str, ...]], ...]
    kind: type[int] | type[float] = field(default=int, repr=False)  # fingerprints stay

    def at(self, sizes: Sizes) -> Any:
        """The number, of its kind, for inputs that are this large."""
        return self.kind(
            sum(factor * prod(sizes[n] for n in names) for factor, names in self.terms)
        )

    def grows_with(self, name: str) -> bool:
        """Whether the number depends on the size of this name."""
        return any(name in names for _, names in self.terms)

    def __str__(self) -> str:
        text = "+".join(map(_term, *zip(*self.terms, strict=True))).replace("+-", "-")
        return text if self.kind is int else f"float({text})"


def _term(factor: int, names: tuple[str, ...]) -> str:
    text = {1: "", -1: "-"}.get(factor, str(factor)) if names else str(factor)
    return text + "·".join(names)


@dataclass(frozen=True, slots=True)
class Irregular(Leaf):
    """A size that no `Size` can express, such as that of a strided convolution's result.

    Attributes:
        example: the size for the example.
    """

    example: int

    def at(self, sizes: Sizes) -> int:
        """The size for the example, as a guess, whatever the inputs' sizes."""
        return self.example

    def grows_with(self, name: str) -> bool:
        """Whether the size may vary with the size of this name: with any but the rows."""
        return name != ROWS

    def __str__(self) -> str:
        return "?"


@dataclass(frozen=True, slots=True)
class Submodule(Leaf):
    """A submodule of the model, given to a call as an argument."""

    path: str

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True, slots=True, eq=False)
class GivenArray(Leaf):
    """An array or a scalar of numpy among the inputs, given to a call as it was."""

    array: np.ndarray[Any, Any] | np.generic

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GivenArray) and same_constant(self.array, other.array)

    def __hash__(self) -> int:
        return hash((self.array.dtype.str, self.array.shape))

    def __str__(self) -> str:
        return f"array of {self.array.dtype}, {self.array.shape}"


class Origin(IntEnum):
    """What a value is computed from; of several origins, the highest one counts."""

    NOTHING = 0
    """Neither of the following: constants, and masks and positions made of sizes."""
    INPUTS = 1
    """The model's inputs alone."""
    MODEL = 2
    """Parameters, buffers or random numbers as well."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of a tensor value.

    Attributes:
        shape: its sizes; those that vary with the inputs are `Size`s.
        dtype: its element type.
        requires_grad: whether it required a gradient when it was recorded.
        storage: a number that tensors sharing memory have in common.
        origin: what it is computed from.
        dynamic: whether its sizes may depend on values, as those of `x[x > 0]` do.
        layout: its memory layout: strided, or one of the sparse ones.
    """

    shape: tuple[int | Size | Irregular, ...]
    dtype: torch.dtype
    requires_grad: bool
    storage: int
    origin: Origin = Origin.MODEL
    dynamic: bool = False
    layout: torch.layout = torch.strided

    def at(self, sizes: Sizes) -> tuple[int, ...]:
        """The shape for inputs that are this large."""
        return tuple(n if isinstance(n, int) else n.at(sizes) for n in self.shape)

    def num_bytes(self, sizes: Sizes) -> int:
        """The bytes of the tensor's elements for inputs that are this large."""
        return self.dtype.itemsize * prod(self.at(sizes))

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{str(self.dtype).removeprefix('torch.')}[{shape}]"


class Ambient(NamedTuple):
    """The thread's modes that change what a call does: gradients on or off, and autocast.

    Attributes:
        grad: whether gradients are enabled.
        autocast: for every kind of device its name, whether autocast is on for it, and the dtype.
        cache: whether a weight that autocast has cast is kept for its next use; the weight's
            gradients are then summed in the lower precision.
    """

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool = True

    @property
    def casting(self) -> tuple[tuple[str, torch.dtype], ...]:
        """The kinds of devices for which autocast is on, with their dtypes."""
        return tuple([(device, dtype) for device, on, dtype in self.autocast if on])

    @contextmanager
    def autocasting(self) -> Iterator[None]:
        """While open, autocast has these settings for every kind of device."""
        with ExitStack() as stack:
            for device, on, dtype in self.autocast:
                region = torch.autocast(device, enabled=on, dtype=dtype, cache_enabled=self.cache)
                stack.enter_context(region)
            yield

    def without_autocast(self) -> Ambient:
        """These modes with autocast off for every kind of device."""
        return self._replace(autocast=tuple((d, False, dtype) for d, _, dtype in self.autocast))


_AUTOCAST_DEVICES = ("cpu", "cuda")


def ambient() -> Ambient:
    """The calling thread's modes that change what a torch call does."""
    autocast = tuple(
        [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _AUTOCAST_DEVICES]
    )
    return Ambient(torch.is_grad_enabled(), autocast, torch.is_autocast_cache_enabled())


def casting_now() -> tuple[tuple[str, torch.dtype], ...]:
    """`ambient().casting`, without looking at the calling thread's other modes."""
    on = [d for d in _AUTOCAST_DEVICES if torch.is_autocast_enabled(d)]
    return tuple([(d, torch.get_autocast_dtype(d)) for d in on])


Same = tuple[tuple[int | None, bool], ...]
"""For every tensor in a result, which object it is, and whether it is a view.

A number stands for a leaf of the arguments or, counted on from these, for an earlier leaf of the
result, `None` for an object that is neither.
"""


@dataclass(slots=True)
class Call:
    """One recorded operation.

    Attributes:
        target: a submodule's qualified name, or the function itself.
        args: positional arguments; leaves are constants, or stand for what is known only in a run:
            `Value`s, `Size`s, `Number`s, `Submodule`s and `GivenArray`s.
        kwargs: keyword arguments, with leaves of the same types.
        path: the qualified name of the open module whose forward made the call.
        result: the structure of what it returns; `None` for a single leaf.
        outputs: for each leaf of the result its `TensorInfo`, or the leaf itself when it is plain
            data, or `OPAQUE` when it is an object that only other calls understand.
        ambient: the modes it ran under; `None` if they are those the forward began with.
        random: whether it draws random numbers.
        draws_in_python: whether some of these come from numpy's or Python's own generators.
        keeps_states: whether it asks for the state of a generator of torch, to set it again in its
            backward, as a checkpoint does.
        sets_states: whether it sets the state of a generator of torch itself, as `fork_rng` does.
        casts: whether an autocast region of the model's own casts weights in it: 0 if none does, 1
            if each is cast once in a region, 2 if the region uses a weight again.
        mutates: the values that it changes in place.
        hidden: the names of the tensors inside a closed module, and inside modules that are passed
            to it.
        identity: a number made of its label and how often that occurred before. It seeds the
            call's random numbers, so these do not depend on what else is recorded around it.
        looks: whether it runs code that may look at tensors' values (a closed module, a closed
            function or a custom operator), so that its result may be of another form for others.
        may_size: whether it looks at values that can become sizes, which a boolean cannot.
        inspected_in: the open module whose Python was the first to read a size of its result that
            may be different for other values; `None` if none did.
        inspected: what was read so: for each leaf of the result its dimensions, with `GRADIENT`
            among them for `requires_grad`.
        classes: for each leaf of the result of a call that `looks`, the class of the tensor, or
            `None` if it is none; empty for other calls.
        same: which objects the tensors in its result are; `None` unless it `looks`, and the
            model's code may compare objects.
        by_inputs: whether the values it looks at, or those that `inspected` depends on, may be
            values of the inputs alone.
    """

    target: str | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    path: str
    result: Structure | None = None
    outputs: tuple[Any, ...] = ()
    ambient: Ambient | None = None
    random: bool = False
    draws_in_python: bool = False
    mutates: tuple[Value, ...] = ()
    hidden: tuple[str, ...] = ()
    identity: int = 0
    looks: bool = field(default=False, compare=False, repr=False)
    may_size: bool = field(default=False, compare=False, repr=False)
    inspected_in: str | None = field(default=None, compare=False, repr=False)
    inspected: dict[int, set[int]] = field(default_factory=dict, compare=False, repr=False)
    classes: tuple[type | None, ...] = field(default=(), compare=False, repr=False)
    same: Same | None = field(default=None, compare=False, repr=False)
    by_inputs: bool = field(default=False, compare=False, repr=False)
    keeps_states: bool = field(default=False, compare=False, repr=False)
    sets_states: bool = field(default=False, compare=False, repr=False)
    casts: int = field(default=0, compare=False, repr=False)
    _reads: tuple[Value, ...] | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def is_module(self) -> bool:
        """Whether the call is one of a closed submodule."""
        return isinstance(self.target, str)

    @property
    def is_seeded(self) -> bool:
        """Whether it runs with seeded generators, and no other such call runs meanwhile."""
        return self.random or self.sets_states

    @property
    def may_matter(self) -> bool:
        """Whether the Python around the call may depend on what values decide about its result.

        That is more than a tensor's values: its sizes, the result's structure, or which objects
        are in it.
        """
        decides = self.looks and (self.result is not None or self.same is not None)
        return bool(self.inspected) or decides

    @property
    def sized_as(self) -> str | int:
        """How `Opening.sized` names the call: by its closed module if that looks, else identity."""
        return self.target if isinstance(self.target, str) and self.looks else self.identity

    @property
    def label(self) -> str:
        """A short name for people: the module's path, or the function's name and where."""
        if isinstance(self.target, str):
            return self.target or "(the whole model)"
        return f"{self.path + '.' if self.path else ''}{function_name(self.target)}()"

    def reads(self) -> tuple[Value, ...]:
        """The values among its arguments, with repetitions."""
        if self._reads is None:
            leaves = tree_leaves((self.args, self.kwargs))
            self._reads = tuple(leaf for leaf in leaves if isinstance(leaf, (Ref, Attribute)))
        return self._reads


class _Opaque:
    """Marks a result leaf that is neither a tensor nor plain data."""

    def __repr__(self) -> str:
        return "OPAQUE"


OPAQUE = _Opaque()


@dataclass(frozen=True, slots=True)
class Join:
    """How a leaf of a batch's result is made of those of its micro-batches.

    Attributes:
        dim: the dimension along which they are concatenated; `None` if the leaf is the same for
            every micro-batch, or is known from the sizes alone.
        why: why this does not give the model's result for the whole batch; empty if it does.
        mixes: whether the reason is that the leaf mixes rows with other rows.
    """

    dim: int | None = None
    why: str = ""
    mixes: bool = False


@dataclass
class Reads:
    """What Python has read during a recording, which holds only while this stays the same.

    Attributes:
        seen: the value at every place that was read, if it is plain data; otherwise `MISSING`.
        readers: for every such place, the open module that was the first to read it.
        grad: whether gradients were enabled; `None` if that was not read.
        settings: what functions of torch such as `get_default_dtype` returned, by name.
        requires_grad: `requires_grad` of tensors of the model, by name.
        layouts: how tensors of the model lie in memory, by name.
        inputs: the properties that were read of inputs, by the number of the leaf and the
            property's name, see `penstock.capture.reads.input_property`.
        numbers: the places whose number is passed in.
        given: the leaves of the inputs that are numbers and are passed in.
        outcomes: the comparisons that were made with numbers that are passed in.
        replaced: places inside closed modules that these modules change themselves.
        aliases: for places where an object was found again, the place where it was found first;
            what is read of the object is noted under the latter.
        resting: the names of the closed modules that were called, and of modules inside them, that
            were in evaluation mode. In training mode they may draw random numbers or change
            buffers, which the recording does not show.
        set_once: for places where a first forward sets plain data once and for all, the value that
            it finds, and the value that it leaves, which is the one in `seen`.
        marks: for places that were read and that a first forward sets, the values before and after
            it. The recording holds for both, since that forward does nothing else besides.
    """

    seen: dict[Place, Any] = field(default_factory=dict)
    readers: dict[Place, str] = field(default_factory=dict, compare=False)
    grad: bool | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    requires_grad: dict[str, bool] = field(default_factory=dict)
    layouts: dict[str, Any] = field(default_factory=dict)
    inputs: dict[tuple[int, str], Any] = field(default_factory=dict)
    numbers: tuple[Place, ...] = ()
    given: tuple[int, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    replaced: frozenset[Place] = frozenset()
    aliases: dict[Place, Place] = field(default_factory=dict)
    resting: frozenset[str] = field(default=frozenset(), compare=False)
    set_once: dict[Place, tuple[Any, Any]] = field(default_factory=dict, compare=False)
    marks: dict[Place, tuple[Any, Any]] = field(default_factory=dict, compare=False)

    def with_all_of(self, other: Reads) -> Reads:
        """What either of two recordings has read; this one's values count where both have some."""
        return Reads(
            other.seen | self.seen,
            other.readers | self.readers,
            self.grad if self.grad is not None else other.grad,
            other.settings | self.settings,
            other.requires_grad | self.requires_grad,
            other.layouts | self.layouts,
            other.inputs | self.inputs,
            self.numbers,
            self.given,
            tuple(dict.fromkeys((*self.outcomes, *other.outcomes))),
            self.replaced | other.replaced,
            other.aliases | self.aliases,
            self.resting | other.resting,
            other.set_once | self.set_once,
            other.marks | self.marks,
        )

    def passed_in(self, model: nn.Module, leaves: Sequence[Any] = ()) -> dict[str, Any]:
        """The numbers as they are now, by the names under which they are passed.

        Args:
            model: has the numbers that are attributes.
            leaves: the leaves of the inputs; if empty, only the numbers in attributes are given.
        """
        found = {name_of(place): place.find(model) for place in self.numbers}
        if leaves:
            found |= {name_of(Given(k)): leaves[k] for k in self.given}
        return found

    def changed(self, model: nn.Module) -> Place | None:
        """A place whose value after the forward is not the one that was read; `None` if none."""
        for place, value in self.seen.items():
            if value is MISSING or place.last == "training" or place in self.numbers:
                continue
            if frozen(place.find(model)) != frozen(value):
                return place
        return None


@dataclass(slots=True)
class Trace:
    """One recording of a model's forward: its calls in order, inputs and outputs.

    Attributes:
        inputs: for every leaf of `(args, kwargs)` its `TensorInfo`, or the constant it was.
        input_structure: the structure of `(args, kwargs)`.
        calls: the calls, in order.
        outputs: the leaves of the model's result: `Value`s, `Size`s, `Number`s or constants.
        output_structure: the structure of the model's result.
        attributes: what is known of every parameter, buffer and plain tensor that is read by name.
        changed: the names of the buffers, and of plain tensors in attributes, that the forward
            changes, BatchNorm's statistics for instance.
        rewritten: the names of changed tensors whose memory values share, by their storage.
        decisions: the booleans that the model's Python has read off the values of its inputs, as
            results of calls. The trace holds only for inputs that give the same ones.
        questions: a trace that computes the decisions from the inputs; `None` where nothing was
            decided.
        answers: the values of the decisions.
        joins: for every leaf of the result how it is put together from micro-batches, see
            `penstock.capture.results`.
        reads: what else Python has read.
        only_at: sizes that inputs must have for the trace to hold; empty if all sizes will do.
        shared: plain objects that a forward changes, and the modules that have them.
        handed_back: the objects in the result that were arguments: the number of the leaf of
            `(args, kwargs)` by that of the leaf of the result, where objects are leaves.
    """

    inputs: tuple[Any, ...]
    input_structure: Structure | None
    calls: list[Call] = field(default_factory=list)
    outputs: tuple[Any, ...] = ()
    output_structure: Structure | None = None
    attributes: dict[Attribute, TensorInfo] = field(default_factory=dict)
    changed: tuple[str, ...] = ()
    rewritten: Mapping[int, str] = field(default_factory=dict)
    decisions: tuple[Ref, ...] = ()
    questions: Trace | None = None
    answers: tuple[bool, ...] = ()
    joins: tuple[Join, ...] = ()
    handed_back: Mapping[int, int] = field(default_factory=dict, compare=False)

    def join(self, value: Value) -> Join:
        """How a value that is a leaf of the result is put together from micro-batches."""
        return self.joins[self.outputs.index(value)]

    reads: Reads = field(default_factory=Reads)
    only_at: Sizes = field(default_factory=dict)
    shared: tuple[tuple[str, frozenset[str]], ...] = field(default=(), compare=False)

    def info(self, value: Value) -> Any:
        """The `TensorInfo` of a value (or the constant or `OPAQUE` that stands there)."""
        if isinstance(value, Attribute):
            return self.attributes[value]
        if value.call == INPUTS:
            return self.inputs[value.leaf]
        return self.calls[value.call].outputs[value.leaf]

    def largest(self, sizes: Sizes) -> int:
        """The bytes of the largest tensor that a call gives, for inputs of these sizes."""
        infos = (info for call in self.calls for info in call.outputs)
        return max((i.num_bytes(sizes) for i in infos if isinstance(i, TensorInfo)), default=0)

    @property
    def leaves_no_trace(self) -> bool:
        """Whether running the forward once more does no harm, since it only makes its result.

        It changes no buffers, attributes of modules or inputs, and draws no random numbers.
        """
        if self.changed or self.shared or any(call.random for call in self.calls):
            return False
        infos = [self.info(value) for call in self.calls for value in call.mutates]
        written = {info.storage for info in infos if isinstance(info, TensorInfo)}
        given = {info.storage for info in self.inputs if isinstance(info, TensorInfo)}
        return written.isdisjoint(given)

    def numbers(self) -> bool:
        """Whether a number that is passed in is among the calls' arguments or the outputs."""
        arguments = (leaf for c in self.calls for leaf in tree_leaves((c.args, c.kwargs)))
        return any(isinstance(leaf, Number) for leaf in chain(arguments, self.outputs))

    def pruned(self) -> Trace:
        """The trace without the functions whose results nobody uses (checks on masks, say).

        What only decisions need is in `questions` instead.
        """
        useful = self._only(_does_something)
        if not self.decisions:
            return useful
        answers = tuple(self.info(decision) for decision in self.decisions)
        questions = self.leading_to(self.decisions)
        return replace(useful, questions=questions, answers=answers)

    def leading_to(self, values: tuple[Ref, ...]) -> Trace:
        """A trace that computes these values, which are made of the inputs alone, from them."""
        structure = flatten(tuple(self.info(value) for value in values))[1]
        leading = replace(self, outputs=values, output_structure=structure)
        return leading._only(lambda call: bool(call.mutates) and self._is_of_inputs(call))

    def _is_of_inputs(self, call: Call) -> bool:
        infos = [self.info(value) for value in call.reads()]
        return all(isinstance(i, TensorInfo) and i.origin <= Origin.INPUTS for i in infos)

    def _only(self, keeps: Callable[[Call], bool]) -> Trace:
        """The trace with the calls that its outputs need, and those that `keeps` wants."""
        needed = {v.call for v in self.outputs if isinstance(v, Ref)}
        keep = []
        for number in reversed(range(len(self.calls))):
            call = self.calls[number]
            if number in needed or keeps(call):
                keep.append(number)
                needed.update(v.call for v in call.reads() if isinstance(v, Ref))
        place = {old: new for new, old in enumerate(reversed(keep))} | {INPUTS: INPUTS}

        def renumber(leaf: object) -> Any:
            return Ref(place[leaf.call], leaf.leaf) if isinstance(leaf, Ref) else leaf

        calls = [
            replace(
                call,
                args=map_leaves(renumber, call.args),
                kwargs=map_leaves(renumber, call.kwargs),
                mutates=tuple(renumber(value) for value in call.mutates),
            )
            for call in (self.calls[number] for number in reversed(keep))
        ]
        outputs = tuple(renumber(leaf) for leaf in self.outputs)
        return replace(self, calls=calls, outputs=outputs, decisions=())


def _does_something(call: Call) -> bool:
    """Whether a call does more than to give a result."""
    return bool(call.is_module or call.random or call.mutates or call.looks or call.inspected)


def function_name(function: Callable[..., Any]) -> str:
    """The name that a user would write for a torch function."""
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", str(function))
    if name in ("__get__", "__set__") and owner is not None:
        return str(getattr(owner, "__name__", name))
    return str(name)
