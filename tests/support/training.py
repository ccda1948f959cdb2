"""What training scripts do with losses, hooks and clipping, and one device that does the same.

Each use is a function of a pipeline, or of a `Plain`, and returns what is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.capture.trees import flatten
from penstock.engine.whole_batch import WholeBatch
from penstock.oracle import map_tensors
from tests.support.models import replicated, uniform_plan

IGNORED = -100
Found = dict[str, Any]

_numbers = torch.Generator().manual_seed(7)
X = torch.randn(11, 6, generator=_numbers)
Y = torch.randn(11, 5, generator=_numbers)
LABELS = torch.randint(5, (11,), generator=_numbers)
MASKED = LABELS.masked_fill(torch.arange(11) % 3 == 1, IGNORED)
EMPTY = LABELS.masked_fill(torch.arange(11) < 4, IGNORED)  # nothing counts in the first of three


@dataclass
class Result:
    """What `Routed` returns."""

    loss: torch.Tensor | None
    logits: torch.Tensor
    balance: torch.Tensor


class Mixture(nn.Module):
    """Three experts, a softmax over them, and how evenly it uses them."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 3)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shares = self.gate(x).softmax(-1)
        given = torch.stack([expert(x) for expert in self.experts], -2)
        return x + (shares[..., None] * given).sum(-2), shares.mean(0).square().sum()


