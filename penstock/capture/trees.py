"""Flattening of nested arguments and results, and putting them together again.

Like `torch.utils._pytree`, with what a model's forward really passes around: plain dataclasses,
slices and subclasses of the built-in containers, without registering anything process-wide.
Types that somebody else registered there (`transformers`' outputs, for one) are honoured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import cache, lru_cache
from itertools import zip_longest
from typing import Any

import torch

from penstock.capture.places import attributes_of, is_filled, slots_of
from penstock.torch_internals import pytree


class Leaf:
    """Base of the types that stand for a leaf, whatever they look like inside."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
    """The shape of a nested value, without its leaves.

    Attributes:
        build: puts the children together again.
        keys: how each child is reached from the parent: `("item", key)`, `("attribute", name)`,
            or `None` where only flattening reaches it.
        children: their structures; `None` marks a leaf.
        kind: the container's type.
        same_kind: what equal structures have in common: the type; for a named tuple its names and
            fields, as some models make the class anew at every call.
    """

    kind: type = dataclasses.field(compare=False)
    same_kind: Any = dataclasses.field(repr=False)
    keys: tuple[tuple[str, Any] | None, ...]
    children: tuple[Structure | None, ...]
    build: Callable[[list[Any]], Any] = dataclasses.field(compare=False, repr=False)

    @property
    def is_object(self) -> bool:
        """Whether it is an object of a plain class, which was opened."""
        kind = self.kind
        return not (
            kind in pytree.SUPPORTED_NODES
            or kind is slice
            or issubclass(kind, (tuple, list, dict))
            or dataclasses.is_dataclass(kind)
        )

    @property
    def is_builtin(self) -> bool:
        """Whether the container is a literal of the language: tuple, list, dict or slice."""
        return self.kind in (tuple, list, dict, slice)


@dataclasses.dataclass(frozen=True, slots=True)
class _Rebuild:
    """Rebuilds one kind of container; a class and not a closure, so that it can be pickled."""

    kind: type
    context: Any = None

    def __call__(self, children: list[Any]) -> Any:
        if self.kind in (tuple, list):
            return self.kind(children)
        if self.kind is slice:
            return slice(*children)
        if self.kind is dict:
            return dict(zip(self.context, children, strict=True))
        registered = pytree.SUPPORTED_NODES.get(self.kind)
        if registered is not None:
            return registered.unflatten_fn(children, self.context)
        if issubclass(self.kind, tuple):
            return self.kind._make(children)  # type: ignore[attr-defined]  # not by its own __new__
        return _rebuild_dataclass(self.kind, dict(zip(self.context, children, strict=True)))


def _rebuild_dataclass(kind: type, values: dict[str, Any]) -> Any:
    # Not by the constructor: it may have side effects, or no such names.
    result: Any = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(result, name, value)
    return result


_ATOMS = frozenset((int, float, bool, str, type(None), torch.Tensor, torch.nn.Parameter))
_MOST_KINDS = 4096
_Level = tuple[list[Any], tuple[tuple[str, Any] | None, ...], _Rebuild]


@lru_cache(_MOST_KINDS)
def _is_leaf(kind: type) -> bool:
    """Whether values of this type are leaves, whatever is registered."""
    return kind in _ATOMS or issubclass(kind, (Leaf, torch.Tensor))


def _open(value: Any) -> _Level | None:
    """The children of `value`, how each is reached, and how to rebuild; `None` for a leaf."""
    kind: Any = type(value)
    if _is_leaf(kind):
        return None
    kind = tuple if isinstance(value, torch.Size) else type(value)
    if kind in (tuple, list):
        return list(value), _items(len(value)), _Rebuild(kind)
    if kind is dict:
        keys = list(value)
        return [value[k] for k in keys], tuple(("item", k) for k in keys), _Rebuild(dict, keys)
    if kind is slice:
        parts = [("attribute", name) for name in ("start", "stop", "step")]
        return [value.start, value.stop, value.step], tuple(parts), _Rebuild(slice)
    if kind in pytree.SUPPORTED_NODES:
        return _open_registered(value, kind)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return list(value), _items(len(value)), _Rebuild(kind)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        slots = (slot.__name__ for slot in slots_of(kind) if is_filled(slot, value))
        names = [*slots, *attributes_of(value)]
        children = [getattr(value, name) for name in names]
        return children, tuple(("attribute", n) for n in names), _Rebuild(kind, names)
    return None


def _open_registered(value: object, kind: type) -> _Level:
    children, context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
    keys: tuple[tuple[str, Any] | None, ...] = (None,) * len(children)
    if isinstance(value, dict) and len(value) == len(children):
        same = all(child is value[k] for k, child in zip(value, children, strict=True))
        keys = tuple(("item", k) for k in value) if same else keys
    elif isinstance(value, (tuple, list)):
        keys = tuple(("item", i) for i in range(len(children)))
    return list(children), keys, _Rebuild(kind, context)


