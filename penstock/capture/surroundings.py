"""What a forward is surrounded by while it is recorded: modes, settings and random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.capture.calls import Ambient, OutsideTorch, Unrecordable, ambient
from penstock.capture.randomness import Draws, next_in_python, seed_python
from penstock.devices.kind import DeviceKind
from penstock.devices.settings import TorchSettings
from penstock.torch_internals import saving


class Surroundings:
    """What the process was like when a forward began.

    Args:
        generators: torch's generators from which it may draw.
        kind: the kind of the model's devices, whose settings count as well; `None` if it has only
            CPUs.
        seeded: whether calls are given their own random numbers, so that Python must draw none
            between them.
    """

    def __init__(
        self, generators: Sequence[torch.Generator], kind: DeviceKind | None, seeded: bool
    ) -> None:
        self._kind = kind
        self._ambient, self._settings, self._saving = ambient(), TorchSettings.here(kind), saving()
        self._states = [generator.get_state() for generator in generators]
        self._seeded = seeded
        if seeded:
            seed_python(0)
            self._unused = next_in_python()
            seed_python(0)

    @property
    def casting(self) -> bool:
        """Whether the forward began under autocast."""
        return bool(self._ambient.casting)

    def other_ambient(self) -> Ambient | None:
        """The modes of this thread, if they are not those with which the forward began."""
        now = ambient()
        return None if now == self._ambient else now

    def check_settings(self, path: str) -> None:
        """Raise if the Python of this module has changed a setting of torch since the beginning.

        Raises:
            Unrecordable: it has, or it hangs hooks on what autograd saves for the backward.
        """
        if not _is_saving_as(self._saving):
            raise Unrecordable(
                path,
                "its Python hangs hooks on what is saved for the backward (saved_tensors_hooks)",
            )
        if changed := self._settings.changed_in(TorchSettings.here(self._kind)):
            raise Unrecordable(
                path,
                f"its Python changes a setting of torch for a part of it ({', '.join(changed)})",
            )

    def put_settings_back(self) -> None:
        """Put back what a forward that was broken off had changed, and did not in a `finally`."""
        if self._settings != TorchSettings.here(self._kind):
            self._settings.apply()

    def seed(self) -> None:
        """Seed Python's and numpy's generators anew, as a call may have drawn from them."""
        if self._seeded:
            seed_python(0)

    def check_draws(self, path: str) -> None:
        """Raise if the Python of this module has drawn random numbers since the last call."""
        if self._seeded and next_in_python() != self._unused:
            raise OutsideTorch(path, "its Python draws random numbers by itself")

    def check_began(self, draws: Draws, path: str) -> None:
        """Raise if the Python of this module had seeded a generator of torch before a call."""
        if self._seeded and not draws.began_at(self._states):
            raise Unrecordable(path, "its Python seeds a generator of torch")


def _is_saving_as(before: object) -> bool:
    """Whether what autograd saves goes through these hooks, or is merely moved to the CPU."""
    now = saving()
    moves = now is not None and now[0].__qualname__.startswith("save_on_cpu.")
    return moves or now == before
