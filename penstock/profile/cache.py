"""Profiles on disk: what was measured once for a model on this machine is not measured again."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Literal

import msgspec
import torch
from torch import nn

import penstock
from penstock.capture import Program
from penstock.capture.calls import ambient
from penstock.devices.kinds import accelerator
from penstock.devices.machine import processor
from penstock.devices.settings import TorchSettings
from penstock.display.terminal import Progress
from penstock.errors import InputError
from penstock.files import write_whole
from penstock.profile.data import VERSION, DeviceProfile, Profile
from penstock.profile.measure import SECONDS, not_measured, profiles

_MOST_FILES = 200
_MEASURED = (*Profile.__struct_fields__, *DeviceProfile.__struct_fields__)  # by this version
_OURS = re.compile(r"[0-9a-f]{32}\.json")  # see `cache_key`; others' files in there are theirs


class ProfileCache:
    """A directory of profiles. One that cannot be read or written is as good as an empty one.

    Args:
        directory: where; `cache_directory()` by default.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or cache_directory()

    def get(self, key: str) -> Profile | None:
        """The profile that was put there under this key; `None` if there is none that is whole."""
        data = self.read(key)
        try:
            return None if data is None else Profile.decode(data, "a file of the cache")
        except InputError:
            return None

    def put(self, key: str, costs: Profile) -> None:
        """Keep a profile."""
        self.write(key, costs.encode())

    def read(self, key: str) -> bytes | None:
        """What was written under this key, if it is there."""
        if self._directory is None:
            return None
        path = self._path(self._directory, key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        with suppress(OSError):
            os.utime(path)  # the newest are kept
        return data

    def write(self, key: str, data: bytes) -> None:
        """Keep something under this key; the files that were not used for longest go."""
        if self._directory is None:
            return
        with suppress(OSError):
            self._directory.mkdir(parents=True, exist_ok=True)
            write_whole(self._path(self._directory, key), data)
            own = (path for path in self._directory.iterdir() if _OURS.fullmatch(path.name))
            files = sorted(own, key=lambda path: path.stat().st_mtime)
            for path in files[:-_MOST_FILES]:
                path.unlink(missing_ok=True)

    def _path(self, directory: Path, key: str) -> Path:
        return directory / f"{key}.json"


def cache_directory() -> Path | None:
    """`$PENSTOCK_CACHE`, or `penstock` in `$XDG_CACHE_HOME` or `~/.cache`; in it, `profiles`.

    `None` where nobody has a home.
    """
    if named := os.environ.get("PENSTOCK_CACHE"):
        return Path(named) / "profiles"
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches) / "penstock" / "profiles"
    try:
        return Path.home() / ".cache" / "penstock" / "profiles"
    except RuntimeError:
        return None


def cached_profiles(
    program: Program,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    choices: Sequence[tuple[Sequence[str], int]],
    num_microbatches: int | Literal["auto"] = "auto",
    seconds: float = SECONDS,
    longer: float = 0.0,
    inference: bool = False,
    progress: Progress | None = None,
    cache: ProfileCache | None = None,
    fresh: bool = False,
) -> tuple[list[Profile], bool]:
    """Like `profiles`, but from the cache if all of them were measured together before.

    Args:
        program, args, kwargs, choices, num_microbatches, seconds, inference: as of `profiles`.
        longer: if this is more than `seconds`, profiles that were measured for this many seconds
            are taken from the cache as well, and preferred.
        progress: called as the measurement goes on, or once if nothing is measured.
        cache: where profiles are kept; the user's cache by default.
        fresh: measure in any case, and replace what is in the cache.

    Returns:
        the profiles, and whether they came from the cache.

    Raises:
        InputError: the batch does not fit the program, or has fewer rows than micro-batches.
    """
    kept = cache or ProfileCache()
    leaves = program.flatten_inputs(args, kwargs or {}) if args or kwargs else program.example
    others: list[Any] = list(choices) if len(choices) > 1 else []
    others += ["inference"] if inference else []

    def keys(seconds: float) -> list[str]:
        return [
            cache_key(program, leaves, [*devices, num_microbatches, threads, seconds, *others])
            for devices, threads in choices
        ]

    for length in dict.fromkeys([max(longer, seconds), seconds]) if not fresh else ():
        found = [costs for key in keys(length) if (costs := kept.get(key)) is not None]
        if len(found) == len(choices):
            if progress:
                progress(1, 1, "profiled before, kept in the cache")
            known = [
                not_measured(program, devices, threads, costs.one_replica)
                for costs, (devices, threads) in zip(found, choices, strict=True)
            ]
            pairs = zip(found, known, strict=True)
            return [msgspec.structs.replace(costs, **own) for costs, own in pairs], True
    found = profiles(
        program,
        args,
        kwargs,
        choices=choices,
        num_microbatches=num_microbatches,
        seconds=seconds,
        inference=inference,
        progress=progress,
    )
    for key, costs in zip(keys(seconds), found, strict=True):
        kept.put(key, costs)
    return found, False


def cache_key(program: Program, leaves: Sequence[Any], settings: Sequence[Any]) -> str:
    """A name for everything that a measurement depends on.

    Args:
        program: what is measured.
        leaves: the inputs of a batch; of tensors only what they are counts, not their values.
        settings: what else was given, with the devices among it.
    """
    model = program.model
    described = [
        *map(str, TorchSettings.here(accelerator())),
        *(f"{device} {dtype}" for device, dtype in ambient().casting),
        program.fingerprint,
        repr(model),  # what closed modules are made of, as far as they say
        [_made_of(module) for module in model.modules()],
        [(name, _describe(p)) for name, p in model.named_parameters(remove_duplicate=False)],
        [_describe(leaf) for leaf in leaves],
        settings,
    ]
    return hashed(described)


def hashed(described: Sequence[Any]) -> str:
    """A name for what is described, as this version measures it on this machine."""
    of_here = ["penstock", penstock.__version__, VERSION, "torch", str(torch.__version__)]
    every = [*of_here, _MEASURED, _machine(), *described]
    return hashlib.sha256(msgspec.json.encode(every)).hexdigest()[:32]


_PLAIN = (bool, int, float, str)
_NAMED = (type, FunctionType, BuiltinFunctionType, MethodType)


def _made_of(module: nn.Module) -> list[str]:
    """A module's code and settings: what a closed one does is in no recording."""
    forward = getattr(type(module), "forward", None)  # one of torch.jit has none
    code = getattr(forward, "__code__", None)
    settings = [
        f"{name}={value if isinstance(value, _PLAIN) else value.__qualname__}"
        for name, value in sorted(vars(module).items())
        if name != "training" and isinstance(value, (*_PLAIN, *_NAMED))
    ]
    body = "" if code is None else f"{code.co_code.hex()} {code.co_names}"
    constants = () if code is None else code.co_consts
    plain = [c for c in constants if isinstance(c, (bool, int, float, str, tuple))]
    return [type(module).__qualname__, body, repr(plain), *settings]


def _describe(leaf: object) -> str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    layout = leaf.stride() if leaf.layout is torch.strided else leaf.layout
    return f"{leaf.dtype} {tuple(leaf.shape)} {layout} {leaf.requires_grad} {leaf.is_meta}"


def _machine() -> str:
    """The processors of this machine, by their names."""
    kind = accelerator()
    names = [kind.name(device) for device in kind.devices()] if kind else []
    return f"{processor()}, {len(os.sched_getaffinity(0))} cores, {', '.join(names)}"
