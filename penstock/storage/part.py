"""What one worker writes of a checkpoint, at once or in the background."""

from __future__ import annotations

import io
import os
import re
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from penstock.storage.folder import FileEntry, entry, sync

Tensors = Mapping[str, torch.Tensor]
"""Parameters and buffers, by the model's names for them."""

States = Mapping[str, Mapping[Any, Any]]
"""What optimizers remember: by the names under which they are saved, by the parameters' names."""


WHOLE = (("training", "pt"), ("random", "pt"), ("plan", "json"))
"""The files of a save that one process writes for all, and their endings."""
_PARTS = (("model", "safetensors"), ("optimizer", "pt"), ("part", "json"))


class Note(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker says of its part when it is on the disk, or cannot be.

    Attributes:
        files: those that it has written, by name.
        weights: for every tensor the name of its file.
        bytes: of all tensors.
        error: why the part could not be written.
    """

    files: dict[str, FileEntry] = {}
    weights: dict[str, str] = {}
    bytes: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Part:
    """A worker's part of a save.

    Attributes:
        folder: of the checkpoint.
        number: of the save.
        index: which part, from 0.
        count: how many parts there are.
    """

    folder: str
    number: int
    index: int
    count: int

    def path(self, what: str, ending: str) -> Path:
        """The file for `what`, `model-000007-00001-of-00002.safetensors` for instance."""
        place = f"{self.index + 1:05d}-of-{self.count:05d}"
        return Path(self.folder) / f"{what}-{self.number:06d}-{place}.{ending}"

    @property
    def note(self) -> Path:
        """The file that says that the part is written: what there is, or why there is not."""
        return self.path("part", "json")

    @property
    def scratch(self) -> Path:
        """The note before it is moved into place."""
        return self.note.with_name(f".{self.note.name}.new")

    @property
    def workplace(self) -> Path:
        """A folder for the weights as they are being written, by a library that needs more files.

        safetensors writes to a temporary file beside the one that it is asked for, of a name that
        nobody could list beforehand.
        """
        weights = self.path("model", "safetensors")
        return weights.with_name(f".{weights.name}.new")

    def save(self, tensors: Tensors, states: States, background: bool) -> threading.Thread | None:
        """Write it, and then the note. If it cannot be written, the note says so.

        Args:
            tensors: of this worker.
            states: of this worker's parameters.
            background: copy everything and return.

        Returns:
            the thread that writes it in the background.
        """
        if not background:
            self._try(tensors, states)
            return None
        copies = copied(tensors), copied(states)
        writer = threading.Thread(target=self._try, args=copies, name="penstock-part")
        writer.start()
        return writer

    def _try(self, tensors: Tensors, states: States) -> None:
        weights, optimizers = self.path("model", "safetensors"), self.path("optimizer", "pt")
        try:
            note = self._write(tensors, states, weights, optimizers)
        except Exception as error:
            note = Note(
                error=f"part {self.index + 1} of {self.count} of the checkpoint {self.folder} "
                f"cannot be written: {_reason(error)}. A checkpoint before it is "
                "untouched"
            )
            shutil.rmtree(self.workplace, ignore_errors=True)
            for path in (weights, optimizers):  # if the disk is full, the note needs room
                path.unlink(missing_ok=True)
        self.scratch.write_bytes(msgspec.json.encode(note))  # names that are listed, see `Folder`
        self.scratch.replace(self.note)

    def _write(self, tensors: Tensors, states: States, weights: Path, optimizers: Path) -> Note:
        """Write weights and optimizer states to the disk; returns the note for them."""
        files: dict[str, FileEntry] = {}
        if tensors:
            self.workplace.mkdir()
            new = self.workplace / weights.name
            save_file(_apart(tensors), os.fspath(new), {"format": "pt"})
            sync(new)
            new.replace(weights)
            self.workplace.rmdir()
            files[weights.name] = entry(weights)
        if any(states.values()):
            found = on_cpu(compact(plain(states)))
            _check_loads(found)
            torch.save(found, optimizers)
            sync(optimizers)
            files[optimizers.name] = entry(optimizers)
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        return Note(files, dict.fromkeys(tensors, weights.name), size)


def names_of_save(workers: int, number: int) -> list[str]:
    """The names of all files that a save may write.

    Args:
        workers: how many write a part; there may be one part more, of what no worker has.
        number: of the save.
    """
    found = [f"{what}-{number:06d}.{ending}" for what, ending in WHOLE]
    for count in (workers, workers + 1):
        for index in range(count):
            part = Part("", number, index, count)
            found += [part.path(what, ending).name for what, ending in _PARTS]
            found += [part.scratch.name, part.workplace.name]
    return found


def _reason(error: Exception) -> str:
    """Why a file cannot be written, in words."""
    if "inline_container" in str(error):  # torch.save keeps what the system said to itself
        return "torch.save could not write all of it; the disk may be full, or a quota reached"
    return f"{type(error).__name__}: {error}"


def plain(value: Any) -> Any:
    """With Python's own numbers instead of numpy's, which `torch.load` takes for code."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (dict, OrderedDict):
        items = {plain(key): plain(item) for key, item in value.items()}
        versions = versions_of(value)
        return items if versions is None else with_versions(items, plain(dict(versions)))
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    return value


def versions_of(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The versions of modules that a state dict has, by their names."""
    found: Mapping[str, Any] | None = getattr(state, "_metadata", None)
    return found


def with_versions(
    state: Mapping[str, Any], versions: Mapping[str, Any] | None
) -> OrderedDict[str, Any]:
    """A state dict that has the versions of modules; some refuse to load one without."""
    found = OrderedDict(state)
    if versions is not None:
        vars(found)["_metadata"] = OrderedDict(versions)
    return found


def _check_loads(states: States) -> None:
    """Raise if a load, which runs no code, could not read what `torch.save` writes of these.

    Raises:
        TypeError: it could not.
    """
    buffer = io.BytesIO()
    torch.save(_mapped(states, lambda tensor: torch.empty(0, dtype=tensor.dtype)), buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        raise TypeError(
            "an optimizer remembers more than plain data (numbers, texts, tensors, and lists, "
            f"tuples and dictionaries of them): {error_in_short(error)}"
        ) from error


def error_in_short(error: Exception) -> str:
    """What `torch.load` finds wrong, most often data that would run code."""
    code = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"it has a {code[1]}" if code else lines[0]


def copied(value: Any) -> Any:
    """With tensors of their own, on the CPU, in the containers that there are."""
    return _mapped(value, lambda tensor: tensor.detach().to("cpu", copy=True))


def on_cpu(value: Any) -> Any:
    """With tensors of the CPU: what reads a file may have no device of another kind."""
    return _mapped(value, lambda tensor: tensor.detach().cpu())


def compact(value: Any) -> Any:
    """As `torch.save` should write it: of a tensor that is part of a larger one just that part."""

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.numel() * tensor.element_size()
        is_view = tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > size
        return tensor.detach().clone() if is_view else tensor.detach()

    return _mapped(value, whole)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (dict, OrderedDict):
        items = {key: _mapped(item, change) for key, item in value.items()}
        versions = versions_of(value)
        return items if versions is None else with_versions(items, versions)
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, change) for item in value)
    return value


def _apart(tensors: Tensors) -> dict[str, torch.Tensor]:
    """On the CPU, contiguous, and each in memory of its own."""
    found: dict[str, torch.Tensor] = {}
    addresses: set[int] = set()
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        if own.data_ptr() in addresses:
            own = own.clone()
        addresses.add(own.data_ptr())
        found[name] = own
    return found
