"""Models that return objects of their own: caches of keys and values, above all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.capture.trees import flatten_result, leaves_of, unflatten
from tests.support.models import gpt2, uniform_plan

X = torch.randn(8, 6)
Y = torch.randn(8, 6)


class Layer:
    """What one block remembers."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.length = 0

    def update(self, keys: torch.Tensor) -> torch.Tensor:
        self.keys, self.length = keys, self.length + keys.shape[1]
        return self.keys


class Cache:
    """An object of a plain class, as deep as those of transformers."""

    def __init__(self) -> None:
        self.layers = [Layer() for _ in range(4)]
        self.kind = Layer
        self.me: object = None


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(6, 6), number

    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        return cache.layers[self.number].update(self.linear(x)).tanh()


class Cached(nn.Module):
    """Returns its cache; once, or in another way."""

    def __init__(self, returns: str = "once") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, range(4)))
        self.returns = returns

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        cache = Cache()
        for block in self.blocks:
            x = block(x, cache)
        if self.returns == "twice":
            return {"y": x, "cache": cache, "again": cache}
        if self.returns == "within itself":
            cache.me = cache
        if self.returns == "with a list twice":
            cache.me = cache.layers
        if self.returns == "with a method of its own":
            cache.me = cache.layers[0].update
        if self.returns == "with a size":
            cache.me = x.shape
        return {"y": x, "cache": cache}


def keys_of(result: dict[str, Any]) -> list[torch.Tensor]:
    return [layer.keys for layer in result["cache"].layers]


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_model_that_returns_its_cache_is_cut(kind: Any) -> None:
    model = Cached()
    parts = [model(x) for x in X.split(2)]
    devices = ["cpu", "cpu"]
    with ps.Pipeline(
        copy.deepcopy(model), (X,), devices=devices, replicas=1, num_microbatches=4, workers=kind
    ) as pipe:
        assert len(pipe.plan.stages) > 1
        result = pipe(X)
        assert type(result["cache"]) is Cache
        assert result["cache"].kind is Layer
        assert [layer.length for layer in result["cache"].layers] == [6] * 4
        for number, keys in enumerate(keys_of(result)):
            assert torch.equal(keys, torch.cat([keys_of(part)[number] for part in parts]))
        loss = pipe.train_step(X, target=Y, loss_fn=uses_the_cache)
    expected = [uses_the_cache(part, y) / 4 for part, y in zip(parts, Y.split(2), strict=True)]
    assert torch.equal(loss, torch.stack(expected).detach().sum())


def uses_the_cache(result: dict[str, Any], y: torch.Tensor) -> torch.Tensor:
    return (result["y"] - y).square().mean() + keys_of(result)[1].abs().mean()


OTHERS = ["twice", "within itself", "with a list twice", "with a method of its own", "with a size"]


@pytest.mark.parametrize("returns", OTHERS)
def test_an_object_of_which_attributes_say_not_all_keeps_the_model_whole(returns: str) -> None:
    program = ps.capture(Cached(returns), (X,))
    assert len(program) == 1
    assert "passes a Cache" in program.closed[""]


def test_a_cache_with_a_layer_that_is_not_used() -> None:
    model = Cached()
    model.blocks = model.blocks[:3]
    program = ps.capture(model, (X,))
    assert (len(program), program.closed) == (6, {})
    with ps.Pipeline(model, (X,), program=program, devices=["cpu"] * 2, cuts=["blocks.2"]) as pipe:
        layers = pipe(X)["cache"].layers
    assert [layer.keys is None for layer in layers] == [False, False, False, True]


