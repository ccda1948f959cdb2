"""The models of the contract, and a run of each: with a pipeline, and on one device."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.comparison.reference import gradients_of, one_device, run_with_threads
from tests.support.models import ROWS, Case, gpt2, language_loss, replicated, uniform_plan

STEPS = 2
SEED = 5
Bits = dict[str, torch.Tensor]
"""Losses, gradients, parameters and buffers, by name."""


class Point(NamedTuple):
    """How a model is trained."""

    schedule: str
    workers: int
    microbatches: int
    recompute: str

    def __str__(self) -> str:
        return f"{self.schedule}-p{self.workers}-m{self.microbatches}-{self.recompute}"


class Tied(nn.Module):
    """The table of words is the head, and one layer is used at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.shared = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.2))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.shared(self.table(tokens)).tanh()
        return self.head(self.shared(self.middle(hidden)).tanh())


def resnet() -> nn.Module:
    """torchvision's residual blocks, narrow, with BatchNorm and dropout."""
    from torchvision.models.resnet import BasicBlock

    narrow = nn.Sequential(nn.Conv2d(4, 8, 1, 2, bias=False), nn.BatchNorm2d(8))
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        BasicBlock(4, 4),
        nn.Dropout2d(0.2),
        BasicBlock(4, 8, 2, narrow),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(8, 10),
    )


def llama() -> nn.Module:
    """Llama of two layers, with dropout in its attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        attention_dropout=0.2,
        use_cache=False,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)


def t5() -> nn.Module:
    """T5: an encoder, a decoder, dropout, and one table of words for all of it."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_decoder_layers=1,
        num_heads=2,
        dropout_rate=0.1,
        use_cache=False,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def mixtral() -> nn.Module:
    """Mixtral of two layers with three experts, of which each token takes two."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
        num_experts_per_tok=2,
        max_position_embeddings=16,
        attention_dropout=0.1,
        use_cache=False,
    )
    return MixtralForCausalLM(config)


def words_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of every position."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@functools.cache
def subjects() -> dict[str, Case]:
    """By name."""
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(ROWS, 3, 8, 8, generator=generator)
    labels = torch.randint(10, (ROWS,), generator=generator)
    tokens = torch.randint(1, 16, (ROWS, 6), generator=generator)
    following = tokens.roll(-1, 1)
    ids = {"input_ids": tokens}
    both = {"input_ids": tokens, "decoder_input_ids": tokens[:, :5]}
    found = [
        Case("resnet", resnet, (images,), {}, labels, F.cross_entropy),
        Case("gpt2", gpt2, (), ids, following, language_loss),
        Case("llama", llama, (), ids, following, language_loss),
        Case("t5", t5, (), both, following[:, :5].contiguous(), language_loss),
        Case("tied", Tied, (tokens,), {}, following, words_loss),
        Case("mixtral", mixtral, (), ids, following, language_loss),
    ]
    return {case.name: case for case in found}


@dataclass(frozen=True)
class Captured:
    """A model that is used again and again, and how it was in the beginning."""

    model: nn.Module
    program: ps.Program
    state: dict[str, Any]

    def fresh(self) -> nn.Module:
        """The model as it was."""
        self.model.load_state_dict(self.state)
        self.model.zero_grad()
        return self.model.train()


@functools.cache
def captured(name: str) -> Captured:
    """The model of this name, captured once."""
    case = subjects()[name]
    model = case.model()
    program = ps.capture(model, case.args, case.kwargs)
    return Captured(model, program, copy.deepcopy(model.state_dict()))


@functools.cache
def plan(name: str, point: Point) -> ps.Plan:
    """The plan for a point, for which nothing is measured."""
    program = captured(name).program
    return uniform_plan(
        program, point.workers, point.microbatches, point.schedule, recompute=point.recompute
    )


def run(
    name: str,
    point: Point,
    replicas: int = 1,
    during: Callable[[ps.Pipeline], AbstractContextManager[None]] = nullcontext,
    **options: Any,
) -> Bits:
    """Some steps of a pipeline; under torchrun, what this rank has.

    Args:
        name: of the model.
        point: how a replica trains it.
        replicas: how many.
        during: made with the pipeline, around the steps.
        **options: of the pipeline.
    """
    case, subject = subjects()[name], captured(name)
    chosen = {"plan": replicated(plan(name, point), replicas), **options}
    chosen["program"] = subject.program
    with ps.Pipeline(subject.fresh(), case.args, case.kwargs, **chosen) as pipe, during(pipe):
        torch.manual_seed(SEED)
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.01)
        losses = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            losses.append(
                pipe.train_step(*case.args, target=case.target, loss_fn=case.loss_fn, **case.kwargs)
            )
            optimizer.step()
        return _bits(losses, pipe.gradients(), pipe.state_dict())


@functools.cache
def expected(name: str, microbatches: int, threads: int) -> Bits:
    """The same on one device: the model's own forward, the micro-batches in order."""
    case, subject = subjects()[name], captured(name)
    model = copy.deepcopy(subject.fresh())
    reference = one_device(model, subject.program, microbatches, case.args, case.kwargs)
    torch.manual_seed(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(
            run_with_threads(
                functools.partial(reference.train_step, step, case.loss_fn, case.target), threads
            )
        )
        optimizer.step()
    return _bits(losses, gradients_of(model), model.state_dict())


def _bits(
    losses: list[torch.Tensor], gradients: Mapping[str, torch.Tensor | None], state: dict[str, Any]
) -> Bits:
    found = {f"loss {k}": loss for k, loss in enumerate(losses)}
    found |= {f"gradient of {n}": g.clone() for n, g in gradients.items() if g is not None}
    return found | {n: t.detach().clone() for n, t in state.items() if isinstance(t, torch.Tensor)}


def different(ours: Bits, theirs: Bits) -> list[str]:
    """What is not the same bits, or only on one side."""
    names = dict.fromkeys([*theirs, *ours])
    return [
        n for n in names if n not in ours or n not in theirs or not torch.equal(ours[n], theirs[n])
    ]


def sampled(points: list[Point], shift: int, count: int) -> list[Point]:
    """Points that between them have every pair of settings, if there are enough of them."""
    pairs = list(itertools.combinations(range(len(Point._fields)), 2))
    wanted = {(i, j, p[i], p[j]) for p in points for i, j in pairs}
    found: list[Point] = []
    rotated = points[shift % len(points) :] + points[: shift % len(points)]
    while wanted and len(found) < count:
        best = max(rotated, key=lambda p: sum(p[i] == a and p[j] == b for i, j, a, b in wanted))
        found.append(best)
        wanted = {w for w in wanted if not (best[w[0]] == w[2] and best[w[1]] == w[3])}
    return found
