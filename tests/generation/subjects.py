"""Small language models with random weights, and how they are generated from."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

import penstock as ps
from penstock.generation.seeds import seed_of
from tests.support.models import replicated, uniform_plan

VOCABULARY = 64


def gpt2(seed: int = 0, **options: Any) -> Any:
    sizes = {"n_layer": 4, "n_head": 2, "n_embd": 16, "n_positions": 96, "bos_token_id": 1}
    return _built("GPT2Config", "GPT2LMHeadModel", seed, **sizes, **options)


def sliding() -> Any:
    """Mistral with a window of 6 tokens, which caches fill."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 6}
    return _built("MistralConfig", "MistralForCausalLM", **sizes, **heads)


def llama() -> Any:
    """Rotary positions, and heads that share keys."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return _built("LlamaConfig", "LlamaForCausalLM", **sizes, **heads)


def mamba() -> Any:
    """A model with recurrent states."""
    sizes = {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 3}
    return _built("MambaConfig", "MambaForCausalLM", **sizes)


def t5() -> Any:
    """A model with an encoder."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return _built("T5Config", "T5ForConditionalGeneration", decoder_start_token_id=0, **sizes)


def _built(config: str, kind: str, seed: int = 0, **options: Any) -> Any:
    """A model of transformers with random weights, in evaluation mode."""
    torch.manual_seed(seed)
    options = {"vocab_size": VOCABULARY, "eos_token_id": 2, "pad_token_id": 0, **options}
    return getattr(transformers, kind)(getattr(transformers, config)(**options)).eval()


def tokens(rows: int = 4, length: int = 7, seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, length), generator=made)


class Plain(nn.Module):
    """A model with a `generate` of its own, without a cache, as in minGPT."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.mix = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.mix(self.embedding(ids))[0])
        return logits

    @torch.no_grad()
    def generate(self, ids: torch.Tensor, count: int, temperature: float = 0.0) -> torch.Tensor:
        for _ in range(count):
            last = self(ids)[:, -1]
            if temperature:
                chosen = torch.multinomial((last / temperature).softmax(-1), 1)
            else:
                chosen = last.argmax(-1, keepdim=True)
            ids = torch.cat([ids, chosen], 1)
        return ids


def pipeline(model: Any, kind: Any = "threads", stages: int = 2, **options: Any) -> ps.Pipeline:
    """The model in so many stages of about as many calls, one thread a worker."""
    replicas = options.pop("replicas", 1)
    device = next(model.parameters()).device
    example: dict[str, Any] = {"input_ids": tokens().to(device)}
    if getattr(model, "config", None) is None:
        example = {"ids": tokens().to(device)}
    elif model.config.is_encoder_decoder:
        example["decoder_input_ids"] = tokens(length=3).to(device)
    program = ps.capture(model, kwargs=example)
    plan = replicated(uniform_plan(program, stages, 2), replicas)
    options = {"threads_per_worker": 1, "audit": None, **options}
    return ps.Pipeline(
        model, kwargs=example, program=program, plan=plan, workers=kind, progress=None, **options
    )


def expected(model: Any, groups: list[Any], seed: int = 0, **kwargs: Any) -> list[torch.Tensor]:
    """What the model itself generates for groups of sequences, one after the other.

    Args:
        model: on one device, with one thread.
        groups: the ids of each, or keyword arguments.
        seed: of the batch that they are.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = []
    first = 0
    try:
        with torch.random.fork_rng():
            for group in groups:
                given = group if isinstance(group, dict) else {"input_ids": group}
                torch.manual_seed(seed_of(seed, first))
                found.append(model.generate(**given, **kwargs))
                first += len(next(iter(given.values())))
    finally:
        torch.set_num_threads(threads)
    return found


def padded(parts: list[torch.Tensor]) -> torch.Tensor:
    longest = max(part.shape[1] for part in parts)
    return torch.cat([nn.functional.pad(p, (0, longest - p.shape[1]), value=0) for p in parts])