def flatten(tree: object) -> tuple[list[Any], Structure | None]:
    """The leaves of `tree` from left to right, and its structure (`None` when it is a leaf)."""
    leaves: list[Any] = []
    return leaves, _flatten(tree, leaves, _open)


def tree_leaves(tree: object) -> list[Any]:
    """The leaves alone, as `flatten` gives them, which is quicker without the structure."""
    leaves: list[Any] = []
    _collect(tree, leaves)
    return leaves


def flatten_result(
    tree: object, opens: Callable[[object], bool] | None = None
) -> tuple[list[Any], Structure | None]:
    """Like `flatten`, for what a model returns: objects that hold tensors are opened as well.

    Such are the caches of keys and values that language models return. They are put together again
    from their attributes, as new objects. So arguments may be flattened like this only if what the
    forward makes of them is taken from its result, as with states. An object that occurs twice is
    opened once, and is a leaf after that: two new objects would not be the same one.

    Args:
        tree: the result.
        opens: says which objects are opened; by default those that hold tensors, see
            `holds_tensors`.
    """
    leaves: list[Any] = []
    opened: dict[int, object] = {}
    inner: dict[int, object] = {}  # what those hold, with tensors or without

    def level_of(value: Any) -> _Level | None:
        level = _open(value)
        if level is not None or id(value) in opened or not _is_object(value):
            return level
        if id(value) not in inner and not (opens or holds_tensors)(value):
            return None
        opened[id(value)] = value
        inner.update((id(part), part) for part in parts_of(value))
        return _open_object(value)

    return leaves, _flatten(tree, leaves, level_of)


def unopened(tree: object) -> tuple[list[Any], Structure | None]:
    """As `flatten_result`, with objects as leaves."""
    return flatten_result(tree, lambda value: False)


def handed_back(result: object, given: object) -> dict[int, int]:
    """The objects of plain classes in a result that were given, the very same ones.

    Args:
        result: the result of a forward.
        given: its arguments.

    Returns:
        for the number of the leaf in the result that in `given`, as `unopened` lists leaves.
    """
    places = {id(leaf): k for k, leaf in enumerate(unopened(given)[0]) if _is_object(leaf)}
    leaves = unopened(result)[0]
    return {k: places[id(leaf)] for k, leaf in enumerate(leaves) if id(leaf) in places}


def leaves_of(tree: object, structure: Structure | None) -> list[Any]:
    """The leaves of another result; objects are opened where this structure has opened them."""
    level = _open(tree)
    if level is None and structure is not None and type(tree) is structure.kind:
        level = _open_object(tree)
    if level is None:
        return [tree]
    known = structure.children if structure is not None else ()
    each = zip_longest(level[0], known[: len(level[0])])
    return [leaf for child, inner in each for leaf in leaves_of(child, inner)]


def _flatten(
    tree: object, leaves: list[Any], level_of: Callable[[Any], _Level | None]
) -> Structure | None:
    kind: Any = type(tree)
    if kind is tuple or kind is list:  # most are
        inner = tuple([_flatten(child, leaves, level_of) for child in tree])  # type: ignore[attr-defined]
        if any(inner):
            return Structure(kind, kind, _items(len(inner)), inner, _Rebuild(kind))
        return _of_leaves(kind, len(inner))
    if kind is dict and not tree:  # keyword arguments of most calls
        return _NO_ENTRIES
    level = None if _is_leaf(kind) else level_of(tree)
    if level is None:
        leaves.append(tree)
        return None
    children, keys, build = level
    inner = tuple([_flatten(child, leaves, level_of) for child in children])
    return Structure(build.kind, _said_of(build.kind), keys, inner, build)


def _collect(tree: object, leaves: list[Any]) -> None:
    kind: Any = type(tree)
    if _is_leaf(kind):
        leaves.append(tree)
    elif kind is tuple or kind is list:  # most are
        for child in tree:  # type: ignore[attr-defined]
            _collect(child, leaves)
    elif kind is dict:
        for child in tree.values():  # type: ignore[attr-defined]
            _collect(child, leaves)
    elif (level := _open(tree)) is not None:
        for child in level[0]:
            _collect(child, leaves)
    else:
        leaves.append(tree)


_NO_ENTRIES = Structure(dict, dict, (), (), _Rebuild(dict, ()))


@cache
def _items(count: int) -> tuple[tuple[str, int], ...]:
    """How the entries of a tuple or list are reached."""
    return tuple(("item", i) for i in range(count))


@cache
def _of_leaves(kind: type, count: int) -> Structure:
    """The structure of a tuple or list of so many leaves."""
    return Structure(kind, kind, _items(count), (None,) * count, _Rebuild(kind))


