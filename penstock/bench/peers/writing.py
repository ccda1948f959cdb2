"""What all contestants generate (a model, prompts, a number of tokens), and what they infer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from penstock.bench.subjects import Logits

Build = Callable[[], Any]


def text(rows: int, length: int, words: int) -> Tensor:
    """Random tokens (rows, length), int64, of 1 to `words` - 1; always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, words, (rows, length), generator=generator)


@dataclass(frozen=True)
class Writing:
    """Greedy generation with a cache of keys and values, the same for every peer; picklable.

    Attributes:
        name: of the model.
        build: makes a model of transformers, with the same weights every time; picklable. No token
            ends its texts.
        layers: the name of the submodule that is the list of its layers.
        words: the size of its vocabulary.
        rows: the number of sequences.
        length: the number of tokens of each prompt.
        new_tokens: the number of tokens that each sequence gets.
    """

    name: str
    build: Build
    layers: str
    words: int
    rows: int
    length: int
    new_tokens: int

    def prompts(self, rows: int, groups: int) -> list[Tensor]:
        """The first `rows` prompts, in groups: `groups` tensors (rows / groups, length), int64.

        Raises:
            ValueError: they do not divide into such groups.
        """
        if groups < 1 or rows % groups:
            raise ValueError(f"{rows} sequences are not {groups} equal groups; choose a divisor")
        return list(text(self.rows, self.length, self.words)[:rows].chunk(groups))

    @property
    def example(self) -> dict[str, Tensor]:
        """Keyword arguments of the model, with all prompts."""
        return {"input_ids": self.prompts(self.rows, 1)[0]}

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `generate`."""
        return {"max_new_tokens": self.new_tokens, "do_sample": False, "use_cache": True}

    def write(self, model: Any, rows: int, groups: int) -> list[Tensor]:
        """What the model's own `generate` returns for the groups of `prompts`, one after the other.

        The attention mask is given, as `generate` would look for padding otherwise.
        """
        prompts = self.prompts(rows, groups)
        return [
            model.generate(prompt, attention_mask=torch.ones_like(prompt), **self.options)
            for prompt in prompts
        ]


@dataclass(frozen=True)
class Inference:
    """Batches that run through a model, without gradients and without a cache; picklable.

    Attributes:
        writing: has the model.
        count: the number of batches.
        rows: the number of rows of each batch.
        length: the number of tokens of each row.
    """

    writing: Writing
    count: int
    rows: int
    length: int

    def build(self) -> Logits:
        """The model, whose result is the logits alone."""
        model = self.writing.build()
        model.config.use_cache = False
        return Logits(model).eval()

    @cached_property
    def batches(self) -> list[Tensor]:
        """`count` tensors of tokens (rows, length), int64."""
        rows = self.count * self.rows
        return list(text(rows, self.length, self.writing.words).chunk(self.count))


def last_logits(results: list[Tensor]) -> Tensor:
    """The logits of the last token of every row: (batches, rows, words)."""
    return torch.stack([result[:, -1] for result in results])
