"""What is saved of a training run: weights by owner, optimizers by names, everything else."""

from __future__ import annotations

import io
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from penstock.capture.randomness import undisturbed
from penstock.devices.kinds import accelerator
from penstock.errors import InputError
from penstock.storage.part import compact, error_in_short, plain, versions_of
from penstock.training.optimizer import PipelineOptimizer
from penstock.workers.optimizer_parts import Parts, parameters_of
from penstock.workers.ownership import Ownership
from penstock.workers.saving import Portion

OPTIMIZER, STATE, GENERATOR, DATA = "optimizer", "state", "generator", "data"
"""What the user may give: a `torch.optim` optimizer, anything with `state_dict()`, a
`torch.Generator`, plain data."""

_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
"""What schedulers leave in the groups of optimizers."""


class StateNames(TypedDict):
    """How the model's state dict is made of the tensors that workers write.

    Attributes:
        names: all of it, in order.
        tied: for tensors that have several names, each name but the first, with the first name.
        extras: the values that are not tensors, by name.
        metadata: the versions of modules, by their names; earlier versions did not save it.
    """

    names: list[str]
    tied: dict[str, str]
    extras: dict[str, Any]
    metadata: NotRequired[Mapping[str, Any]]


@dataclass(frozen=True)
class Contents:
    """A training run, as it is between two steps.

    Attributes:
        portions: for every worker its weights, and what optimizers in this process remember of
            its parameters.
        names: of the model's parameters, by the parameters' ids.
        remote: optimizers whose states are in worker processes.
        training: everything else, as `torch.save` writes it.
    """

    portions: Sequence[Portion]
    names: Mapping[int, str]
    remote: Mapping[str, Parts]
    training: bytes

    @classmethod
    def of(
        cls,
        model: nn.Module,
        ownership: Ownership,
        random_state: Mapping[str, int],
        things: Mapping[str, Any],
    ) -> Contents:
        """Everything there is.

        Args:
            model: whose weights.
            ownership: what of them each worker has.
            random_state: of the pipeline.
            things: what the user wants to have saved, by name.

        Raises:
            InputError: something cannot be saved.
        """
        owned = ownership.owned()
        portions = [Portion() for _ in owned]
        owners = {id(tensor): worker for worker, own in enumerate(owned) for tensor in own}
        names = names_of(model)
        weights = _divide_weights(model, owners, portions)
        saved: dict[str, tuple[str, Any]] = {}
        remote: dict[str, Parts] = {}
        for label, thing in things.items():
            kind = _kind_of(thing)
            if kind != OPTIMIZER:
                saved[label] = kind, _state_of(thing, kind)
                continue
            _check_is_ours(label, thing, names)
            saved[label] = kind, groups_of(thing, names)
            parts = thing.remote if isinstance(thing, PipelineOptimizer) else None
            if parts is None:
                _divide_states(label, thing, names, owners, portions)
            else:
                remote[label] = parts
        state = dict(random_state)
        counts = {"batches": state["trained"], "random_state": state}
        training = compact({"model": weights, **counts, "things": saved})
        return cls(portions, names, remote, _packed(training, saved))


def _kind_of(thing: Any) -> str:
    """`OPTIMIZER`, `STATE`, `GENERATOR` or `DATA`: how an object is saved."""
    if isinstance(thing, Optimizer):
        return OPTIMIZER
    if isinstance(thing, torch.Generator):
        return GENERATOR
    has_state = callable(getattr(thing, "state_dict", None)) and not isinstance(thing, type)
    return STATE if has_state else DATA


def _state_of(thing: Any, kind: str) -> Any:
    """What is saved of something that is no optimizer."""
    if kind == GENERATOR:
        return thing.get_state()
    return plain(thing.state_dict() if kind == STATE else thing)


def copies_of(model: nn.Module, things: Iterable[Any]) -> list[nn.Module]:
    """The modules among these things, or in them, with parameters named and shaped as a model's."""

    def shapes(module: nn.Module) -> dict[str, torch.Size]:
        return {name: parameter.shape for name, parameter in module.named_parameters()}

    wanted, named = shapes(model), (thing for thing in things if isinstance(thing, nn.Module))
    every = (module for thing in named for module in thing.modules())
    return [module for module in every if wanted and shapes(module) == wanted]


def keeps_more(model: nn.Module, things: Iterable[Any]) -> bool:
    """Whether something is saved that forwards may change in modules, and that is no tensor."""
    generators = {id(thing) for thing in things if isinstance(thing, torch.Generator)}
    return any(
        type(module).get_extra_state is not nn.Module.get_extra_state
        or not generators.isdisjoint(map(id, vars(module).values()))
        for module in model.modules()
    )


