"""What the model's own `generate` gives on one device, for what a request asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def tokens_of(
    model: Any, prompt: Sequence[int], most: int = 16, seed: int = 0, **options: Any
) -> list[int]:
    """New tokens, without the end."""
    ids = torch.tensor([list(prompt)])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.manual_seed(seed)
        arguments = {"max_new_tokens": most, "pad_token_id": 0, "do_sample": False, **options}
        found = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    finally:
        torch.set_num_threads(threads)
    new = found[0, 1 if model.config.is_encoder_decoder else len(prompt) :].tolist()
    end = model.generation_config.eos_token_id
    return new[: new.index(end)] if end in new else new


def numbers(tokens: Sequence[int]) -> str:
    """As a server without a tokenizer writes them."""
    return " ".join(map(str, tokens))


def result_of(model: nn.Module, **arguments: Any) -> Any:
    """What the model returns for these nested lists."""
    with torch.no_grad():
        return model(**{name: torch.tensor(value) for name, value in arguments.items()})