def _open_object(value: object) -> _Level:
    names = list(vars(value))
    keys = tuple(("attribute", name) for name in names)
    return list(vars(value).values()), keys, _Rebuild(type(value), names)


def is_plain_object(value: object) -> bool:
    """Whether it is an object of a plain class, and attributes say all of it.

    Such are the caches that a model's forward fills: empty at first, later with tensors in them.
    """
    return _is_object(value) and _is_tree(value, {})


def holds_tensors(value: object) -> bool:
    """Whether it is an object of a plain class that holds tensors, and attributes say all of it."""
    return bool(parts_of(value))


def parts_of(value: object) -> list[object]:
    """An object and all that it holds, if there are tensors in it and attributes say all of it.

    The list is empty otherwise: if a list or an object occurs twice in it, if a function or a
    method is in it, which may know the object itself, or a `torch.Size`, which would become a
    tuple.
    """
    seen: dict[int, object] = {}
    is_tree = _is_object(value) and _is_tree(value, seen)
    has_tensors = is_tree and any(isinstance(part, torch.Tensor) for part in seen.values())
    return list(seen.values()) if has_tensors else []


def _is_tree(value: object, seen: dict[int, object]) -> bool:
    """Whether all that is in a value is data that occurs once; tensors may occur twice.

    What is in it is added to `seen`, by id.
    """
    if isinstance(value, torch.Tensor):
        seen[id(value)] = value
        return True
    if isinstance(value, torch.Size) or (callable(value) and not isinstance(value, type)):
        return False
    level = _open(value) or (_open_object(value) if _is_object(value) else None)
    if level is None:
        return True
    if not isinstance(value, tuple):  # of which nothing can be changed
        if id(value) in seen:
            return False
        seen[id(value)] = value
    return all(_is_tree(child, seen) for child in level[0])


def _is_object(value: object) -> bool:
    """Whether attributes are all that there is to it."""
    kind = type(value)
    return (
        kind not in _ATOMS
        and not isinstance(value, (Leaf, torch.Tensor, torch.nn.Module, type, Enum))
        and not callable(value)
        and kind.__new__ is object.__new__  # not a list, dict, number or the like
        and not any(vars(base).get("__slots__") for base in kind.__mro__)
        and hasattr(value, "__dict__")
    )


def _said_of(kind: type) -> Any:
    """A named tuple's name, fields and bases; of any other type itself."""
    if not issubclass(kind, tuple) or not hasattr(kind, "_fields"):
        return kind
    bases = tuple(_said_of(base) for base in kind.__bases__)
    return kind.__module__, kind.__qualname__, kind._fields, bases


def unflatten(structure: Structure | None, leaves: Sequence[Any]) -> Any:
    """The tree of this structure with these leaves."""
    remaining = iter(leaves)
    return _unflatten(structure, remaining)


def _unflatten(structure: Structure | None, leaves: Iterator[Any]) -> Any:
    if structure is None:
        return next(leaves)
    return structure.build([_unflatten(child, leaves) for child in structure.children])


def map_leaves(function: Callable[[Any], Any], tree: object) -> Any:
    """`tree` with `function` applied to every leaf, from left to right."""
    kind: Any = type(tree)
    if _is_leaf(kind):
        return function(tree)
    if kind is tuple or kind is list:  # most are
        return kind([map_leaves(function, child) for child in tree])  # type: ignore
    if kind is dict:
        return {key: map_leaves(function, child) for key, child in tree.items()}  # type: ignore
    level = _open(tree)
    if level is None:
        return function(tree)
    children, _, build = level
    return build([map_leaves(function, child) for child in children])


def leaf_paths(structure: Structure | None) -> list[tuple[tuple[str, Any] | None, ...]]:
    """For every leaf, the keys that lead to it from the root."""
    if structure is None:
        return [()]
    return [
        (key, *rest)
        for key, child in zip(structure.keys, structure.children, strict=True)
        for rest in leaf_paths(child)
    ]


def leaves_in_objects(structure: Structure | None) -> list[int]:
    """The leaves of a result that are in objects of plain classes."""
    found: list[int] = []
    count = 0

    def look(structure: Structure | None, inside: bool) -> None:
        nonlocal count
        if structure is None:
            if inside:
                found.append(count)
            count += 1
            return
        inside = inside or structure.is_object
        for child in structure.children:
            look(child, inside)

    look(structure, False)
    return found


def without_history(leaf: object) -> Any:
    """A tensor detached from its autograd graph, in the same memory; anything else as it is."""
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def cloned(leaf: object) -> Any:
    """A tensor in memory of its own, still in its autograd graph; anything else as it is."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def versions(containers: object) -> list[int]:
    """How often each of the tensors in these containers was written to, as far as torch counts."""
    tensors = [leaf for leaf in tree_leaves(containers) if isinstance(leaf, torch.Tensor)]
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
