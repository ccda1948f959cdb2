"""What ranks of torchrun generate; each is a function of the rank."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch import nn

import penstock as ps
from penstock.links.shared_memory import Sender
from penstock.workers.ranks import backend
from tests.generation import subjects
from tests.generation.subjects import gpt2, pipeline, tokens
from tests.sessions.ranks import raised
from tests.workers.ranks import scenarios

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 9},
    "sampled": {"max_new_tokens": 7, "do_sample": True, "top_k": 20, "temperature": 1.3},
    "beams": {"max_new_tokens": 6, "num_beams": 3},
}
HAS_PROMPTS = ("gpt2", "llama")
LONG: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6}


def split(model: Any, stages: int = 2, **options: Any) -> ps.Pipeline:
    return pipeline(model, "torchrun", stages, timeout=30.0, **options)


def modes(rank: int, name: str, stages: str, replicas: str) -> Any:
    """The tokens of a model in every mode; then of prompts of several lengths."""
    model = getattr(subjects, name)()
    with split(model, int(stages), replicas=int(replicas)) as pipe:
        found = {
            mode: pipe.generate(tokens(6, 5), group_size=2, seed=7, **options)
            for mode, options in MODES.items()
        }
        prompts = [tokens(1, 3 + 2 * k, seed=k)[0] for k in range(5)]
        if name in HAS_PROMPTS:
            found["prompts"] = pipe.generate(prompts, seed=3, do_sample=True, max_new_tokens=5)
    return found


def from_another(rank: int) -> Any:
    """The second rank has the first stage, and alone gives arguments."""
    backend.order_of = lambda names, plan: [1, 2, 0]
    with split(gpt2(), 3) as pipe:
        leads = pipe._workers.all_gather("who leads", (rank, pipe._workers.role.routes))
        given = (tokens(4),) if rank == 1 else ()
        found = pipe.generate(*given, group_size=2, **LONG)
        error = raised(lambda: pipe.generate(*([],) if rank == 1 else ()))
    return [routes for _, routes in sorted(leads)], found, error


def tied(rank: int) -> Any:
    """How often this rank has sent the weight of the embeddings, by call; and what came of it."""
    model, times, found = gpt2(), [0], []
    weight, put = model.transformer.wte.weight, Sender.put

    def counted(sender: Sender, values: Any) -> None:
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        times[-1] += sum(value.shape == weight.shape for value in tensors)
        put(sender, values)

    Sender.put = counted  # type: ignore[method-assign]
    try:
        with split(model) as pipe:
            for _ in range(2):
                times.append(0)
                found.append(pipe.generate(tokens(4), group_size=2, **LONG))
                weight.data.copy_(weight.data.flip(0))  # which nobody can see
            times.append(0)
            pipe.train_step(tokens(4), loss_fn=lambda out: out.logits.square().mean())
    finally:
        Sender.put = put  # type: ignore[method-assign]
    return times[1:], found


SCORED: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, **LONG}


class Slowly(nn.Module):
    """A model with a `generate` of its own, and two stages that take their time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = scenarios.Slow(), scenarios.Slow()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(ids))
        return result

    def generate(self, ids: torch.Tensor) -> torch.Tensor:
        """Four times the result of the result."""
        for _ in range(4):
            ids = self(ids)
        return ids


def in_flight(rank: int) -> Any:
    """When the stages worked on two groups; and what came of them."""
    ids = tokens(2)
    with ps.Pipeline(
        Slowly(), (ids,), num_microbatches=1, schedule="gpipe", cuts=["second"], audit=None
    ) as pipe:
        pipe.generate(ids, group_size=1)
        scenarios.WHEN.clear()
        found = pipe.generate(ids, group_size=1)
    return list(scenarios.WHEN), found


def dictionaries(rank: int) -> Any:
    """What `generate` returns besides tokens, the cache of a single group among it."""
    options = {"return_dict_in_generate": True, "output_scores": True, **LONG}
    with split(gpt2()) as pipe:
        several = pipe.generate(tokens(4), **options)
        single = pipe.generate(tokens(1), **options)
    layers = [layer.keys.shape for layer in single.past_key_values.layers]
    return several.sequences, several.scores, single.sequences, layers


