"""The language models whose generation is measured: random weights, the same every time."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.bench.peers.writing import Writing
from penstock.loading import tolerate_missing_torchvision_operators


def gpt2(layers: int, width: int, words: int, positions: int) -> nn.Module:
    """A GPT-2 in evaluation mode; its heads are 64 wide, but at least four."""
    tolerate_missing_torchvision_operators()
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=max(4, width // 64),
        vocab_size=words,
        n_positions=positions,
        **_NEVER_ENDS,
    )
    return _with_weights(GPT2LMHeadModel, config)


def llama(layers: int, width: int, words: int, positions: int) -> nn.Module:
    """A Llama in evaluation mode with grouped queries; its heads are 64 wide, but at least four."""
    tolerate_missing_torchvision_operators()
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(4, width // 64)
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        vocab_size=words,
        max_position_embeddings=positions,
        **_NEVER_ENDS,
    )
    return _with_weights(LlamaForCausalLM, config)


_NEVER_ENDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


def _with_weights(kind: Any, config: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = kind(config)
        return model.eval()


def writers(quick: bool) -> dict[str, Writing]:
    """The models, by a short name; with `quick` so small that a token takes milliseconds."""
    layers, width, words = (4, 64, 512) if quick else (12, 768, 16384)
    rows, length, new_tokens = (8, 8, 6) if quick else (36, 32, 32)
    size = layers, width, words, length + new_tokens
    described = f"{layers} layers, width {width}, {words} words"
    texts = (words, rows, length, new_tokens)
    return {
        "gpt2": Writing(f"GPT-2, {described}", partial(gpt2, *size), "transformer.h", *texts),
        "llama": Writing(f"Llama, {described}", partial(llama, *size), "model.layers", *texts),
    }
