"""The signatures that a program is called with: which arguments, and what is no tensor in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from penstock.capture.calls import Origin, Size, TensorInfo
from penstock.capture.dims import Axis, Varying
from penstock.capture.equality import same
from penstock.capture.numbers import Numeric
from penstock.capture.trees import (
    Structure,
    flatten,
    flatten_result,
    is_plain_object,
    leaf_paths,
    unflatten,
)
from penstock.errors import InputError

MOST = 32
"""The largest number of signatures that a program may be called with."""


@dataclass(frozen=True)
class Signature:
    """How a program can be called.

    Attributes:
        structure: the structure of `(args, kwargs)`.
        inputs: for every leaf its `TensorInfo`, or the constant that it is.
        varying: which dimensions of the inputs vary.
        numbers: the leaves that may be any number of their type, each with an earlier value.
        in_session: whether it belongs to calls in a session, whose inputs are longer every time.
    """

    structure: Structure | None
    inputs: tuple[Any, ...]
    varying: Varying
    numbers: Mapping[int, Numeric] = field(default_factory=dict)
    in_session: bool = False

    def is_of(self, leaves: Sequence[Any], structure: Structure | None) -> bool:
        """Whether inputs have this signature, but for the sizes and types of their tensors."""
        return structure == self.structure and all(
            _is_like(leaf, known) or (self._may_be_any(k) and type(leaf) is type(known))
            for k, (leaf, known) in enumerate(zip(leaves, self.inputs, strict=True))
        )

    def _may_be_any(self, leaf: int) -> bool:
        return leaf in self.numbers or leaf in self.varying.numbers

    def takes(self, leaves: Sequence[Any], structure: Structure | None) -> bool:
        """Whether inputs have this signature, and their tensors the types and sizes that it has."""
        if not self.is_of(leaves, structure):
            return False
        for leaf, expected, axes in zip(leaves, self.inputs, self.varying.axes, strict=True):
            if isinstance(expected, TensorInfo) and _mismatch(leaf, expected, axes)[0]:
                return False
        return self.varying.agrees(leaves)

    def other_number(self, leaf: int, now: object) -> Numeric:
        """A number that this leaf was earlier, and that is not `now`."""
        return self.numbers[leaf] if self.numbers[leaf] != now else self.inputs[leaf]

    def other_numbers(
        self, leaves: Sequence[Any], structure: Structure | None
    ) -> dict[int, Numeric]:
        """The numbers in which inputs differ from this signature, if nothing else differs.

        Returns:
            for these leaves the numbers that the signature has; empty if the inputs differ
            otherwise.
        """
        if structure != self.structure:
            return {}
        found: dict[int, Numeric] = {}
        for k, (leaf, known) in enumerate(zip(leaves, self.inputs, strict=True)):
            if not _is_like(leaf, known):
                if type(leaf) not in (int, float) or type(leaf) is not type(known):
                    return {}
                found[k] = known
        return found

    def check(self, leaves: Sequence[Any], may_vary: str) -> None:
        """Raise unless tensors are of the types and sizes that they were recorded with.

        Args:
            leaves: the leaves of inputs that have this signature.
            may_vary: words for the message that say which sizes may vary.

        Raises:
            InputError: another dtype, rank or feature size; or sizes that do not fit together.
        """
        for k, (leaf, expected) in enumerate(zip(leaves, self.inputs, strict=True)):
            if isinstance(expected, TensorInfo):
                problem, axis = _mismatch(leaf, expected, self.varying.axes[k])
                if problem:
                    hint = "" if axis is None else f": {self._varied(k, axis)}"
                    raise InputError(
                        f"input {k} of the batch {problem}; the example that was captured had "
                        f"{expected}. Only {may_vary} may vary{hint}"
                    )
        self.varying.sizes(leaves)

    def _varied(self, leaf: int, axis: int) -> str:
        """What to write for a dimension of this leaf that is to vary."""
        _, key, *_ = leaf_paths(self.structure)[leaf]
        name = key[1] if key else leaf
        return f'Pipeline(dynamic={{{name!r}: {{{axis}: "length"}}}}) lets this one vary'

    def __str__(self) -> str:
        args, kwargs = unflatten(self.structure, [str(i) for i in self.inputs])
        return _listed(args, kwargs)


class Inputs(list[Any]):
    """The leaves of a batch or a micro-batch, and the signature that they have.

    Attributes:
        signature: the signature of the leaves.
        with_values: gives the same leaves with the elements of all of them, also of those that are
            with workers.
    """

    def __init__(
        self,
        leaves: Iterable[Any],
        signature: Signature,
        with_values: Callable[[list[Any]], list[Any]] = list,
    ) -> None:
        super().__init__(leaves)
        self.signature = signature
        self.with_values = with_values

    def __reduce__(self) -> Any:
        return type(self), (list(self), self.signature)


class Signatures:
    """The signatures that a program was called with.

    Args:
        first: the example's signature.
        varying_of: gives what varies in arguments.

    Attributes:
        first: the example's signature.
    """

    def __init__(
        self, first: Signature, varying_of: Callable[[Sequence[Any], Mapping[str, Any]], Varying]
    ) -> None:
        self.first = first
        self._known = [first]
        self._varying_of = varying_of

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Inputs:
        """The leaves of a batch, with their signature; a new one if there is none.

        Raises:
            InputError: tensors do not fit the signature; or it is one too many.
        """
        leaves, structure = flatten((tuple(args), dict(kwargs)))
        signature = self._of(leaves, structure)
        if signature is None:
            try:
                varying = self._varying_of(args, kwargs)
                infos = tuple(map(_info, leaves, varying.axes))
                numbers = self._numbers(leaves, structure)
                signature = Signature(structure, infos, varying, numbers)
            except InputError as error:
                raise InputError(f"{self.unlike(args, kwargs)}: {error}") from None
            signature.check(leaves, self._may_vary())
            return Inputs(leaves, self.add(signature))
        signature.check(leaves, self._may_vary())
        return Inputs(leaves, signature)

    def flatten_with_states(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        varying_of: Callable[[Sequence[Any], Structure | None], Varying],
        with_values: Callable[[list[Any]], list[Any]],
    ) -> Inputs:
        """The leaves of arguments among which are states, with their signature.

        Objects of plain classes are opened, as the forward's result has what it makes of them.

        Args:
            args, kwargs: the arguments.
            varying_of: gives what varies in the leaves, if they have no known signature.
            with_values: see `Inputs`.

        Raises:
            InputError: they have no rows; or it is one signature too many.
        """
        leaves, structure = flatten_result((tuple(args), dict(kwargs)), is_plain_object)
        for known in reversed(self._known):
            if known.takes(leaves, structure):
                return Inputs(leaves, known, with_values)
        varying = varying_of(leaves, structure)
        infos = tuple(map(_info, leaves, varying.axes))
        signature = Signature(structure, infos, varying, in_session=True)
        signature.check(leaves, self._may_vary())
        return Inputs(leaves, self.add(signature), with_values)

    def __len__(self) -> int:
        return len(self._known)

    def knows(self, leaves: Sequence[Any], structure: Structure | None) -> bool:
        """Whether the program was called with inputs of this structure, and of these sizes."""
        return any(known.takes(leaves, structure) for known in self._known)

    def of(self, leaves: Sequence[Any]) -> Signature:
        """The signature of these leaves; the example's if they do not say which they have.

        One that is not known here comes from another rank: one that fits is taken for it, or it is
        added.
        """
        signature = leaves.signature if isinstance(leaves, Inputs) else self._known[0]
        if any(known is signature for known in self._known):
            return signature
        if signature.in_session:  # others with its structure may have sizes that grow otherwise
            known = next((known for known in self._known if known == signature), None)
        else:
            known = self._of(leaves, signature.structure)
        return known or self.add(signature)  # it comes from another rank

    def inputs(self, leaves: Sequence[Any]) -> Inputs:
        """These leaves with their signature; the example's where nothing is known of them."""
        return leaves if isinstance(leaves, Inputs) else Inputs(leaves, self.first)

    def add(self, signature: Signature) -> Signature:
        """Add a signature, and return it.

        Raises:
            InputError: there are `MOST` already.
        """
        if len(self._known) >= MOST:
            raise InputError(
                f"the pipeline was called with {MOST} signatures, which differ in their arguments "
                f"or in plain values, and now with {signature}. Each is recorded separately: give "
                "what changes at every call as a tensor"
            )
        self._known.append(signature)
        return signature

    def forget(self, signature: Signature) -> None:
        """Drop a signature whose recording failed; the first one always stays."""
        if signature in self._known[1:]:
            self._known.remove(signature)

    def unlike(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """How arguments differ from the example's, in words."""
        kinds = [type(a).__name__ for a in args], {k: type(v).__name__ for k, v in kwargs.items()}
        return (
            f"the batch has another structure than the example: {_listed(*kinds)}, but the example "
            f"was captured with {self._known[0]}{_unpacked(args, kwargs)}"
        )

    def _of(self, leaves: Sequence[Any], structure: Structure | None) -> Signature | None:
        return next((s for s in self._known if s.is_of(leaves, structure)), None)

    def _numbers(self, leaves: Sequence[Any], structure: Structure | None) -> dict[int, Numeric]:
        """The numbers in which inputs differ from some that were given before."""
        for known in self._known:
            if found := known.other_numbers(leaves, structure):
                return {**known.numbers, **found}
        return {}

    def _may_vary(self) -> str:
        _, *others = self._known[0].varying.names
        if others:
            return f"the batch size (B) and {', '.join(others)}"
        return "the batch size (B), and dimensions that dynamic= names,"


def _info(leaf: object, axes: Mapping[int, Axis]) -> Any:
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:  # the caller may write to it
        return leaf.copy()
    if not isinstance(leaf, torch.Tensor):
        return leaf
    shape: list[int | Size] = list(leaf.shape)
    for dim, axis in axes.items():
        shape[dim] = axis.size
    return TensorInfo(tuple(shape), leaf.dtype, False, 0, Origin.INPUTS)


def _is_like(leaf: object, known: object) -> bool:
    return _kind(leaf) == _kind(known) and (_kind(leaf) is not None or same(leaf, known))


def _kind(leaf: object) -> str | None:
    """What sort of tensor a leaf is; `None` if it is none."""
    if isinstance(leaf, torch.Tensor):
        return "tensor" if leaf.ndim else "scalar"
    return ("tensor" if leaf.shape else "scalar") if isinstance(leaf, TensorInfo) else None


def _mismatch(
    leaf: torch.Tensor, expected: TensorInfo, axes: Mapping[int, Axis]
) -> tuple[str, int | None]:
    """How a tensor differs from what was captured, or an empty string; in which dimension."""
    if leaf.is_nested:
        return "is a nested tensor (torch.nested.to_padded_tensor(x, 0.0) pads it)", None
    if leaf.dtype != expected.dtype:
        return f"has dtype {leaf.dtype}", None
    if leaf.ndim != len(expected.shape):
        return f"has {leaf.ndim} dimensions, of shape {tuple(leaf.shape)}", None
    for axis, (n, wanted) in enumerate(zip(leaf.shape, expected.shape, strict=True)):
        if axis not in axes and n != wanted:
            shape = tuple(leaf.shape)
            return f"has shape {shape}, {n} instead of {wanted} in dimension {axis}", axis
    return "", None


def _listed(args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
    return f"({', '.join([*map(str, args), *(f'{k}={v}' for k, v in kwargs.items())])})"


def _unpacked(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """A hint for who gives a batch as it comes from a data loader."""
    if len(args) == 1 and not kwargs and isinstance(args[0], (tuple, list)):
        return " (a batch that is a tuple is unpacked by *batch)"
    if len(args) == 1 and not kwargs and isinstance(args[0], Mapping):
        return " (a batch that is a dict is unpacked by **batch)"
    return ""