def names_of(model: nn.Module) -> dict[int, str]:
    """The names of a model's parameters, by their ids; the first of those that are tied."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def groups_of(optimizer: Optimizer, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """An optimizer's groups, with the names of parameters in their place."""
    places = _places(optimizer, names)
    found = []
    for group in optimizer.param_groups:
        rest = {k: plain(v) for k, v in group.items() if k not in ("params", "param_names")}
        found.append({**rest, "params": [places[id(p)] for p in group["params"]]})
    return found


def unlike(
    optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]
) -> tuple[list[str], list[str]]:
    """The settings that an optimizer's class has and saved groups lack, and the reverse.

    Another version of the same class may have more settings, or fewer; with another class, both
    lists have entries.
    """
    known = set(optimizer.defaults)
    saved = {setting for group in groups for setting in group} - {"params"}
    scheduled = _OF_SCHEDULERS | {setting for g in optimizer.param_groups for setting in g}
    return sorted(known - saved), sorted(saved - known - scheduled)


def _places(optimizer: Optimizer, names: Mapping[int, str]) -> dict[int, str]:
    """Names of all its parameters; those that are not the model's are numbered."""
    parameters = parameters_of(optimizer)
    return {id(p): names.get(id(p), f"#{k}") for k, p in enumerate(parameters)}


def generators_now() -> dict[str, Any]:
    """The states of the random generators of torch, numpy and Python in this process."""
    kind = accelerator()
    with undisturbed():
        numpy: Any = np.random.get_state(legacy=False)
        key = torch.from_numpy(numpy["state"]["key"].astype(np.int64))
        return {
            "torch": torch.get_rng_state(),
            "cuda": kind.random_states() if kind else [],
            "numpy": plain({**numpy, "state": {**numpy["state"], "key": key}}),
            "python": random.getstate(),
        }


def use_generators(states: Mapping[str, Any]) -> None:
    """Put the random generators of this process where they were."""
    with undisturbed():
        torch.set_rng_state(states["torch"])
        if kind := accelerator():
            kind.set_random_states(states["cuda"])
        numpy = states["numpy"]
        key = numpy["state"]["key"].numpy().astype(np.uint32)
        np.random.set_state({**numpy, "state": {**numpy["state"], "key": key}})
        random.setstate(states["python"])


def _divide_weights(
    model: nn.Module, owners: Mapping[int, int], portions: Sequence[Portion]
) -> StateNames:
    """Give every worker its tensors, each once; how the state dict is made of them."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    extras: dict[str, Any] = {}
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            extras[name] = value
        elif id(value) in first:
            tied[name] = first[id(value)]
        else:
            first[id(value)] = name
            portions[owners.get(id(value), 0)].tensors[name] = value
    metadata = plain(dict(versions_of(state) or {}))
    return {"names": list(state), "tied": tied, "extras": extras, "metadata": metadata}


def _divide_states(
    label: str,
    optimizer: Optimizer,
    names: Mapping[int, str],
    owners: Mapping[int, int],
    portions: Sequence[Portion],
) -> None:
    """Give every worker what this process remembers of its parameters."""
    places = _places(optimizer, names)
    for key, values in optimizer.state.items():
        portion = portions[owners.get(id(key), 0)]
        portion.states.setdefault(label, {})[places.get(id(key), key)] = values


def _check_is_ours(label: str, optimizer: Optimizer, names: Mapping[int, str]) -> None:
    parameters = parameters_of(optimizer)
    foreign = [p for p in parameters if id(p) not in names]
    if foreign and (isinstance(optimizer, PipelineOptimizer) or len(foreign) == len(parameters)):
        raise InputError(
            f"{label}= is an optimizer over other parameters than this model's: one of shape "
            f"{tuple(foreign[0].shape)} is not in it"
        )


def _packed(training: Any, saved: Mapping[str, Any]) -> bytes:
    """As `torch.save` writes it, and `torch.load` reads it without running code.

    Raises:
        InputError: that is not possible, because of one of the things.
    """
    data, error = _attempt(training)
    if error is None:
        return data
    culprit = next((f"{name}=" for name, thing in saved.items() if _attempt(thing)[1]), "the model")
    raise InputError(
        f"{culprit} cannot be saved, because it, or its state_dict(), is more than plain data "
        f"(numbers, texts, tensors, and lists, tuples and dictionaries of them): {error}"
    )


def _attempt(value: Any) -> tuple[bytes, str | None]:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), map_location="cpu", weights_only=True)
    except Exception as error:
        return b"", error_in_short(error)
    return buffer.getvalue(), None
