"""What the tests serve: small models with random weights, by functions that a command can name."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn

from penstock.loading import tolerate_missing_torchvision_operators
from penstock.serving import Served

WORDS = 64
END = 0
CONTEXT = 64


def gpt2() -> nn.Module:
    """A GPT-2 of two layers."""
    tolerate_missing_torchvision_operators()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=16,
        n_head=2,
        vocab_size=WORDS,
        n_positions=CONTEXT,
        bos_token_id=END,
        eos_token_id=END,
        initializer_range=0.4,  # so that its tokens are not always the same
    )
    return transformers.GPT2LMHeadModel(config).eval()


def t5() -> nn.Module:
    """A T5 of two layers on each side."""
    tolerate_missing_torchvision_operators()
    torch.manual_seed(0)
    config = transformers.T5Config(
        num_layers=2,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_heads=2,
        vocab_size=WORDS,
        decoder_start_token_id=END,
        pad_token_id=END,
        eos_token_id=1,
    )
    return transformers.T5ForConditionalGeneration(config).eval()


def letters() -> Any:
    """A tokenizer of single characters, with a chat template."""
    tolerate_missing_torchvision_operators()
    signs = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ 0123456789"
    words = {"</s>": END} | {sign: k for k, sign in enumerate(signs[: WORDS - 1], 1)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[], unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    made.chat_template = (
        "{% for message in messages %}{{ message['role'][0] }} {{ message['content'] }} "
        "{% endfor %}{% if add_generation_prompt %}a{% endif %}"
    )
    return made


def gpt2_with_letters() -> tuple[nn.Module, Any]:
    """The GPT-2 and the tokenizer."""
    return gpt2(), letters()


def gpt2_with_beams() -> tuple[nn.Module, Any]:
    """The same, whose own settings ask for beams."""
    model: Any = gpt2()
    model.generation_config.num_beams = 4
    return model, letters()


class Net(nn.Module):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.second(torch.tanh(self.first(x)))
        return {"logits": found * scale, "best": found.argmax(1)}


def net() -> Served:
    """The network, with its example."""
    torch.manual_seed(0)
    example = {"x": torch.ones(4, 3), "scale": torch.ones(4, 1)}
    return Served(Net().eval(), kwargs=example, name="net")


def nothing() -> int:
    """What is no model."""
    return 3


def broken() -> None:
    """Arguments that cannot be made."""
    raise KeyError("nothing")