class Routed(nn.Module):
    """Two mixtures of experts, whose balances are a part of the output; with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 5)
        self.one, self.two = Mixture(), Mixture()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Result:
        x, one = self.one(self.first(x).relu())
        x, two = self.two(x)
        logits = self.head(x)
        return Result(F.cross_entropy(logits, labels), logits, one + two)


def routed() -> nn.Module:
    """A fresh one."""
    torch.manual_seed(2)
    return Routed()


def hooked() -> nn.Module:
    """Linear layers with every kind of hook, and a tied weight."""
    torch.manual_seed(3)
    parts = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(3)]
    model = nn.Sequential(*parts, nn.Linear(6, 5))
    parts[2][0].weight = parts[0][0].weight
    parts[0][2].weight.register_hook(lambda gradient: gradient * 2)
    parts[0][0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    parts[1][2].bias.register_post_accumulate_grad_hook(halve)
    parts[1][0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    parts[1][0].register_forward_hook(lambda module, args, output: output * 1.5)
    parts[1][1].register_full_backward_hook(lambda module, given, got: (given[0] * 3,))
    model[3].register_full_backward_pre_hook(lambda module, got: (got[0] * 0.7,))
    return model


def halve(parameter: torch.Tensor) -> None:
    """A hook that changes what has been added up so far."""
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


class Plain:
    """One device that accumulates the same micro-batches in order, in plain PyTorch.

    Args:
        model: the unsplit model.
        num_microbatches: how many.
    """

    def __init__(self, model: nn.Module, num_microbatches: int = 3) -> None:
        self.model = model
        self.zero_grad = model.zero_grad
        self.train, self.eval = model.train, model.eval
        self._count = num_microbatches

    def __call__(self, *args: Any) -> Any:
        parts = [self.model(*self._part(args, k)) for k in range(self._count)]
        return torch.cat(parts)

    def train_step(self, *args: Any, target: Any = None, **options: Any) -> Any:
        if isinstance(options.get("loss_fn"), WholeBatch):
            return self._whole_step(args, target, **options)
        inputs = [self._part(args, k) for k in range(self._count)]
        targets = None
        if target is not None:
            targets = [self._part(target, k) for k in range(self._count)]
        return self.train_microbatches(inputs, targets=targets, merge=True, **options)

    def train_microbatches(
        self,
        inputs: Any,
        *,
        loss_fn: Any,
        targets: Any = None,
        weight: Any = "rows",
        loss_kwargs: Any = None,
        metrics: Any = None,
        outputs: bool = False,
        merge: bool = False,
    ) -> Any:
        given = [(t,) for t in targets] if targets is not None else [()] * len(inputs)
        counts = [len(part[0]) for part in inputs]
        if callable(weight):
            counts = [float(weight(*t)) for t in given]
        total, found, kept = torch.zeros(()), [], []
        for part, rest, count in zip(inputs, given, counts, strict=True):
            output = self.model(*part)
            loss = loss_fn(output, *rest, **(loss_kwargs or {}))
            share = 1.0 if weight is None else count / sum(counts)
            if share:
                (loss * share).backward()
                total = total + loss.detach() * share
            with torch.no_grad():
                found.append(metrics(output, *rest) if metrics else None)
            kept.append(map_tensors(torch.Tensor.detach, output))
        if metrics is None and not outputs:
            return total
        results = torch.cat(kept) if merge and outputs else kept if outputs else None
        return ps.StepResult(total, results, found if metrics else None)

    def _whole_step(
        self,
        args: Any,
        target: Any,
        loss_fn: Any,
        loss_kwargs: Any = None,
        metrics: Any = None,
        outputs: bool = False,
    ) -> Any:
        parts = [self.model(*self._part(args, k)) for k in range(self._count)]
        result = torch.cat(parts).detach().requires_grad_()
        rest = () if target is None else (target,)
        loss = loss_fn(result, *rest, **(loss_kwargs or {}))
        loss.backward()
        assert result.grad is not None
        for part, gradient in zip(parts, result.grad.tensor_split(self._count), strict=True):
            part.backward(gradient)
        if metrics is None and not outputs:
            return loss.detach()
        kept = result.detach() if outputs else None
        return ps.StepResult(loss.detach(), kept, [metrics(kept, *rest)] if metrics else None)

    def clip_grad_norm_(self, *args: Any, parameters: Any = None, **options: Any) -> torch.Tensor:
        chosen = self.model.parameters() if parameters is None else parameters
        return nn.utils.clip_grad_norm_(chosen, *args, **options)

    def clip_grad_value_(self, *args: Any, parameters: Any = None) -> None:
        chosen = self.model.parameters() if parameters is None else parameters
        nn.utils.clip_grad_value_(chosen, *args)

    def _part(self, tree: Any, k: int) -> Any:
        return map_tensors(lambda leaf: leaf.tensor_split(self._count)[k], tree)


def gradients(pipe: Any) -> dict[str, torch.Tensor]:
    """Those that are here."""
    named = pipe.model.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def counted(labels: torch.Tensor) -> torch.Tensor:
    """How many labels are not ignored."""
    return (labels != IGNORED).sum()


def balanced(output: Result, labels: torch.Tensor, share: float = 0.1) -> torch.Tensor:
    """A mean over rows, and the balance of earlier stages."""
    return F.cross_entropy(output.logits, labels) + share * output.balance


def masked_mean(output: Result, labels: torch.Tensor) -> torch.Tensor:
    """A mean over the labels that count, written by hand: no number if there is none."""
    each = F.cross_entropy(output.logits, labels.clamp(0), reduction="none")
    return (each * (labels != IGNORED)).sum() / counted(labels)


def summed(output: Result, target: dict[str, Any], *, weight: torch.Tensor) -> torch.Tensor:
    """A sum over two targets; what is None is left out."""
    error = (output.logits - target["values"]).square().sum() + output.balance
    assert target["mask"] is None
    return error + F.cross_entropy(output.logits, target["labels"], weight, reduction="sum")


def hits(output: Any, labels: torch.Tensor) -> dict[str, Any]:
    """Numbers and tensors of a micro-batch."""
    assert not torch.is_grad_enabled()
    return {"rows": len(labels), "hits": (output.logits.argmax(1) == labels).sum()}


def losses(pipe: Any) -> Found:
    """Every kind of loss, one after the other, added up."""
    found = [
        pipe.train_step(X, LABELS, target=LABELS, loss_fn=balanced),
        pipe.train_step(
            X, LABELS, target=LABELS, loss_fn=balanced, loss_kwargs={"share": torch.tensor(0.3)}
        ),
        pipe.train_step(X, LABELS, loss_fn=lambda output: output.loss),
        pipe.train_step(
            X, MASKED, target=MASKED, loss_fn=lambda output, _: output.loss, weight=counted
        ),
        pipe.train_step(
            X, EMPTY, target=EMPTY, loss_fn=lambda output, _: output.loss, weight=counted
        ),
        pipe.train_step(X, LABELS, target=EMPTY, loss_fn=masked_mean, weight=counted),
        pipe.train_step(
            X,
            LABELS,
            target={"values": Y, "labels": LABELS, "mask": None},
            loss_fn=summed,
            loss_kwargs={"weight": torch.arange(5) + 1.0},
            weight=None,
        ),
    ]
    asked = pipe.train_step(X, LABELS, target=LABELS, loss_fn=balanced, metrics=hits)
    by_hand = pipe.train_microbatches(
        [(X[:2], LABELS[:2]), (X[2:], LABELS[2:])],
        targets=[LABELS[:2], LABELS[2:]],
        loss_fn=balanced,
        outputs=True,
    )
    return {"losses": found, "asked": asked, "hand": by_hand, "gradients": gradients(pipe)}


def accumulation(pipe: Any) -> Found:
    """Steps that add up, evaluation in between, both kinds of clearing, with hooks everywhere."""
    found: list[Any] = []

    def step(**options: Any) -> None:
        found.append(pipe.train_step(X, target=Y, loss_fn=F.mse_loss, **options))

    step()
    step(outputs=True)
    with torch.no_grad():
        found.append(pipe(X))
        pipe.eval()
        found.append(pipe(X))
        pipe.train()
    step()
    found.append(gradients(pipe))
    pipe.zero_grad(set_to_none=False)
    found.append(gradients(pipe))
    step()
    found.append(gradients(pipe))
    pipe.zero_grad()
    found.append(gradients(pipe))
    step()
    return {"found": found, "gradients": gradients(pipe)}


CLIPPINGS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((0.5,), {}),
    ((0.4, float("inf")), {}),
    ((0.3, 0.5), {"error_if_nonfinite": True}),
    ((0.2, 1.0), {"foreach": False}),
    ((0.1, 3), {"foreach": True}),
    ((100.0, 2.0), {}),
]


def clipping(pipe: Any) -> Found:
    """Every norm, some parameters only, values, and a norm that is no number."""
    pipe.train_step(X, target=Y, loss_fn=nn.MSELoss(reduction="sum"), weight=None)
    found: list[Any] = []
    for args, options in CLIPPINGS:
        found += [pipe.clip_grad_norm_(*args, **options), gradients(pipe)]
    some = [p for p in pipe.model.parameters() if p.ndim == 1]
    found += [pipe.clip_grad_norm_(0.01, parameters=some), gradients(pipe)]
    pipe.clip_grad_value_(0.003, parameters=some)
    found.append(gradients(pipe))
    pipe.clip_grad_value_(0.01)
    found.append(gradients(pipe))
    for p in pipe.model.parameters():
        if p.grad is not None:
            p.grad[0] = float("nan")
    try:
        pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        found.append(str(error))
    return {"found": found}


def contrastive(
    output: torch.Tensor, target: torch.Tensor, *, temperature: float = 0.1
) -> torch.Tensor:
    """Every row against all others."""
    similarity = F.normalize(output) @ F.normalize(target).t() / temperature
    return F.cross_entropy(similarity, torch.arange(len(X)))


def spread(output: torch.Tensor) -> torch.Tensor:
    """Depends on statistics of the batch."""
    assert len(output) == len(X)
    return output.std(0).sub(1).square().mean()


def whole(pipe: Any) -> Found:
    """Losses of a whole batch, added up."""
    found = [
        pipe.train_step(X, target=Y, loss_fn=ps.whole_batch(contrastive)),
        pipe.train_step(X, loss_fn=ps.whole_batch(spread)),
        pipe.train_step(
            X, target=Y, loss_fn=ps.whole_batch(contrastive), loss_kwargs={"temperature": 0.5}
        ),
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss),
    ]
    asked = pipe.train_step(
        *(X,),
        target=Y,
        loss_fn=ps.whole_batch(contrastive),
        metrics=lambda output, target: (output * target).sum(),
        outputs=True,
    )
    return {"losses": found, "asked": asked, "gradients": gradients(pipe)}


USES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], Callable[[Any], Found]]] = {
    "losses": (routed, (X, LABELS), losses),
    "accumulation": (hooked, (X,), accumulation),
    "clipping": (hooked, (X,), clipping),
    "whole": (hooked, (X,), whole),
}
"""By name: the model, its inputs, and what is done."""


def split(
    name: str,
    schedule: str = "1f1b",
    recompute: str = "none",
    stages: int = 2,
    replicas: int = 1,
    **options: Any,
) -> Any:
    """A pipeline over a use's model, in two stages and three micro-batches."""
    build, args, _ = USES[name]
    model = build()
    program = ps.capture(model, args)
    plan = replicated(uniform_plan(program, stages, 3, schedule, recompute=recompute), replicas)
    return ps.Pipeline(model, args, program=program, plan=plan, **options)


