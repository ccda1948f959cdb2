"""Where a program can be cut, and what crosses there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from penstock.capture.calls import INPUTS, Attribute, Ref, Sizes, TensorInfo, Trace, Value
from penstock.capture.watching import with_owners


@dataclass(frozen=True)
class KeptInStages:
    """Which of a program's inputs and results stay with the stages that use and make them.

    Attributes:
        inputs: the leaves of the inputs.
        outputs: the leaves of the result.
    """

    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()


NOTHING = KeptInStages()


@dataclass
class Cuts:
    """What crosses each position of a trace, and at which positions it cannot be cut.

    Attributes:
        trace: the recording.
        births: the call in which a parameter or buffer is read, where that is not the first one
            that uses it.
        alike: for parameters and buffers that share the memory of others, one name for them all.
        apart: the inputs that do not enter at the beginning, but where they are first used, and
            the results that do not leave at the end.
        remembering: the names of modules that change their attributes when they are called.
    """

    trace: Trace
    births: Mapping[Attribute, int] = field(default_factory=dict)
    alike: Mapping[str, str] = field(default_factory=dict)
    apart: KeptInStages = NOTHING
    remembering: Collection[str] = ()
    _born: dict[Value, int] = field(init=False, default_factory=dict)
    _dies: dict[Value, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for k, info in enumerate(self.trace.inputs):
            if isinstance(info, TensorInfo) and k not in self.apart.inputs:
                self._born[Ref(INPUTS, k)] = INPUTS
        for number, call in enumerate(self.trace.calls):
            for value in call.reads():
                self._use(value, number)
            for leaf in range(len(call.outputs)):
                self._born[Ref(number, leaf)] = number
        for value in self.results:
            self._use(value, len(self.trace.calls))
        for attribute, number in self.births.items():
            self._born[attribute] = number

    def _use(self, value: Value, number: int) -> None:
        self._born.setdefault(value, number)  # an attribute begins where it is first read
        self._dies[value] = number

    @cached_property
    def results(self) -> tuple[Value, ...]:
        """The values that the model's result is made of, each once."""
        leaves = [v for k, v in enumerate(self.trace.outputs) if k not in self.apart.outputs]
        return tuple(dict.fromkeys(v for v in leaves if isinstance(v, (Ref, Attribute))))

    def taken(self, calls: range) -> tuple[Ref, ...]:
        """The inputs that stay with the stage that makes these calls."""
        inputs = (Ref(INPUTS, leaf) for leaf in sorted(self.apart.inputs))
        return tuple(value for value in inputs if self._born.get(value, INPUTS) in calls)

    def kept(self, calls: range) -> dict[int, Value]:
        """The leaves of the result that stay with the stage that makes these calls.

        A leaf that is an unchanged input is not among them; an input that is changed in place
        counts as made by the last call that changes it.
        """
        leaves = {k: self.trace.outputs[k] for k in sorted(self.apart.outputs)}
        return {k: value for k, value in leaves.items() if self._comes_from(value) in calls}

    def _comes_from(self, value: Value) -> int:
        """The call that makes a value; of an input that is changed in place, the last to do so."""
        if isinstance(value, Ref) and value.call != INPUTS:
            return value.call
        info = self.trace.info(value)
        return self._mutated.get(info.storage, INPUTS) if isinstance(info, TensorInfo) else INPUTS

    def boundary(self, cut: int) -> tuple[Value, ...]:
        """The values that are live across the cut before call `cut`."""
        return self._boundaries[cut]

    @cached_property
    def _boundaries(self) -> list[tuple[Value, ...]]:
        """The boundaries of all cuts, in one sweep from the inputs to the outputs."""
        cuts = range(len(self.trace.calls) + 1)
        starts: list[list[Value]] = [[] for _ in cuts]
        ends: list[list[Value]] = [[] for _ in cuts]
        for value, last in self._dies.items():
            if self._born[value] < last:
                starts[self._born[value] + 1].append(value)
                ends[last].append(value)
        live: set[Value] = set()
        found = []
        for cut in cuts:
            live.update(starts[cut])
            found.append(tuple(sorted(live, key=_order)))
            live.difference_update(ends[cut])
        return found

    def overwritten(self, cut: int) -> tuple[int, ...]:
        """The indices of the values in `boundary(cut)` that are changed in place after the cut."""
        infos = [self.trace.info(value) for value in self.boundary(cut)]
        return tuple(
            place
            for place, info in enumerate(infos)
            if isinstance(info, TensorInfo) and self._mutated.get(info.storage, -1) >= cut
        )

    def num_bytes(self, cut: int, sizes: Sizes, boundary_dtype: torch.dtype | None = None) -> int:
        """The bytes that cross the cut with every micro-batch, for inputs that are this large.

        Args:
            cut: the number of the call that comes right after the cut.
            sizes: the sizes of the inputs.
            boundary_dtype: the dtype to which wider floating-point values are cast to cross the
                cut; `None` if they are not.
        """
        values = [value for value in self.boundary(cut) if isinstance(value, Ref)]
        return self._bytes_of(values, sizes, boundary_dtype)

    def weight_bytes(
        self, cut: int, sizes: Sizes, boundary_dtype: torch.dtype | None = None
    ) -> int:
        """The bytes of the weights that cross the cut, whose gradients come back across it.

        Args:
            cut, sizes, boundary_dtype: see `num_bytes`.
        """
        values = [value for value in self.boundary(cut) if isinstance(value, Attribute)]
        return self._bytes_of(values, sizes, boundary_dtype)

    def _bytes_of(
        self, values: Sequence[Value], sizes: Sizes, boundary_dtype: torch.dtype | None
    ) -> int:
        infos = (self.trace.info(value) for value in values)
        tensors = [info for info in infos if isinstance(info, TensorInfo)]
        if boundary_dtype is not None:
            tensors = [
                replace(t, dtype=boundary_dtype)
                if t.dtype.is_floating_point and t.dtype.itemsize > boundary_dtype.itemsize
                else t
                for t in tensors
            ]
        return sum(info.num_bytes(sizes) for info in tensors)

    def forbidden(self, cut: int) -> str | None:
        """Why there can be no cut before call `cut`, or `None` if there can."""
        return self.reasons.get(cut)

    @cached_property
    def reasons(self) -> dict[int, str]:
        """Before which calls there can be no cut, and why."""
        reasons: dict[int, str] = {}
        mutated = self._mutated
        hidden, shared, written = self._hidden(), self._shared(), self._written()
        for cut in range(1, len(self.trace.calls)):
            memory: dict[int, Value] = {}
            for value in self.boundary(cut):
                reason = self._crossing(value, cut, memory, mutated)
                if reason:
                    reasons[cut] = reason
            for name, (first, last) in hidden.items():
                if first < cut <= last:
                    reasons[cut] = f"{name} is used on both sides inside closed modules"
            for name, (first, last) in shared.items():
                if first < cut <= last:
                    reasons[cut] = f"{name}, which the forward changes, is used on both sides"
            for name, (first, last) in written.items():
                if first < cut <= last:
                    reasons[cut] = f"{name} is changed in place and used on both sides"
        return reasons

    def _crossing(
        self, value: Value, cut: int, memory: dict[int, Value], mutated: dict[int, int]
    ) -> str | None:
        """Why `value` cannot cross `cut`; `memory` holds what was seen to cross with it."""
        info = self.trace.info(value)
        named = self._name(value)
        if not isinstance(info, TensorInfo):
            return f"{named} is neither a tensor nor plain data"
        change = mutated.get(info.storage, -1)
        owner = self._owners.get(info.storage)
        if owner is not None and info.storage in mutated:
            return f"{owner} is changed in place and used on both sides"
        if info.storage in self.trace.rewritten:  # the next micro-batch changes it too early
            rewritten = self.trace.rewritten[info.storage]
            return f"{named} shares the memory of {rewritten}, which every forward changes"
        # Autograd derives a view anew when its base was changed, at its next use: cut off from
        # its base, its gradient would be laid out, and added, in another order.
        if change >= cut and value != self._bases[info.storage] and info.requires_grad:
            return f"{named} is a view of memory that is changed later"
        other = memory.setdefault(info.storage, value)
        if other is value:
            return None
        if change >= cut:
            return f"{named} and {self._name(other)} share memory that is changed later"
        if any(v != self._bases[info.storage] and self._born[v] < change for v in (value, other)):
            return (
                f"{named} and {self._name(other)} share memory that was changed after one of them "
                "was made"
            )
        return None

    def _name(self, value: Value) -> str:
        """A value in words: an input, an attribute, or the result of a call."""
        if isinstance(value, Attribute) or value.call == INPUTS:
            return str(value)
        return f"the result of {self.trace.calls[value.call].label}"

    @cached_property
    def _bases(self) -> dict[int, Value]:
        """The first value in each storage; the others are views of it."""
        bases: dict[int, Value] = {}
        for value in self._born:
            info = self.trace.info(value)
            if isinstance(info, TensorInfo):
                bases.setdefault(info.storage, value)
        return bases

    @cached_property
    def _owners(self) -> dict[int, Attribute]:
        """The parameter, buffer or plain tensor that lives in a storage."""
        return {info.storage: attribute for attribute, info in self.trace.attributes.items()}

    @cached_property
    def _mutated(self) -> dict[int, int]:
        """For each storage that is changed in place, the last call that does it."""
        last: dict[int, int] = {}
        for number, call in enumerate(self.trace.calls):
            for value in call.mutates:
                info = self.trace.info(value)
                if isinstance(info, TensorInfo):
                    last[info.storage] = number
        return last

    def _shared(self) -> dict[str, tuple[int, int]]:
        """For all that forwards change but tensors, the first and last module call with it."""
        found = {}
        alone = (
            (f"what {name or 'the model'} keeps in attributes", (name,))
            for name in sorted(self.remembering)
        )
        for name, paths in (*self.trace.shared, *alone):
            inside = {owner for path in paths for owner in with_owners(path)}
            uses = [k for k, c in enumerate(self.trace.calls) if c.is_module and c.target in inside]
            if uses:
                found[name] = uses[0], uses[-1]
        return found

    def _written(self) -> dict[str, tuple[int, int]]:
        """For tensors of the model that are changed in place, the first and last call to use them.

        Every use of their memory counts, by whatever name, inside closed modules or outside.
        """
        if not self.trace.changed and not any(call.mutates for call in self.trace.calls):
            return {}
        uses: dict[str, list[int]] = {}
        written = set(map(self._one_name, self.trace.changed))
        results: dict[str, str] = {}  # the results of calls that lie in that memory
        for number, call in enumerate(self.trace.calls):
            used = {value: self._lies_in(value, results) for value in call.reads()}
            names = {results.get(name, self._one_name(name)) for name in call.hidden}
            for name in names.union(filter(None, used.values())):
                uses.setdefault(name, []).append(number)
            written.update(filter(None, (self._lies_in(v, results) for v in call.mutates)))
            infos = ((self.trace.info(value), name) for value, name in used.items() if name)
            owners = {info.storage: name for info, name in infos if isinstance(info, TensorInfo)}
            for leaf, info in enumerate(call.outputs):
                if isinstance(info, TensorInfo) and info.storage in owners:
                    results[str(Ref(number, leaf))] = owners[info.storage]
        return {name: (uses[name][0], uses[name][-1]) for name in written if name in uses}

    def _lies_in(self, value: Value, results: Mapping[str, str]) -> str | None:
        """The parameter or buffer in whose memory a value is."""
        if isinstance(value, Attribute):
            return self._one_name(value.name)
        return results.get(str(value))

    def _one_name(self, name: str) -> str:
        return self.alike.get(name, name)

    def _hidden(self) -> dict[str, tuple[int, int]]:
        """Tensors inside closed modules that several calls use: the first and the last of these.

        A tensor in a closed module that an earlier call has made or changed is named as the result
        of that call.
        """
        uses: dict[str, list[int]] = {}
        inside: set[str] = set()
        results: dict[str, str] = {}
        for number, call in enumerate(self.trace.calls):
            inside.update(call.hidden)
            read = (v.name for v in call.reads() if isinstance(v, Attribute))
            made = [Ref(number, leaf) for leaf in range(len(call.outputs))]
            results |= {str(value): self._name(value) for value in made}
            for name in {*call.hidden, *read, *map(str, made)}:
                uses.setdefault(name, []).append(number)
        return {
            results.get(n, n): (u[0], u[-1]) for n, u in uses.items() if n in inside and len(u) > 1
        }


def _order(value: Value) -> tuple[int, int, str]:
    if isinstance(value, Ref):
        return (value.call, value.leaf, "")
    return (INPUTS, 1 << 30, value.name)