class Headed(nn.Module):
    """A body that is kept whole and returns its cache, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Cached(), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        found = self.body(x.tanh())
        return {"y": self.head(found["y"]), "cache": found["cache"]}


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_loss_may_use_the_cache_of_a_module_that_is_kept_whole(kind: Any) -> None:
    """Its tensors are results like others, from which a backward may start."""

    def loss_of(result: dict[str, Any], target: torch.Tensor) -> torch.Tensor:
        keys = torch.stack(keys_of(result))
        return (result["y"] - target).square().mean() + keys.square().mean()

    model, plain = Headed(), Headed()
    plain.load_state_dict(model.state_dict())
    program = ps.capture(model, (X,), keep_closed=["body"])
    assert [call.label for call in program.train.calls] == [
        "tanh()",
        "body",
        "head",
        "tensors_in()",
    ]
    plan = uniform_plan(program, 2, 2, "zero-bubble", cuts=["body"])
    with ps.Pipeline(
        model, (X,), program=program, plan=plan, devices=["cpu"] * 2, workers=kind, audit=1
    ) as pipe:
        loss = pipe.train_step(X, target=Y, loss_fn=loss_of)
        assert [layer.length for layer in pipe(X)["cache"].layers] == [6] * 4
    expected = torch.zeros(())
    for x, y in zip(X.split(4), Y.split(4), strict=True):
        part = loss_of(plain(x), y) * 0.5
        part.backward()
        expected = expected + part.detach()
    assert torch.equal(loss, expected)
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad), name


def test_such_a_model_is_profiled() -> None:
    """Every call is timed alone, so the history of what is in the cache ends before it."""
    model = Headed()
    program = ps.capture(model, (X,), keep_closed=["body"])
    costs = ps.profile(program, devices=["cpu", "cpu"], seconds=0.2)
    assert len(costs.call_seconds()) == 4
    with ps.Pipeline(model, (X,), program=program, plan=ps.plan(costs), audit=1) as pipe:
        assert [layer.length for layer in pipe(X)["cache"].layers] == [6] * 4


class Counted(nn.Module):
    """Puts a number that depends on values into the object that it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Layer:
        layer = Layer()
        layer.keys, layer.length = self.linear(x), int((x > 50).sum())
        return layer


class HasCounted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.counted = nn.Linear(6, 6), Counted()

    def forward(self, x: torch.Tensor) -> Layer:
        self.first(x)
        return self.counted(x)  # type: ignore[no-any-return]


def test_what_a_closed_module_puts_beside_tensors_must_not_depend_on_values() -> None:
    with ps.Pipeline(HasCounted(), (X,), devices=["cpu"], num_microbatches=1, audit=None) as pipe:
        assert pipe(X).length == 0
        with pytest.raises(ps.PenstockError, match="holds 1 instead of 0: data that depend on"):
            pipe(torch.cat([X[:7], torch.tensor([[99.0] + [0.0] * 5])]))


class Keeps(nn.Module):
    """Returns an object that it keeps, with what the forward has put there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.layer = nn.Linear(6, 6), nn.Linear(6, 6), Layer()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Layer]:
        self.layer.keys = self.first(x)
        return self.second(self.layer.keys), self.layer


def test_an_object_that_the_model_keeps_stays_the_same() -> None:
    model = Keeps()
    assert len(ps.capture(model, (X,))) == 1
    with ps.Pipeline(model, (X,), devices=["cpu"], num_microbatches=1) as pipe:
        assert pipe(X)[1] is model.layer


def test_a_language_model_as_its_configuration_makes_it() -> None:
    """With `use_cache`, which is the default of transformers' models."""
    from transformers import DynamicCache

    model = gpt2().eval()
    model.config.use_cache = True
    ids = torch.randint(64, (4, 8))
    with torch.no_grad():
        parts = [model(x).past_key_values for x in ids.split(2)]
    with (
        ps.Pipeline(model, (ids,), devices=["cpu", "cpu"], replicas=1, num_microbatches=2) as pipe,
        torch.no_grad(),
    ):
        cache = pipe(ids).past_key_values
    assert len(pipe.plan.stages) > 1
    assert type(cache) is DynamicCache
    assert len(cache.layers) == 2
    for number, layer in enumerate(cache.layers):
        for name in ("keys", "values"):
            expected = torch.cat([getattr(part.layers[number], name) for part in parts])
            assert torch.equal(getattr(layer, name), expected)


def test_objects_without_tensors_stay_as_they_are_unless_in_others() -> None:
    class Plain:
        def __init__(self) -> None:
            self.number = 3

    plain, cache = Plain(), Cache()
    leaves, structure = flatten_result({"plain": plain, "cache": cache, "x": X})
    assert leaves[0] is plain
    assert leaves[1] is cache  # there is no tensor in it
    cache.layers[2].keys = X
    leaves, structure = flatten_result({"plain": plain, "cache": cache, "x": X})
    assert cache not in leaves[:1]
    rebuilt = unflatten(structure, leaves)
    assert rebuilt["cache"].layers[2].keys is X
    assert [type(layer) for layer in rebuilt["cache"].layers] == [Layer] * 4
    assert rebuilt["cache"].layers[0].keys is None
    again = leaves_of({"plain": plain, "cache": cache, "x": Y}, structure)
    assert [leaf is not other for leaf, other in zip(leaves, again, strict=True)].count(True) == 1
