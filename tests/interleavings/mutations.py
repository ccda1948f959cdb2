"""Mistakes that are made on purpose; each has to be found."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class Mutation:
    """A module with other lines.

    Attributes:
        module: its name.
        lines: what is replaced, and by what; each is there once.
        uses: who has what of it: `package.module.name`.
        cases: in which it can be found.
        leaves_races: whether there are races for the detector; it does not see the CPU's memory.
        always: whether bits are wrong also if everything is done as soon as it is given.
    """

    module: str
    lines: Sequence[tuple[str, str]]
    uses: Sequence[str]
    cases: Sequence[str]
    leaves_races: bool = True
    always: bool = False

    @contextmanager
    def made(self) -> Iterator[None]:
        """While open, the mistake is there."""
        mutant = self._mutant()
        with ExitStack() as stack:
            for use in self.uses:
                stack.enter_context(mock.patch(use, getattr(mutant, use.rpartition(".")[2])))
            yield

    def _mutant(self) -> Any:
        source = inspect.getsource(importlib.import_module(self.module))
        for old, new in self.lines:
            if source.count(old) != 1:
                raise ValueError(f"{self.module} has {old!r} {source.count(old)} times")
            source = source.replace(old, new)
        mutant = ModuleType(self.module)
        exec(compile(source, self.module, "exec"), vars(mutant))
        return mutant


def _copies(*lines: tuple[str, str], cases: Sequence[str], leaves_races: bool = True) -> Mutation:
    uses = ["penstock.links.local.Copies"]
    return Mutation("penstock.devices.streams", lines, uses, cases, leaves_races)


def _handover(*lines: tuple[str, str], cases: Sequence[str]) -> Mutation:
    uses = ["penstock.workers.threads.workers.Handover"]
    return Mutation("penstock.devices.streams", lines, uses, cases)


def _ahead(*lines: tuple[str, str], cases: Sequence[str], leaves_races: bool = True) -> Mutation:
    uses = ["penstock.engine.ends.Ahead"]
    return Mutation("penstock.devices.streams", lines, uses, cases, leaves_races)


def _twins(*lines: tuple[str, str], cases: Sequence[str]) -> Mutation:
    uses = ["penstock.workers.threads.workers.Twins"]
    return Mutation("penstock.engine.twins", lines, uses, cases)


def _slots(*lines: tuple[str, str], cases: Sequence[str]) -> Mutation:
    uses = ["tests.support.simulated.apart.ends_between"]
    return Mutation("penstock.links.device_memory", lines, uses, cases)


_REPLICAS = ["replicas of stages, tied", "replicas of stages", "replicas, tied"]
_TWIN_LAST = ["three replicas, own streams"]
_NORMS = ["replicas of images", "replicas of stages across"]
_APART = ["apart", "apart, gpipe", "skips, apart", "tied, apart", "images, apart"]
_FROM_DEVICE = "            arrival.synchronize()\n            return\n"
_PINNED = ["pinned inputs", "pinned images", "pinned integers"]
_GIVEN = [*_PINNED, "inputs of the CPU"]
_BETWEEN = ["chain, 1f1b", "skips", "tied", "images"]
_FROM_CPU, _TO_CPU = ["from the CPU", "by way of the CPU"], ["to the CPU", "by way of the CPU"]
_OWN = ["own streams", "images, own streams", "own streams, and more"]
_SAVED = ["tied, and more", "images, and more", "own streams, and more"]
_FREE = "; [v.untyped_storage().handle.__del__() for v in values if hasattr(v, 'untyped_storage')]"

MUTATIONS: dict[str, Mutation] = {
    "no wait before the receiver reads": _copies(
        ("        compute.wait_event(arrival)\n", ""), cases=_BETWEEN + _FROM_CPU
    ),
    "no wait before the copy reads": _copies(
        (
            "made or self._from.current_stream(self._source).record_event()",
            "self._reads.record_event()",
        ),
        cases=_BETWEEN,
    ),
    "no wait before weights are written": _copies(
        ("self._from.current_stream(self._source).wait_event(last)", "pass"),
        cases=["tied", "tied, gpipe, three devices"],
    ),
    "no record_stream of what is copied": _copies(
        ("            used_on(self._reads, values)", "            pass"), cases=_BETWEEN
    ),
    "no record_stream of copies": _copies(
        ("        used_on(compute, copies)\n", ""), cases=_BETWEEN + _FROM_CPU
    ),
    "an event recorded too early": _copies(
        (
            "        with ExitStack() as streams:",
            "        arrival = stream.record_event()\n        with ExitStack() as streams:",
        ),
        ("return copies, stream.record_event()", "return copies, arrival"),
        cases=_BETWEEN,
    ),
    "a copy from the wrong stream": _copies(
        ("streams.enter_context(self._from.using(self._reads))", "pass"), cases=_BETWEEN
    ),
    "memory freed early": _copies(
        (
            "copies = [self._copy(value) for value in values]",
            f"copies = [self._copy(value) for value in values]{_FREE}",
        ),
        cases=_BETWEEN,
    ),
    "the CPU does not wait for a copy": _copies(
        (_FROM_DEVICE, "            return\n"), cases=_TO_CPU, leaves_races=False
    ),
    "the CPU does not wait for inputs": _ahead(
        (_FROM_DEVICE, "            return\n"), cases=["from the CPU"], leaves_races=False
    ),
    "no wait for inputs and targets": _ahead(
        ("            copies.wait(made, arrival)\n", "            pass\n"), cases=_GIVEN
    ),
    "inputs may be written before they are read": _ahead(
        ("            arrival.synchronize()\n        self", "            pass\n        self"),
        cases=_PINNED,
        leaves_races=False,
    ),
    "the CPU does not wait for what is saved": Mutation(
        "penstock.storage.part",
        [('tensor.detach().to("cpu", copy=True)', 'tensor.detach().to("cpu", non_blocking=True)')],
        ["penstock.storage.part.copied"],
        _SAVED,
        leaves_races=False,
    ),
    "workers do not wait for the user's streams": _handover(
        ("        _await(self.before.items())\n", ""), cases=_OWN
    ),
    "the user's streams do not wait for workers": _handover(
        ("        _await(self._after)\n", ""), cases=_OWN
    ),
    "replicas have old weights": Mutation(
        "penstock.engine.twins",
        [("            self._there.into(stale, made)\n", "")],
        ["penstock.workers.threads.workers.Twins"],
        _REPLICAS,
        leaves_races=False,
        always=True,
    ),
    "no wait before weights are copied to replicas": Mutation(
        "penstock.devices.streams",
        [("        self._reads.wait_event(made)\n", "")],
        ["penstock.engine.twins.Copies"],
        _REPLICAS,
    ),
    "weights are written before replicas have them": _twins(
        ("        self._there.wait_for_copies()\n", "        pass\n"), cases=_REPLICAS
    ),
    "no wait for gradients of replicas": Mutation(
        "penstock.engine.gathered",
        [("        self.stream.wait_event(sent.ready)\n", "")],
        ["penstock.workers.threads.workers.Gathering"],
        _REPLICAS,
    ),
    "nobody waits for sums of replicas": Mutation(
        "penstock.workers.threads.workers",
        [("for each in (gathering, twins) if", "for each in (twins,) if")],
        ["penstock.workers.threads.backend.ThreadWorkers"],
        _TWIN_LAST,
    ),
    "gradients of replicas are freed before they are copied": Mutation(
        "penstock.devices.streams",
        [("self._from.current_stream(self._source).wait_event(arrival)", "pass")],
        ["penstock.engine.twins.Copies"],
        _REPLICAS,
    ),
    "copies of gradients are freed before they are added": Mutation(
        "penstock.devices.streams",
        [("self._writes.wait_event(read)", "pass")],
        ["penstock.engine.twins.Copies"],
        _REPLICAS,
    ),
    "the first replica's gradients are freed before they are added": Mutation(
        "penstock.engine.gathered",
        [("self._gathering.wait(added)", "pass")],
        ["penstock.engine.replicas.GatheredSum"],
        _REPLICAS,
    ),
    "no wait for statistics of the replica before": _twins(
        ("            self.stream.wait_event(event)\n", "            pass\n"), cases=_NORMS
    ),
    "the first replica does not wait for statistics of others": Mutation(
        "penstock.engine.replicas",
        [("                self.gathering.wait(event)\n", "                pass\n")],
        ["penstock.workers.threads.workers.InOrder"],
        ["replicas of stages across"],
    ),
    "no record_stream of what the user gets": _handover(
        ("kind.used_on(kind.current_stream(value.device), value)", "pass"), cases=_OWN
    ),
    "no wait before values are copied into a slot": _slots(
        ("self._stream.wait_event(here.record_event())", "pass"), cases=_APART
    ),
    "no wait before a slot is written again": _slots(
        ("        self._stream.wait_event(self._last)\n", ""), cases=_APART
    ),
    "no record_stream of what is copied into a slot": _slots(
        ("        used_on(self._stream, [value", "        list([value"), cases=_APART
    ),
    "no wait before a slot is read": _slots(("made=last, ", ""), cases=_APART),
    "nobody says that a slot was read": _slots((", read=last", ""), cases=_APART),
    "a slot's event recorded too early": _slots(
        ("        self._stream.record_event(self._last)\n", ""),
        (
            "        with self._kind.using(self._stream):\n            super()",
            "        self._stream.record_event(self._last)\n"
            "        with self._kind.using(self._stream):\n            super()",
        ),
        cases=_APART,
    ),
    "values copied into a slot on the wrong stream": _slots(
        (
            "        with self._kind.using(self._stream):\n            super()",
            "        if True:\n            super()",
        ),
        cases=_APART,
    ),
    "no wait before what was sent is written": _slots(
        ("self._kind.current_stream(self._device).wait_event(self._stream.record_event())", "pass"),
        cases=["tied, apart"],
    ),
    "gradients are handed on in the memory of others": Mutation(
        "penstock.engine.span",
        [("storage_uses(gradient) > _ALONE", "False")],
        ["penstock.engine.stage.apart"],
        ["gradients in the same memory, apart", "gradients in the same memory"],
    ),
}