def used(name: str, **options: Any) -> Found:
    """What the use finds with a pipeline."""
    with split(name, **options) as pipe:
        found = USES[name][2](pipe)
        assert len(pipe.plan.devices) > 1
        return found


def used_plainly(name: str) -> Found:
    """What it finds in plain PyTorch."""
    build, _, use = USES[name]
    return use(Plain(build()))


def assert_same(ours: Any, theirs: Any) -> None:
    """All leaves are the same, bit for bit, in the same structure."""
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert_same(value, theirs[key])
        return
    if type(ours) is list:
        for one, another in zip(ours, theirs, strict=True):
            assert_same(one, another)
        return
    (mine, structure), (others, other) = flatten(ours), flatten(theirs)
    assert structure == other
    for one, another in zip(mine, others, strict=True):
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, another)
            assert not one.requires_grad
        else:
            assert one == another


def train_beside(
    pipe: ps.Pipeline, plain: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int
) -> None:
    """Train with SGD, and a copy of the model by a loop of plain PyTorch; compare all gradients."""
    count = pipe.plan.num_microbatches
    ours = pipe.optimizer(torch.optim.SGD, lr=0.1)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(steps):
        ours.zero_grad()
        theirs.zero_grad()
        pipe.train_step(x, target=y, loss_fn=F.mse_loss)
        for part, target in zip(x.tensor_split(count), y.tensor_split(count), strict=True):
            (F.mse_loss(plain(part), target) / count).backward()
        for one, other in zip(pipe.model.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert torch.equal(one.grad, other.grad)
        ours.step()
        theirs.step()


def assert_same_gradients(
    pipe: ps.Pipeline, plain: nn.Module, x: torch.Tensor, y: torch.Tensor
) -> None:
    """Raise unless two steps of 4 micro-batches give both models the same gradients."""
    for _ in range(2):
        pipe.train_step(x, target=y, loss_fn=F.mse_loss)
        for part, target in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
            (F.mse_loss(plain(part), target) / 4).backward()
    for p, q in zip(plain.parameters(), pipe.model.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)
