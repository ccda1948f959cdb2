"""A model's forward, run and recorded on its inputs at chosen sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from penstock.capture.calls import Changed, Reads, Sizes, Trace, Unrecordable
from penstock.capture.dims import Varying
from penstock.capture.equality import same
from penstock.capture.first_forward import first_forward
from penstock.capture.meta import NoSavedTensors, held_on_meta
from penstock.capture.numbers import Numeric, Where
from penstock.capture.opening import Opening
from penstock.capture.places import MISSING, Place
from penstock.capture.preserve import Parameters, untouched
from penstock.capture.randomness import Key
from penstock.capture.reads import input_property
from penstock.capture.recorder import record
from penstock.capture.trees import Structure, leaves_of, unflatten, without_history

KEY = Key(0, 0, 0)
"""The key that seeds the random numbers of recordings, unless another one is given."""

T = TypeVar("T")


class Forward:
    """The forward of a model on inputs like given ones.

    Args:
        model: the model; its training flags and attributes are restored by the caller.
        leaves: the leaves of the inputs.
        structure: the structure of the inputs.
        varying: which sizes of the inputs vary.
        opening: which modules are open.
        as_it_is: whether training flags stay as they are, and inputs require gradients where those
            given do.
        open_leaves: the indices of leaves that are numbers and have other values in other calls.

    Attributes:
        parameters: notes which parameters are written; `None` if that is not needed.
        numbers: the numbers in attributes and arguments that are passed in, by place.
        first_helped: whether the model's first forward has left marks that later forwards do not
            change; `None` if that was not tried.
    """

    def __init__(
        self,
        model: nn.Module,
        leaves: list[Any],
        structure: Structure | None,
        varying: Varying,
        opening: Opening,
        as_it_is: bool = False,
        open_leaves: Sequence[int] = (),
    ) -> None:
        self.model = model
        self.leaves = leaves
        self.structure = structure
        self.varying = varying
        self.opening = opening
        self.as_it_is = as_it_is
        self.open_leaves = open_leaves
        self.parameters: Parameters | None = None
        self.numbers: Mapping[Where, Numeric] = {}
        self.first_helped: bool | None = None
        self._marks: dict[Place, tuple[Any, Any]] = {}  # values before and after the first forward
        self._set_once: dict[Place, tuple[Any, Any]] = {}  # before and after the first forward
        self._read_first: list[Reads] = []  # what forwards that set something once have read

    def of_row(self, row: int) -> Forward:
        """The same forward on inputs whose rows all equal this row of the given ones."""
        other = copy.copy(self)
        other.leaves = self.varying.one_row(self.leaves, row)
        return other

    def first_forward(self, sizes: Sizes) -> bool:
        """Run the forward a first time, and keep the marks that it leaves, see `first_forward`.

        Returns:
            whether that helps, so that the forward is worth recording again; `False` if it was
            tried before.
        """
        if self.first_helped is None:
            args, kwargs = self._batch(sizes)
            flags = [module.training for module in self.model.modules()]
            self.model.eval()
            before = {path: dict(vars(m)) for path, m in self.model.named_modules()}
            self.first_helped = first_forward(self.model, lambda: self.model(*args, **kwargs))
            for path, module in self.model.named_modules():
                for name, value in vars(module).items():
                    old = before.get(path, vars(module)).get(
                        name, getattr(type(module), name, MISSING)
                    )
                    if value is not old:
                        self._marks[Place(path, (name,))] = old, value
            for module, flag in zip(self.model.modules(), flags, strict=True):
                module.training = flag
            return self.first_helped
        return False

    def record(
        self,
        sizes: Sizes,
        training: bool,
        key: Key = KEY,
        strict: bool = True,
        shapes: bool = False,
    ) -> tuple[Trace, list[Any]]:
        """A recording at these sizes, and the leaves of its result.

        Where the forward sets plain data of an object once and for all, and does nothing else the
        first time, the recording is one of a later time. (transformers' classifiers note in their
        configuration what kind of labels they get, when they get the first.)

        Args:
            sizes: the sizes of the inputs.
            training: whether in training mode, see `set_mode`.
            key: seeds the random numbers.
            strict: whether open modules must leave their attributes alone.
            shapes: whether to work out shapes alone. Nothing that weights enter is computed then,
                so the recording does not show what is drawn or written.
        """
        try:
            found = self._recorded(sizes, training, key, strict, shapes)
        except Changed as problem:
            place, before = problem.place, problem.before
            can_be_set = problem.is_plain and place.can_be_put(self.model)
            if not can_be_set or place in self._set_once or self.numbers:
                raise
            first = self._recorded(sizes, training, key, False, shapes)
            place.put(self.model, problem.after)
            self._set_once[place] = before, problem.after
            try:
                found = self.record(sizes, training, key, strict, shapes)
                if not _do_the_same(first, found):
                    raise problem
            except BaseException:
                place.put(self.model, before)
                del self._set_once[place]
                raise
            self._read_first.append(first[0].reads)
        for reads in self._read_first:  # what it has set may depend on them
            found[0].reads = found[0].reads.with_all_of(reads)
        set_once = {p: v for p, v in self._set_once.items() if p in found[0].reads.seen}
        found[0].reads.set_once = set_once
        return found

    def _recorded(
        self, sizes: Sizes, training: bool, key: Key, strict: bool, shapes: bool
    ) -> tuple[Trace, list[Any]]:
        """One recording of the model as it is now; arguments are those of `record`.

        Raises:
            Unrecordable: also `Changed`, if its forward sets plain data that it has read.
        """

        def recorded() -> tuple[Trace, list[Any]]:
            args, kwargs = self._batch(sizes)
            self.set_mode(training)
            with held_on_meta(self.model) if shapes else nullcontext():
                trace, result = record(
                    *(self.model, self.opening.is_open, args, kwargs, key),
                    strict=strict,
                    numbers=self.numbers,
                    like=self.structure,
                    sized=self.opening.sized,
                    functions=self.opening.functions,
                )
                trace.reads.resting = _resting(self.model, trace)
            leaves = leaves_of(result, trace.output_structure)
            return trace, [without_history(leaf) for leaf in leaves]

        trace, results = self.without_saving(recorded)
        for mark, values in self._marks.items():
            if trace.reads.seen.pop(mark, MISSING) is not MISSING:
                trace.reads.marks[mark] = values
        for k in set(self.open_leaves).difference(trace.reads.given):
            trace.reads.inputs[k, "value"] = input_property(self.leaves[k], "value")
        if strict and (place := trace.reads.changed(self.model)) is not None:
            raise Unrecordable(trace.reads.readers[place], f"the forward changes {place}, it reads")
        return trace, results

    def without_saving(self, forward: Callable[[], T]) -> T:
        """Run a forward that saves nothing for a backward, unless it computes gradients itself."""
        if not self.opening.saves:
            hooks = NoSavedTensors()
            try:
                with untouched(self.model, self.parameters), hooks:
                    result = forward()
                if not hooks.was_needed:
                    return result
            except Exception as error:
                if not (hooks.was_needed or "support saved tensor hooks" in str(error)):
                    raise  # the text is that of `torch.func`, which refuses such hooks
            self.opening.saves = True
        with untouched(self.model, self.parameters):
            return forward()

    def set_mode(self, training: bool) -> None:
        """Put the model into training or evaluation mode, unless it is to stay `as_it_is`.

        A model in training mode is not touched by `training=True`, so that submodules which the
        user has put into evaluation mode stay there.
        """
        if self.as_it_is:
            return
        if not training or not self.model.training:
            self.model.train(training)

    def _batch(self, sizes: Sizes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        batch: tuple[tuple[Any, ...], dict[str, Any]] = unflatten(
            self.structure, self._inputs(sizes)
        )
        return batch

    def _inputs(self, sizes: Sizes) -> list[Any]:
        """The leaves of inputs that are this large, which require gradients as those given do."""
        leaves = self.varying.resized(self.leaves, sizes)
        for leaf, given in zip(leaves, self.leaves, strict=True):
            if self.as_it_is and isinstance(given, torch.Tensor) and given.requires_grad:
                leaf.requires_grad_()
        return leaves


def _do_the_same(one: tuple[Trace, Sequence[Any]], other: tuple[Trace, Sequence[Any]]) -> bool:
    """Whether two recordings have the same calls, and give and change the same."""
    (mine, results), (theirs, others) = one, other
    calls = mine.calls == theirs.calls and mine.changed == theirs.changed
    same_structure = mine.output_structure == theirs.output_structure
    alike = calls and same_structure and mine.outputs == theirs.outputs
    return alike and len(results) == len(others) and all(map(same, results, others))


def _resting(model: nn.Module, trace: Trace) -> frozenset[str]:
    """The closed modules called, and modules in them, that are in evaluation mode, by name."""
    called = {str(call.target) for call in trace.calls if call.is_module}
    return frozenset(
        name
        for target in called
        for name, module in model.get_submodule(target).named_modules(prefix=target)
        if not module.training
    )