def streamed(rank: int) -> Any:
    """Tokens as they come on every rank; loops that are left; and what is generated afterwards."""
    model, ids = gpt2(), tokens(4)
    with split(model) as pipe:
        whole = pipe.generate(ids, **LONG)
        came = [(list(new.rows), new.tokens) for new in pipe.generate(ids, stream=True, **LONG)]
        left: list[Any] = []
        for new in pipe.generate(ids, stream=True, **LONG):
            left.append(new.tokens)
            if len(left) == 3:
                break
        some = []
        for leaver in (0, 1):  # one rank leaves the loop, and the other one does not
            count = 0
            for _ in pipe.generate(ids, stream=True, **LONG):
                count += 1
                if rank == leaver and count == 2:
                    break
            some.append(count)
        again = pipe.generate(ids, **LONG)
        states = pipe._workers.fetch_states(range(10_000))
    return whole, came, left, some, again, len(states)


class Broken:
    """A logits processor of the user's that fails in its fifth call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 5:
            raise ZeroDivisionError("mine")
        return scores


def failing(rank: int) -> Any:
    """Errors that all ranks raise, and tokens after each."""
    model, ids = gpt2(), tokens(4)
    wrong = ids.clone()
    wrong[2, 0] = 1000  # no such token
    found, later = [], []
    with split(model) as pipe:
        pipe.generate(ids, max_new_tokens=2)
        for work in (
            lambda: pipe.generate(ids, max_new_tokens=4, logits_processor=[Broken()]),
            lambda: pipe.generate(wrong, max_new_tokens=3),
            lambda: pipe.generate([]),
            lambda: pipe(input_ids=ids) if rank else pipe.generate(ids, max_new_tokens=3),
        ):
            found.append(raised(work))
            later.append(pipe.generate(ids, max_new_tokens=3))
    return found, later


def left_apart(rank: int) -> Any:
    """A rank calls another method between two tokens; and what is generated afterwards."""
    model, ids = gpt2(), tokens(4)
    with split(model) as pipe:

        def work() -> None:
            stream = pipe.generate(ids, stream=True, **LONG)
            next(stream)
            if rank:
                pipe(input_ids=ids)
            list(stream)

        return raised(work), pipe.generate(ids, **LONG), pipe.generate(ids, **LONG)


def language_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    logits = output.logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, target[:, 1:].flatten())


def trained(rank: int, name: str) -> Any:
    """States and tokens of training steps, with and without generating in between."""
    batch = tokens(4, 7, seed=5)
    found = []
    for generates in (False, True):
        model = getattr(subjects, name)().train()
        texts, plain = [], []
        with split(model, 4 if name == "t5" else 2) as pipe:  # an encoder in two of them
            optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-2)
            given = {"input_ids": batch}
            if name == "t5":
                given["decoder_input_ids"] = batch[:, :3]
            target = given.get("decoder_input_ids", batch)
            for _ in range(3):
                pipe.train_step(**given, target=target, loss_fn=language_loss)
                optimizer.step()
                optimizer.zero_grad()
                if generates:
                    model.eval()
                    texts.append(pipe.generate(tokens(2), group_size=1, **SCORED))
                    plain.append({k: v.clone() for k, v in pipe.state_dict().items()})
                    model.train()
            found.append({k: v.clone() for k, v in pipe.state_dict().items()})
    return *found, texts, plain


def killed(rank: int, victim: str) -> Any:
    """A rank dies while another one waits for tokens."""
    model, ids = gpt2(), tokens(4)
    pipe = split(model)
    options = {"max_new_tokens": 40, "min_new_tokens": 40}

    def work() -> None:
        for count, _ in enumerate(pipe.generate(ids, stream=True, **options)):
            if count == 3 and rank == int(victim):
                os.kill(os.getpid(), signal.SIGKILL)

    return raised(work), raised(lambda: pipe.generate(ids, max_new_tokens=2))


def amid(rank: int) -> Any:
    """Other calls between two tokens, and all tokens of the loop."""
    model, ids = gpt2(), tokens(4)
    with split(model) as pipe:
        came, inner = [], []
        for new in pipe.generate(ids, stream=True, **LONG):
            came.append(new.tokens)
            if len(came) == 3:
                inner.append(pipe.generate(ids[:2], group_size=1, max_new_tokens=3))
                session = pipe.session()
                result = session(input_ids=ids)
                inner.append(session.fetch(result.past_key_values.layers[0].keys))
        again = pipe.generate(ids, **LONG)
    return came, inner, again


def wrong_at_first(rank: int) -> Any:
    """A group that fails where ways of the other one are new; and tokens afterwards."""
    ids = tokens(4)
    wrong = ids.clone()
    wrong[2, 0] = 1000  # no such token
    with split(gpt2()) as pipe:
        error = raised(lambda: pipe.generate(wrong, max_new_tokens=3))
        return error, pipe.generate(ids, max_new_tokens=3)
