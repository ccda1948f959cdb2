"""The model's own forward, with the random numbers that a pipeline's stages draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from penstock.capture.calls import Call
from penstock.capture.interception import intercepted
from penstock.capture.program import Program
from penstock.capture.randomness import Key, draw, draw_in_python
from penstock.capture.recorder import Recorder


@contextmanager
def seeded(program: Program, key: Key, model: nn.Module | None = None) -> Iterator[None]:
    """While open, the random calls of a forward of the model draw what a replay with `key` draws.

    Everything else runs as it is; where the program has no random calls, there is nothing open.

    Args:
        program: says which calls draw random numbers.
        key: the random key.
        model: a copy of the program's model, if that is what runs.
    """
    if not program.random:
        yield
        return
    seeding = Seeding(model or program.model, program.is_open, key, program.random)
    with intercepted(seeding), seeding:
        yield


class Seeding(Recorder):
    """A recorder that records nothing: it counts calls, and seeds those that draw.

    Args:
        model: whose forward runs.
        is_open: whether a program looks inside the module of this name.
        key: the random key.
        random: the calls that draw, and whether they draw in Python, by their identities.
    """

    def __init__(
        self,
        model: nn.Module,
        is_open: Callable[[str], bool],
        key: Key,
        random: Mapping[int, bool],
    ) -> None:
        super().__init__(model, is_open, None)
        self._random = random
        self._drawn = key

    def check_function(self, function: type) -> None:
        """Does nothing: outside of a recording any `autograd.Function` may be applied."""

    def check_assignment(self, module: nn.Module, name: str) -> None:
        """Anything may be assigned to."""

    def _check_sizes(self, leaves: Any) -> None:
        """Any size may be asked for."""

    def _record(
        self,
        target: str | Callable[..., Any],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        hidden: tuple[str, ...] = (),
    ) -> Any:
        self._inside += 1
        try:
            identity = self._identify(Call(target, (), {}, self._open[-1]))
            in_python = self._random.get(identity)
            if in_python is None:
                return function(*args, **kwargs)
            drawing = draw_in_python if in_python else draw
            return drawing(self._drawn, identity, function, *args, **kwargs)
        finally:
            self._inside -= 1
