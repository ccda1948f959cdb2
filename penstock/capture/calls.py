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
        why: in words.
        within: the plain function whose Python does it, and that may be closed in place of the
            module.
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
    """The forward of the open module `path` changes what it reads of an object.

    Attributes:
        place: where.
        before: what it has read there; `MISSING` if there was nothing, or no plain data.
        after: what is there at its end.
        is_plain: whether both are plain data.
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
    """The leaves of inputs that these values are, which enter a program at its beginning."""
    return [leaves[value.leaf] for value in values if isinstance(value, Ref)]


GRADIENT = -1
"""Stands for whether a tensor requires a gradient, where its dimensions are listed."""

ROWS = "B"
"""The name of the dimension that micro-batches are split along."""

Sizes = Mapping[str, int]
"""How large everything is that varies in the inputs: the rows, and what the user has named."""


@dataclass(frozen=True, slots=True)
class Size(Leaf):
    """A whole number that grows with what varies in the inputs: a sum of products, `2B·length+1`.

    Attributes:
        terms: every product's factor, and the names that are multiplied; none for a constant.
        kind: whether Python has it as an `int`, or as a `float`, to divide by for instance.
    """

    terms: tuple[tuple[int, tuple[str, ...]], ...]
    kind: type[int] | type[float] = field(default=int, repr=False)  # fingerprints stay

    def at(self, sizes: Sizes) -> Any:
        """The number, of its kind, for inputs that are this large."""
        return self.kind(
            sum(factor * prod(sizes[n] for n in names) for factor, names in self.terms)
        )

    def grows_with(self, name: str) -> bool:
        """Whether it is another integer for another number of these."""
        return any(name in names for _, names in self.terms)

    def __str__(self) -> str:
        text = "+".join(map(_term, *zip(*self.terms, strict=True))).replace("+-", "-")
        return text if self.kind is int else f"float({text})"


def _term(factor: int, names: tuple[str, ...]) -> str:
    text = {1: "", -1: "-"}.get(factor, str(factor)) if names else str(factor)
    return text + "·".join(names)


@dataclass(frozen=True, slots=True)
class Irregular(Leaf):
    """A size that is no sum of products of what varies, such as that of a strided convolution.

    Attributes:
        example: what it is for the example.
    """

    example: int

    def at(self, sizes: Sizes) -> int:
        """What it is for the example, as a guess."""
        return self.example

    def grows_with(self, name: str) -> bool:
        """Whether it varies with these: never with the rows."""
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
    """What a value is made of, the most that is mixed into it."""

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
        requires_grad: whether a gradient flows to it, with the parameters as they were.
        storage: a number that tensors sharing memory have in common.
        origin: what it is made of.
        dynamic: whether its sizes may depend on values, as those of `x[x > 0]` do.
        layout: whether it is strided, or sparse in some way.
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
        grad: whether there are gradients.
        autocast: of every kind of device whether it is on, and its dtype.
        cache: whether a weight that autocast has cast is kept for its next use. Its gradients are
            summed in the lower precision then.
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
    """Those of the calling thread's modes that say what is cast, as `Ambient.casting`."""
    on = [d for d in _AUTOCAST_DEVICES if torch.is_autocast_enabled(d)]
    return tuple([(d, torch.get_autocast_dtype(d)) for d in on])


Same = tuple[tuple[int | None, bool], ...]
"""Of every tensor in a result which leaf of the arguments it is, and whether it is a view."""


