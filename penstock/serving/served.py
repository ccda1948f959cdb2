"""What is served: a model, and what else a server has to know of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from penstock.errors import InputError

_EXAMPLE = 8  # tokens of the example that a model with `generate` is recorded with


@dataclass(frozen=True)
class Served:
    """A model to be served.

    Attributes:
        model: with transformers' `generate`, prompts are completed; without it, `/predict` calls
            the model. It is put into evaluation mode.
        tokenizer: of transformers. Without it, prompts are lists of token numbers, and texts are
            these numbers, with spaces between them.
        args, kwargs: an example of what the model is called with, as of `penstock.Pipeline`. A
            model without `generate` needs it: what comes as JSON gets the dtypes of the example.
        name: by which clients know the model; by default the name of its class.
        pipeline: more arguments of `penstock.Pipeline`, such as `dynamic` or `weights`.
    """

    model: nn.Module
    tokenizer: Any = None
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    pipeline: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Any, target: str) -> Served:
        """What a function named on the command line returns, as one of these.

        Args:
            found: a `Served`, a module, or a module and its tokenizer.
            target: the name of the function, for errors.

        Raises:
            InputError: it is none of these, or a model without `generate` has no example.
        """
        if isinstance(found, nn.Module):
            found = cls(found)
        elif isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], nn.Module):
            found = cls(*found)
        if not isinstance(found, cls) or not isinstance(found.model, nn.Module):
            raise InputError(
                f"{target!r} returned {_kinds(found)}; it must return an nn.Module, a pair of a "
                "module and its tokenizer, or a penstock.serving.Served"
            )
        return replace(found, name=found.name or type(found.model).__name__)

    @property
    def generates(self) -> bool:
        """Whether the model has a `generate`."""
        return callable(getattr(self.model, "generate", None))

    def example(self, rows: int) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Positional and keyword arguments that the model is recorded with.

        Args:
            rows: of an example that is made here, for a model that generates.

        Raises:
            InputError: there is none, and the model does not generate.
        """
        if self.args or self.kwargs:
            return self.args, self.kwargs
        if not self.generates:
            raise InputError(
                f"{type(self.model).__name__} has no generate(), so an example says what it is "
                "called with: give --input 1x3x224x224 for every argument, or --example "
                "package.module:callable, or return a penstock.serving.Served with args="
            )
        ids = torch.ones(rows, _EXAMPLE, dtype=torch.long)
        config = getattr(self.model, "config", None)
        if getattr(config, "is_encoder_decoder", False):
            return (), {"input_ids": ids, "decoder_input_ids": ids}
        return (), {"input_ids": ids}


def _kinds(found: Any) -> str:
    """The types of what was returned, in words."""
    if isinstance(found, tuple):
        return f"a tuple ({', '.join(type(each).__name__ for each in found)})"
    return f"a {type(found).__name__}"
