"""Bringing a model's parameters and buffers to the devices of its stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import torch
from torch import nn

from penstock.capture import Attribute, Program
from penstock.capture.attributes import find, named_tensors, put
from penstock.errors import InputError
from penstock.links.segment import place_of
from penstock.weights import Weights


def place(
    program: Program,
    cuts: Sequence[int],
    devices: Sequence[torch.device | None],
    weights: Weights | None = None,
    placed: Callable[[int, Sequence[torch.Tensor]], None] = lambda stage, tensors: None,
) -> None:
    """Move every parameter and buffer to the device of the first stage that uses it.

    Parameters stay the same objects; only their memory moves. Those on `meta` are new objects, and
    on `meta` again if anything fails.

    Args:
        program: its model is moved.
        cuts: between the stages.
        devices: of the stages; `None` for those of other machines or ranks, which are left alone.
        weights: where parameters that are on `meta` come from.
        placed: called after each stage with its number and its tensors, before the next ones are
            read.
    """
    model = program.model
    empty = [(name, t) for name, t in named_tensors(model) if t.is_meta]
    try:
        _place_stages(program, cuts, devices, weights, placed)
    except BaseException:
        for name, tensor in empty:
            put(model, name, tensor)
        raise


def _place_stages(
    program: Program,
    cuts: Sequence[int],
    devices: Sequence[torch.device | None],
    weights: Weights | None,
    placed: Callable[[int, Sequence[torch.Tensor]], None],
) -> None:
    model = program.model
    edges = [0, *cuts, len(program)]
    seen: set[str] = set()
    for stage, (device, (start, stop)) in enumerate(zip(devices, pairwise(edges), strict=True)):
        names: list[str] = []
        for call in program.train.calls[start:stop]:
            read = (v.name for v in call.reads() if isinstance(v, Attribute))
            names += [name for name in (*call.hidden, *read) if name not in seen]
            seen.update(names)
        if device is None:
            continue
        _materialise(model, names, device, weights)
        for name in names:
            _move(model, name, device)
        found = (find(model, name) for name in names)
        placed(stage, [tensor for tensor in found if isinstance(tensor, torch.Tensor)])
    if devices[0] is not None:
        rest = [name for name, _ in named_tensors(model) if None not in devices or name not in seen]
        _materialise(model, rest, devices[0], weights)
        for name in rest:
            if name not in seen:  # by no stage; optimizers have those that the first worker has
                _move(model, name, devices[0])


def _materialise(
    model: nn.Module, names: Iterable[str], device: torch.device, weights: Weights | None
) -> None:
    """Give these tensors values: those on `meta`, and the buffers that a state dict may have."""
    if weights is None:
        return
    stored = dict(model.named_buffers()).keys() & model.state_dict(keep_vars=True).keys()
    wanted = []
    for name in dict.fromkeys(names):
        tensor = find(model, name)
        is_derived = tensor is not None and tensor.grad_fn is not None  # hooks make it anew
        if tensor is not None and not is_derived and (tensor.is_meta or name in stored):
            wanted.append(name)
    weights.materialise(model, wanted, device)
    for name in wanted:
        if find(model, name).is_meta:
            raise InputError(
                f"{name!r} is on the meta device and has no values; it keeps its values if the "
                "model is built within penstock.empty_weights()"
            )


def _move(model: nn.Module, name: str, device: torch.device) -> None:
    tensor = find(model, name)  # what a forward stores may not be there yet
    if tensor is None or tensor.device == device or tensor.is_meta:
        return
    if isinstance(tensor, nn.Parameter):
        tensor.data = tensor.data.to(device)
        if tensor.grad is not None:
            tensor.grad = tensor.grad.to(device)
    else:
        put(model, name, tensor.to(device))


def check_separate(model: nn.Module) -> None:
    """Raise if parameters share memory without being the same: each would get memory of its own.

    Raises:
        InputError: some do.
    """
    found = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type == "cpu" and tensor.numel() and tensor.layout is torch.strided:
            place, start = place_of(tensor.detach(), 0), tensor.data_ptr()
            is_parameter = isinstance(tensor, nn.Parameter)
            found.append((start, start + place.end - place.offset, name, is_parameter))
    reach, one, first = 0, "", False  # of those so far, the one that ends last
    for start, end, other, second in sorted(found):
        if start < reach and (first or second):
            raise InputError(
                f"{one!r} and {other!r} share memory but are not the same parameter (one was made "
                "from the other's .data, or is a view of it); beyond one process they would drift "
                f"apart. Tie them as one object (module.weight = other.weight), or use "
                'workers="threads"'
            )
        if end > reach:
            reach, one, first = end, other, second
