"""The models of the cases, each with its two halves as somebody would cut it by hand."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.loading import tolerate_missing_torchvision_operators

WIDTH = 8


class Chain(nn.Sequential):
    """Modules one after the other; the second half begins at `middle`."""

    middle = 2

    def stages(self) -> list[nn.Module]:
        """The two halves."""
        parts = list(self.named_children())  # whose names they keep, as checkpoints need them
        halves = parts[: self.middle], parts[self.middle :]
        return [nn.Sequential(OrderedDict(half)) for half in halves]


def linear() -> nn.Module:
    """Linear layers with tanh."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return Chain(*layers, nn.Linear(WIDTH, WIDTH))


def batchnorm() -> nn.Module:
    """BatchNorm in both halves."""
    return Chain(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)),
        nn.Tanh(),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)),
        nn.Linear(WIDTH, WIDTH),
    )


def frozen() -> nn.Module:
    """The first half is not trained."""
    model = linear()
    model[0].requires_grad_(False)  # type: ignore[index]
    return model


def in_place() -> nn.Module:
    """The second half begins by changing its input."""
    model = Chain(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
    model.middle = 1
    return model


def steep() -> nn.Module:
    """The first layer's weights are a thousandth, for inputs that are a thousand times as large.

    Its gradient is then about a thousand times those of the other layers.
    """
    model = linear()
    with torch.no_grad():
        model[0].weight.mul_(1e-3)  # type: ignore[index]
    return model


class Apart(nn.Module):
    """A model of two halves that may hand over several values."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, *inputs: Tensor) -> Any:
        values = self.first(*inputs)
        return self.second(*values) if isinstance(values, tuple) else self.second(values)

    def stages(self) -> list[nn.Module]:
        """The two halves."""
        return [self.first, self.second]


class Tied(Apart):
    """The first weight is the last one as well."""

    def __init__(self) -> None:
        last = nn.Linear(WIDTH, WIDTH, bias=False)
        first = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())
        super().__init__(first, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), last))
        last.weight = first[0].weight  # type: ignore[assignment]


class Embedding(nn.Module):
    """Gives hidden values, and passes the tokens on, which the end needs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, WIDTH)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(tokens).mean(1), tokens


class Masked(nn.Module):
    """Uses hidden values and tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(hidden) * (tokens > 3).float().mean(1, keepdim=True)
        return result


def tokens_over_a_boundary() -> nn.Module:
    """Integers cross the cut."""
    return Apart(Embedding(), Masked())


class Forked(nn.Module):
    """One result is used twice in the second half."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.a(x).tanh()
        return hidden, self.b(hidden)


class Joined(nn.Module):
    """Uses two results."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(WIDTH, WIDTH)

    def forward(self, skip: Tensor, hidden: Tensor) -> Tensor:
        result: Tensor = self.c(hidden.tanh()) + skip * hidden
        return result


def skip_connection() -> nn.Module:
    """A value that both halves use."""
    return Apart(Forked(), Joined())


class Named(nn.Module):
    """Ends in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(hidden), "hidden": hidden}


def dictionary() -> nn.Module:
    """A dictionary comes out."""
    return Apart(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), Named())


class Turned(nn.Module):
    """Gives a tensor that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x).unflatten(1, (2, WIDTH // 2)).transpose(1, 2)
        return result


class Flat(nn.Module):
    """Uses a tensor of any layout."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(x.flatten(1).tanh())
        return result


def transposed() -> nn.Module:
    """What crosses the cut is not contiguous."""
    return Apart(Turned(), Flat())


class Experts(nn.Module):
    """Mixtral of two layers; gives logits, and the loss that balances its experts."""

    def __init__(self) -> None:
        tolerate_missing_torchvision_operators()  # transformers imports it
        from transformers import MixtralConfig, MixtralForCausalLM

        super().__init__()
        config = MixtralConfig(
            vocab_size=16,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=6,
            num_experts_per_tok=2,
            max_position_embeddings=16,
            use_cache=False,
            experts_implementation="eager",  # one after the other, those that were chosen
        )
        self.whole = MixtralForCausalLM(config)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        result = self.whole(tokens, output_router_logits=True)
        return result.logits, result.aux_loss

    def stages(self) -> list[nn.Module]:
        """The two halves: a layer each."""
        return [ExpertsBegin(self.whole), ExpertsEnd(self.whole)]


class ExpertsLayer(nn.Module):
    """A layer of Mixtral that also gives the scores of its router."""

    def __init__(self, whole: Any, number: int) -> None:
        super().__init__()
        self.config, self.rotary = whole.config, whole.model.rotary_emb
        self.layer = whole.model.layers[number]

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        from transformers.masking_utils import create_causal_mask

        scores: list[Tensor] = []
        places = torch.arange(hidden.shape[1])[None]
        mask = create_causal_mask(
            self.config, hidden, attention_mask=None, past_key_values=None, position_ids=places
        )
        gate = self.layer.mlp.gate
        handle = gate.register_forward_hook(lambda module, given, got: scores.append(got[0]))
        turned = self.rotary(hidden, position_ids=places)
        hidden = self.layer(hidden, attention_mask=mask, position_embeddings=turned)
        handle.remove()
        return hidden, scores[0]


class ExpertsBegin(nn.Module):
    """The first half of Mixtral."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.table, self.layer = whole.model.embed_tokens, ExpertsLayer(whole, 0)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden, scores = self.layer(self.table(tokens))
        return hidden, scores


class ExpertsEnd(nn.Module):
    """The second half of Mixtral, which also gives the balancing loss of both routers.

    The loss has the shape (1,), so that those of micro-batches can be concatenated.
    """

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.layer, self.config = ExpertsLayer(whole, 1), whole.config
        self.norm, self.head = whole.model.norm, whole.lm_head

    def forward(self, hidden: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        hidden, second = self.layer(hidden)
        config = self.config
        balance = load_balancing_loss_func(
            (first, second),
            config.num_local_experts,
            config.num_experts_per_tok,
        )
        assert isinstance(balance, Tensor)
        return self.head(self.norm(hidden)), balance.reshape(1)


def dictionary_loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    """The squared error of the logits, plus the mean square of the hidden values."""
    return F.mse_loss(output["logits"], target) + output["hidden"].square().mean()
