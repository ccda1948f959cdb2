"""Peers that generate text: stages in turn, and transformers' own pipeline parallelism."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.bench.peers.peer import Place, Reading, Recipe, seconds_between_barriers
from penstock.bench.peers.writing import Writing
from penstock.loading import tolerate_missing_torchvision_operators


class _Writer:
    """A servant that generates text, and keeps that of its last step."""

    def __init__(self) -> None:
        self._written: list[Tensor] = []

    def tokens(self) -> list[list[int]]:
        """The tokens of every sequence of the last step, its prompt included."""
        return [row for group in self._written for row in group.tolist()]


class InTurn(_Writer):
    """A model on several devices of which one computes at a time, as with `device_map="auto"`.

    On CPUs the devices are cores, and the stages read and write the same memory, so it makes no
    difference which core has its turn: one thread runs all of them.

    Args:
        writing: what it generates.
        hooks: whether accelerate's hooks, which move inputs to a module's device, are around the
            modules.
    """

    def __init__(self, writing: Writing, hooks: bool, _: Place) -> None:
        super().__init__()
        tolerate_missing_torchvision_operators()
        self._writing = writing
        self._model: Any = writing.build()
        if hooks:
            self._model = _dispatched(self._model, writing.layers)

    def step(self, rows: int, groups: int) -> Reading:
        """Generate so many groups of sequences."""
        start = time.perf_counter()
        self._written = self._writing.write(self._model, rows, groups)
        return Reading(time.perf_counter() - start)

    def close(self) -> None:
        """Nothing to give back."""


def _dispatched(model: Any, layers: str) -> Any:
    """The model with the hooks of accelerate's `dispatch_model` around all parts that it places.

    Its second device cannot be another CPU: tensors cannot be put on `cpu:1`.
    """
    from accelerate import dispatch_model

    logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)
    base = model.base_model_prefix
    parts = [f"{base}.{name}" for name, _ in model.base_model.named_children()]
    parts = [name for name in parts if name != layers] + ["lm_head"]
    parts += [f"{layers}.{k}" for k in range(len(model.get_submodule(layers)))]
    return dispatch_model(model, dict.fromkeys(parts, "cpu"), force_hooks=True)


def in_turn(writing: Writing, *, hooks: bool) -> Recipe:
    """One device after the other, in a process with one thread; see `InTurn`."""
    how = "accelerate's hooks" if hooks else "no hooks"
    return Recipe(f"stages in turn, {how}", [partial(InTurn, writing, hooks)])


class TransformersRank(_Writer):
    """A rank of transformers' own pipeline parallelism (`DistributedConfig(pp_size=...)`).

    Layers are split by their number. A forward goes from rank to rank, and the logits are sent to
    all of them; every rank runs the loop of `generate`.

    Args:
        writing: what it does.
        path: where the model's weights are, as `save_pretrained` has written them.
        place: of the rank.
    """

    def __init__(self, writing: Writing, path: str, place: Place) -> None:
        super().__init__()
        tolerate_missing_torchvision_operators()
        place.join()
        from transformers import AutoModelForCausalLM
        from transformers.distributed.configuration_utils import DistributedConfig
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        self._writing = writing
        split = DistributedConfig(pp_size=place.size)
        model = AutoModelForCausalLM.from_pretrained(path, distributed_config=split)
        self._model: Any = model.eval()

    def step(self, rows: int, groups: int) -> Reading:
        """Generate so many groups of sequences, one after the other."""
        return Reading(seconds_between_barriers(partial(self._write, rows, groups)))

    def _write(self, rows: int, groups: int) -> None:
        self._written = self._writing.write(self._model, rows, groups)

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


def transformers_pipeline(writing: Writing, path: str, *, processes: int = 2) -> Recipe:
    """transformers' own pipeline on so many ranks, with one thread each; see `TransformersRank`."""
    build = partial(TransformersRank, writing, path)
    return Recipe("transformers' pipeline", [build] * processes)


def saved(writing: Writing, path: str) -> str:
    """Write the model's weights to a folder, from which the ranks read their own; returns it."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model: Any = writing.build()
    with torch.no_grad():
        model.save_pretrained(path)
    return path
