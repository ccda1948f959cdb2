"""What replicas in processes of their own do not see of each other: an error, not other bits.

Such replicas have modules and functions of their own. Where these remember something from one
micro-batch to the next, each would remember other micro-batches than one device does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from penstock.capture.equality import same_tensor
from penstock.capture.preserve import own_generators
from penstock.engine.ends import Loss
from penstock.engine.span import Span
from penstock.errors import InputError
from penstock.links.pickling import pack
from penstock.workers.ways import modules_of


def check_memories(
    spans: Iterable[Span], replicas: int, name_of: Callable[[nn.Module], str]
) -> None:
    """Raise if forwards remember something in attributes or generators.

    Args:
        spans: what they run.
        replicas: how many there are.
        name_of: the name of a module, for messages.

    Raises:
        InputError: they do.
    """
    spans = list(spans)
    generators = (m for m in modules_of(spans) if any(own_generators(m)))
    attributes = (m for span in spans for memory in span.memories for m in memory)
    module = next(chain(generators, attributes), None)
    if module is not None:
        raise InputError(
            f"replicas={replicas}: {name_of(module)} remembers something from forward to forward "
            "in an attribute or a random generator of its own, which replicas in other processes "
            'do not see; use workers="threads", or replicas=1'
        )


def check_buffers(
    spans: Iterable[Span], replicas: int, name_of: Callable[[nn.Module], str]
) -> None:
    """Raise if forwards change buffers, except for the running statistics of BatchNorms.

    Args:
        spans, replicas, name_of: as of `check_memories`.

    Raises:
        InputError: they do, or they change those of a BatchNorm that the program has opened.
    """
    spans = list(spans)
    modules = modules_of(spans)
    running = {
        id(buffer)
        for module in modules
        if isinstance(module, _BatchNorm)
        for buffer in module.buffers(recurse=False)
    }
    for span in spans:
        changing = {id(tensor) for tensor in span.changing}
        if span.recompute and changing:
            raise InputError(
                "a forward changes buffers of modules that are to be recomputed, which would "
                'disturb other replicas; use recompute="none", or replicas=1'
            )
        changing -= running
        inside = span.module.modules() if isinstance(span.module, nn.Module) else ()
        for module in inside:
            if any(id(buffer) in changing for buffer in module.buffers(recurse=False)):
                raise InputError(
                    f"replicas={replicas}: a forward changes buffers of {name_of(module)}, and "
                    "replicas that have a model each would change them in another order than one "
                    "device (only the running statistics of BatchNorms can be put in order). Use "
                    'workers="threads" or "processes", or replicas=1'
                )


@contextmanager
def unchanged(loss: Loss | None) -> Iterator[None]:
    """Around a pass of a replica that calls a loss function of its own.

    Raises:
        InputError: it is another one afterwards, or the metrics function is.
    """
    if loss is None:
        yield
        return
    functions = loss.function, loss.metrics
    data, tensors = pack(functions)
    before = [tensor.detach().clone() for tensor in tensors]
    yield
    now, others = pack(functions)
    if now != data or not all(map(same_tensor, before, others)):
        raise InputError(
            "the loss function or the metrics function has changed when it was called, and every "
            'replica is a process with functions of its own; use workers="threads", or replicas=1'
        )
