"""Accelerate's `prepare_pippy`: inference by `torch.distributed.pipelining`, over gloo."""

from __future__ import annotations

import logging
import os
import time
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from penstock.bench.peers.peer import HOST, Place, Reading, Recipe, seconds_between_barriers
from penstock.bench.peers.writing import Inference, last_logits
from penstock.loading import tolerate_missing_torchvision_operators


class PippyRank:
    """A rank of a pipeline that accelerate has made; each batch drains it.

    Its schedule is run directly. Accelerate's own forward pads a batch unless a chunk has as many
    rows as there are chunks: that would be slower, and torch has fixed the number of rows when it
    exported the model.

    Args:
        work: what it does.
        chunks: micro-batches of a batch.
        first: the layer with which the second stage begins; 0 where accelerate is to choose, which
            it does for as many chunks as ranks.
        place: of the rank.
    """

    def __init__(self, work: Inference, chunks: int, first: int, place: Place) -> None:
        tolerate_missing_torchvision_operators()
        ranks = {"RANK": place.rank, "LOCAL_RANK": place.rank, "WORLD_SIZE": place.size}
        store = {"MASTER_ADDR": HOST, "MASTER_PORT": place.port}  # required, and not used
        os.environ.update({name: str(value) for name, value in {**ranks, **store}.items()})
        place.join()
        from accelerate import PartialState
        from accelerate.inference import prepare_pippy

        threads = torch.get_num_threads()
        logging.getLogger("accelerate").setLevel(logging.ERROR)  # it looks for GPUs to cut for
        PartialState(cpu=True)
        torch.set_num_threads(threads)  # it may have set another number
        layers = f"model.{work.writing.layers}"
        example = work.batches[0][: work.rows // chunks]
        model = work.build()
        _let_export_see_through(model)
        kinds = sorted({type(layer).__name__ for layer in model.get_submodule(layers).children()})
        # With gradients, which torch.export would take to be turned off within the model otherwise.
        made: Any = prepare_pippy(
            model,
            split_points=[f"{layers}.{first}"] if first else "auto",
            no_split_module_classes=kinds,
            example_args=(example,),
            num_chunks=chunks,
        )
        self._schedule: Any = made.pippy_stage
        self._inputs = [(batch,) if place.rank == 0 else () for batch in work.batches]
        self._is_last = place.rank == place.size - 1
        self._results: list[Any] = []

    def step(self) -> Reading:
        """Run all batches."""
        return Reading(seconds_between_barriers(self._run))

    def _run(self) -> None:
        with torch.no_grad():
            self._results = [self._schedule.step(*inputs) for inputs in self._inputs]

    def logits(self) -> NDArray[np.float32] | None:
        """The logits of `last_logits`, on the last rank; `None` on others."""
        return last_logits(self._results).numpy() if self._is_last else None

    def close(self) -> None:
        """Leave the process group."""
        from accelerate import PartialState

        PartialState._reset_state()
        dist.destroy_process_group()


def _let_export_see_through(model: nn.Module) -> None:
    """Take `torch.no_grad` off the forwards of rotary embeddings, which compute the same without.

    torch.export puts what runs under `no_grad` into a nested graph, which torch's pipeline cannot
    cut.
    """
    for module in model.modules():
        inner = getattr(type(module).forward, "__wrapped__", None)
        if inner is not None and type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = MethodType(inner, module)


def pippy(work: Inference, chunks: int, first: int = 0, *, processes: int = 2) -> Recipe:
    """`prepare_pippy` on so many ranks, with one thread each; see `PippyRank`.

    Raises:
        ValueError: the batches do not divide into such chunks.
    """
    if work.rows % chunks:
        raise ValueError(f"a batch of {work.rows} is not {chunks} equal chunks; choose a divisor")
    return Recipe(
        f"prepare_pippy, m={chunks}", [partial(PippyRank, work, chunks, first)] * processes
    )


class Plain:
    """The whole model on one device."""

    def __init__(self, work: Inference, _: Place) -> None:
        tolerate_missing_torchvision_operators()
        self._model, self._work = work.build(), work
        self._results: list[Any] = []

    def step(self) -> Reading:
        """Run all batches."""
        start = time.perf_counter()
        with torch.inference_mode():
            self._results = [self._model(batch) for batch in self._work.batches]
        return Reading(time.perf_counter() - start)

    def logits(self) -> NDArray[np.float32]:
        """The logits of `last_logits`."""
        return last_logits(self._results).numpy()

    def close(self) -> None:
        """Nothing to give back."""


def plain(work: Inference) -> Recipe:
    """One device, with one thread."""
    return Recipe("one device", [partial(Plain, work)])