@dataclass(slots=True)
class Call:
    """One recorded operation.

    Attributes:
        target: a submodule's qualified name, or the torch function itself.
        args: positional arguments; leaves are `Value`s, `Size`s or constants.
        kwargs: keyword arguments, likewise.
        path: the open module whose forward made the call.
        result: the structure of what it returns.
        outputs: for each leaf of the result its `TensorInfo`, or the leaf itself when it is plain
            data, or `OPAQUE` when it is an object that only other calls understand.
        ambient: the modes it ran under, where they differ from those the forward began with.
        random: whether it draws random numbers.
        draws_in_python: whether numpy's generator or Python's own gives some of them.
        mutates: the values that it changes in place.
        hidden: parameters and buffers inside a closed module.
        identity: a number made of its label and how often that occurred before. It seeds the
            call's random numbers, so these do not depend on what else is recorded around it.
        looks: whether a closed module looks at values, and may decide by them what it gives.
        may_size: whether it looks at some from which sizes can come; a yes or no is none.
        inspected_in: the open module whose Python has asked for a size of its result, though that
            may be another one for other values; `None` if none has.
        inspected: which sizes: the dimensions of each leaf of the result; `GRADIENT` among them
            stands for whether it requires a gradient.
        classes: of a call that looks at values, those of the tensors in its result.
        same: which leaves of `(args, kwargs)` these are, and whether they are views of others,
            where Python may ask which object a tensor is.
        by_inputs: whether these may be values of the inputs alone.
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
    _reads: tuple[Value, ...] | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def is_module(self) -> bool:
        """Whether the call is one of a closed submodule."""
        return isinstance(self.target, str)

    @property
    def may_matter(self) -> bool:
        """Whether the Python around it goes by what values may decide, beyond those of a tensor."""
        decides = self.looks and (self.result is not None or self.same is not None)
        return bool(self.inspected) or decides

    @property
    def sized_as(self) -> str | int:
        """By what a recording knows that its size depends on values: by its module, or identity."""
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
        dim: the dimension along which they follow one another; `None` where there is none, and
            the leaf is the same for every micro-batch, or is known from the sizes alone.
        why: why that does not give what the model gives for the whole batch; empty if it does.
        mixes: whether that is because rows meet other rows in it.
    """

    dim: int | None = None
    why: str = ""
    mixes: bool = False


@dataclass
class Reads:
    """What the Python of a recording has read, on which it depends that the forward is this one.

    Attributes:
        seen: what was in every place: plain data as it was, of anything else `MISSING`.
        readers: the open module that was the first to read it.
        grad: whether gradients were enabled, if that was read.
        settings: what functions of torch said of the process, `torch.get_default_dtype()` say.
        requires_grad: of parameters and other tensors of the model, by name.
        layouts: how some of them lie in memory, by name.
        inputs: what Python reads of them, by their number and the name of it, see
            `penstock.capture.reads.input_property`.
        numbers: the places whose number is passed in.
        given: the leaves of the inputs that are numbers which are passed in.
        outcomes: comparisons of those with others.
        replaced: where closed modules put other tensors or modules themselves.
        aliases: for places of objects, another one where the same object was; what is read of it
            is noted there.
        resting: the modules that were called whole, and those in them, that were in evaluation
            mode. If one is in training mode it may draw random numbers, or change buffers, which
            did not show.
        set_once: what a first forward finds in places where it sets plain data once and for all,
            and what it leaves there, which is what was `seen`.
        marks: plain data that was read and that a first forward sets: what is there before it, and
            after it. Both are as good, as it does nothing else then.
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
        """What two recordings have read that are generalised together."""
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
            model: where those in attributes are.
            leaves: of the inputs; none where only those in attributes are asked for.
        """
        found = {name_of(place): place.find(model) for place in self.numbers}
        if leaves:
            found |= {name_of(Given(k)): leaves[k] for k in self.given}
        return found

    def changed(self, model: nn.Module) -> Place | None:
        """A place where, after the forward, something else is than it has read."""
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
        calls: what happened, in order.
        outputs: the leaves of the model's result: `Value`s, `Size`s or constants.
        output_structure: the structure of the model's result.
        attributes: what is known of every parameter and buffer that is read by name.
        changed: the buffers, and plain tensors in attributes, that the forward changes,
            BatchNorm's statistics for instance.
        rewritten: the storages of those that values share, with their names.
        decisions: the results of calls that are a yes or no that the model's Python read off its
            inputs' values. It depends on them that the forward is this one.
        questions: the calls that lead from the inputs to the decisions, which are its outputs;
            `None` where nothing was decided.
        answers: what was decided.
        joins: for every leaf of the result how it is put together from micro-batches, see
            `penstock.capture.results`.
        reads: what Python has read besides, see `Reads`.
        only_at: sizes that inputs must have, where it holds for no others.
        shared: plain objects that a forward changes, and the modules that have them.
        handed_back: the objects of the result that are arguments: for the leaf of the result the
            leaf of `(args, kwargs)` that is the same object, both without opening objects.
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
        """Whether a forward could run once too often: it makes its result, and changes nothing.

        Neither buffers nor attributes of modules, nor its inputs, nor the state of random numbers.
        """
        if self.changed or self.shared or any(call.random for call in self.calls):
            return False
        infos = [self.info(value) for call in self.calls for value in call.mutates]
        written = {info.storage for info in infos if isinstance(info, TensorInfo)}
        given = {info.storage for info in self.inputs if isinstance(info, TensorInfo)}
        return written.isdisjoint(given)

    def numbers(self) -> bool:
        """Whether a number that is passed in is among its arguments or its results."""
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
        """The calls that lead from the inputs to values that are made of nothing else."""
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
