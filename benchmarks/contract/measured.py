"""Runs the cases with every contender, and says how far each is from one device."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import cloudpickle
import torch
from torch import Tensor

from benchmarks.contract import peers
from benchmarks.contract.cases import Case
from benchmarks.contract.trainers import (
    Found,
    OneDevice,
    Penstock,
    PenstockProcesses,
    Trainer,
)
from penstock.bench.peers.processes import PeerProcesses
from penstock.comparison.verify_report import gap

OURS = ("Penstock", "Penstock, processes")
OTHERS = ("torch.distributed.pipelining", "data parallelism")
_OURS: dict[str, type[Trainer]] = {
    "Penstock": Penstock,
    "Penstock, processes": PenstockProcesses,
}
_PEERS: dict[str, type[Trainer]] = {
    "torch.distributed.pipelining": peers.TorchPipelining,
    "data parallelism": peers.DataParallel,
}
_PATIENCE = 60.0  # seconds, for a start on a busy machine; peers that hang take as long
_WORDS = 160


@dataclass(frozen=True)
class Verdict:
    """How a contender did.

    Attributes:
        largest: the largest absolute difference; `None` where nothing could be compared.
        where: what differs by that.
        reason: why nothing could be compared.
        applies: whether it could be asked at all.
    """

    largest: float | None = None
    where: str = ""
    reason: str = ""
    applies: bool = True

    @property
    def is_exact(self) -> bool:
        """Whether everything was the same bits."""
        return self.largest == 0 and not self.where

    def __str__(self) -> str:
        if self.reason:
            return self.reason
        if self.is_exact:
            return "exact"
        if self.largest == float("inf"):
            return f"differs: {self.where} is missing, infinite or of another shape"
        return f"differs by {self.largest:.1e} ({self.where})"


class Contenders:
    """Everybody who is asked; the peers' processes are kept from case to case."""

    def __init__(self) -> None:
        self._processes: dict[str, PeerProcesses] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for processes in self._processes.values():
            processes.close()

    def verdict(self, case: Case, name: str) -> Verdict:
        """What one contender makes of a case."""
        reason = dict(case.without).get(name)
        if reason:
            return Verdict(reason=f"does not apply: {reason}", applies=False)
        if name in _PEERS:
            self._processes_of(name)  # that it does not start is not the case's fault
        expected = run(case, OneDevice)
        try:
            found = self._found(case, name)
        except Exception as error:
            return Verdict(reason=f"not supported: {in_a_few_words(error)}")
        return compared(found, expected)

    def _found(self, case: Case, name: str) -> Found:
        if name in _OURS:
            return run(case, _OURS[name])
        ranks = self._processes_of(name).call("run", cloudpickle.dumps((case.setup, case.script)))
        found: Found = {}
        for rank in reversed(ranks):  # the first is right where several have something
            found |= rank
        return found

    def _processes_of(self, name: str) -> PeerProcesses:
        """The processes of a peer; new ones after a failure."""
        processes = self._processes.get(name)
        if processes is None or not processes.pids:
            build = partial(peers.Rank, _PEERS[name])
            processes = PeerProcesses(name, [build] * 2, timeout=_PATIENCE)
            self._processes[name] = processes
        return processes


def run(case: Case, kind: type[Trainer]) -> Found:
    """What a trainer of this process has in the end."""
    trainer = kind(case.setup)
    try:
        return case.script(trainer)
    finally:
        trainer.close()


def compared(found: Found, expected: Found) -> Verdict:
    """The largest difference, and where it is; that of a counter only if there is no other."""
    gaps = {name: _gap(found.get(name), tensor) for name, tensor in expected.items()}
    gaps |= {name: float("inf") for name in found.keys() - expected.keys()}
    different = {name: gap for name, gap in gaps.items() if gap is not None}
    if not different:
        return Verdict(0.0)
    counters = {name for name, tensor in expected.items() if not tensor.is_floating_point()}
    chosen = {n: g for n, g in different.items() if n not in counters} or different
    where = max(chosen, key=chosen.__getitem__)
    return Verdict(chosen[where], where)


def _gap(ours: Tensor | None, theirs: Tensor) -> float | None:
    if ours is not None and ours.dtype == theirs.dtype and torch.equal(ours, theirs):
        return None
    return gap(ours, theirs)


def in_a_few_words(error: Any) -> str:
    """The error at the bottom of it, in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"^[\w.]*(Error|Exception|Warning)\b", line)]
    own = [line for line in raised if "onnection" not in line and "gloo" not in line]
    text = (own or raised or lines or [type(error).__name__])[0]
    kind = "" if own or raised else f"{type(error).__name__}: "
    text = f"{kind}{text}"
    return text if len(text) <= _WORDS else text[: _WORDS - 1].rstrip() + "…"
