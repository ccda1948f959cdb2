"""What the driver and a worker process say to each other, pickled, on the socket between them."""

from __future__ import annotations

from typing import NamedTuple

from penstock.links.shared_memory import Lent


class Give(NamedTuple):
    """The driver gives a job.

    Attributes:
        dispatch: to which it belongs.
        job: packed, see `penstock.links.pickling.pack`.
        tensors: those in it.
    """

    dispatch: int
    job: bytes
    tensors: Lent


class GiveUp(NamedTuple):
    """The driver gives up this dispatch, and all before it."""

    dispatch: int


class Grant(NamedTuple):
    """The driver sends a file descriptor, which comes along; later jobs refer to it by number."""

    number: int


class Report(NamedTuple):
    """A worker says what has come of its job.

    Attributes:
        dispatch: to which the job belongs.
        failed: whether the value is what it has raised.
        value: packed, as a job is.
        tensors: those in it.
        leaves: whether the worker was asked to end, by a SIGTERM.
    """

    dispatch: int
    failed: bool
    value: bytes
    tensors: Lent
    leaves: bool
