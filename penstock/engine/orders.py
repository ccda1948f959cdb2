"""A pass as data: what workers are to do, and what has come of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from penstock.board.memory import Log
from penstock.capture.calls import Ambient
from penstock.devices.cores import flushes_denormal
from penstock.devices.kind import Event
from penstock.engine.batchnorm import Statistics
from penstock.engine.ends import Loss
from penstock.engine.residents import Shape
from penstock.engine.span import MicroBatch
from penstock.engine.stage import Before
from penstock.links.link import Gradients, Values

PassKind = Literal["train", "forward", "backward", "infer"]
"""What a pass does: both directions interleaved, or one of them, or forwards without gradients."""

_NAMES = {"train": "train_step", "infer": "a call", "forward": "a call", "backward": "backward"}


@dataclass(frozen=True)
class Order:
    """One pass of a batch.

    Attributes:
        what: which actions of the schedule are run.
        training: in which mode of the model.
        microbatches: what every stage knows of them.
        modes: autocast, and whether there are gradients.
        number: of the batch. What stages hold after `"forward"` waits under it for `"backward"`.
        values: for every micro-batch what enters the first stage; not in `"backward"`.
        loss: what the last stage's results are turned into, in `"train"`.
        gradients: of the last stage's results, by micro-batch, in `"backward"`.
        recorded: whether what workers note on their records is kept.
        profiled: whether torch.profiler records, with the names of actions.
        trial: whether what modules keep is put back at the end, and users' hooks are not called.
        again: whether this was run before by workers that are gone, so that what modules keep is
            put back at the end.
        wanted: the parameters whose gradients are computed, in `"backward"`; `None` for all.
        before: what came before it, for replicas.
        tokens: of the batch, see `penstock.engine.batch.tokens_of`.
        replica: which one runs it; `None` if its micro-batches are dealt to all of them.
        assumed: whether the model is assumed to be unchanged since the pass before. The driver
            checks that while this pass runs, and runs another one if the model has changed.
        weights_since: the number of the first pass since which no weight changes, until the script
            runs again; -1 if that is not known.
        at_once: whether the script waits for it as soon as it is started, and nothing else is
            under way.
        made: of each device with streams, when what the script has there is there, if not at once.
        to_all: whether all processes that run the script get the results, or only the one that
            gives the first stage its batches.
        flushes_denormal: whether the user's thread takes denormal numbers for 0, which is a setting
            of each thread.
    """

    what: PassKind
    training: bool
    microbatches: Sequence[MicroBatch]
    modes: Ambient
    number: int
    values: Sequence[Values] = ()
    loss: Loss | None = None
    gradients: dict[int, Gradients] = field(default_factory=dict)
    recorded: bool = False
    profiled: bool = False
    trial: bool = False
    again: bool = False
    wanted: Sequence[nn.Parameter] | None = None
    before: Before = field(default_factory=Before)
    tokens: int = 0
    replica: int | None = None
    assumed: bool = False
    weights_since: int = -1
    at_once: bool = False
    made: Mapping[torch.device, Event] = field(default_factory=dict)
    to_all: bool = True
    flushes_denormal: bool = field(default_factory=flushes_denormal)

    @property
    def name(self) -> str:
        """The method that the user has called, for messages."""
        return _NAMES[self.what]

    @property
    def goes_back(self) -> bool:
        """Whether there are backwards, which change `.grad`."""
        return self.what in ("train", "backward")

    def changed(self, **fields: Any) -> Order:
        """A copy with other values of these fields; much cheaper than `dataclasses.replace`."""
        other = object.__new__(Order)
        vars(other).update(vars(self), **fields)
        return other

    def back(
        self,
        gradients: dict[int, Gradients],
        modes: Ambient,
        wanted: Sequence[nn.Parameter] | None = None,
    ) -> Order:
        """The backward of this forward, under the autocast that it is called under."""
        return self.changed(
            what="backward",
            values=(),
            gradients=gradients,
            modes=modes._replace(grad=True),
            wanted=wanted,
            flushes_denormal=flushes_denormal(),
        )

    def part(self, first: bool, last: bool) -> Order:
        """What a worker needs of it that has the first stage, or the last one, or neither."""
        return self.changed(
            values=self.values if first else (),
            loss=self.loss if last else None,
            gradients=self.gradients if last else {},
        )


@dataclass
class Outcome:
    """What has come of a pass; of one worker's part, or of all together.

    Attributes:
        results: what the last stage gave, by micro-batch, without history.
        differentiable: which of these a backward can start from.
        losses: the detached loss of every micro-batch, unweighted.
        weights: of these losses in the batch's.
        metrics: what the metrics function returned, by micro-batch.
        gradients: by micro-batch, of the values that entered, where there are some.
        logs: what every worker has noted on its record, by number, if that was to be kept.
        buffers: of the loss function, where it was called in another process.
        statistics: of BatchNorms that replicas in other processes have seen, by the number of the
            module there and by micro-batch.
        targets: a checksum of all targets, where several processes have to have the same.
        weights_before: a checksum of the stages' parameters and buffers at the beginning of the
            pass, where replicas in several processes are compared.
        mismatch: the loss of a micro-batch, and what its pieces make, where that was looked at and
            is something else.
        memory: what forwards have left in modules in another process; `None` if not reported.
        kept: the shapes of values that stay with the workers, by number.
        written: which of `"inputs"`, `"targets"` and `"loss_kwargs"` were written to in another
            process, where the script does not see it.
    """

    results: dict[int, Values] = field(default_factory=dict)
    differentiable: Sequence[bool] = ()
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    weights: Sequence[float] = ()
    metrics: dict[int, Any] = field(default_factory=dict)
    gradients: dict[int, Gradients] = field(default_factory=dict)
    logs: dict[int, Log] = field(default_factory=dict)
    buffers: Sequence[torch.Tensor] = ()
    statistics: Mapping[int, Mapping[int, list[Statistics]]] = field(default_factory=dict)
    targets: int | None = None
    weights_before: int | None = None
    mismatch: tuple[float, float] | None = None
    memory: Mapping[Any, Any] | None = None
    kept: dict[int, Shape] = field(default_factory=dict)
    written: tuple[str, ...] = ()

    @classmethod
    def of(cls, parts: Sequence[Outcome]) -> Outcome:
        """The outcome of the whole pass, from those of all workers.

        `statistics`, `targets`, `weights_before` and `memory` are left in the parts.
        """
        whole = cls()
        for part in parts:
            whole.results |= part.results
            whole.differentiable = whole.differentiable or part.differentiable
            whole.losses |= part.losses
            whole.weights = whole.weights or part.weights
            whole.metrics |= part.metrics
            whole.gradients |= part.gradients
            whole.logs |= part.logs
            whole.buffers = whole.buffers or part.buffers
            whole.kept |= part.kept
            whole.mismatch = whole.mismatch or part.mismatch
            whole.written += part.written
        return whole

    def __reduce__(self) -> Any:
        """Pickled in few bytes, as many a pass is short: what there is, and shapes as tuples."""
        there = {name: value for name, value in vars(self).items() if value != _NOTHING[name]}
        if self.kept:
            there["kept"] = {number: tuple(shape) for number, shape in self.kept.items()}
        return _outcome, (there,)

    @property
    def parts(self) -> list[Values]:
        """What the last stage gave, for every micro-batch in order."""
        return [self.results[k] for k in sorted(self.results)]

    @property
    def loss(self) -> torch.Tensor:
        """Of the batch: the losses of its micro-batches, weighted, without those of weight 0."""
        total: torch.Tensor | None = None
        for microbatch, weight in enumerate(self.weights):
            if weight:
                loss = self.losses[microbatch] * weight
                total = loss if total is None else total + loss
        assert total is not None  # they add up to something
        return total


_NOTHING = vars(Outcome())


def _outcome(there: dict[str, Any]) -> Outcome:
    """The outcome that has been pickled."""
    if "kept" in there:
        there["kept"] = {number: Shape._make(shape) for number, shape in there["kept"].items()}
    return Outcome(**there)
