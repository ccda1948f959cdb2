"""Models whose weights are not there yet, and where each stage's weights come from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from zipfile import is_zipfile

import torch
from safetensors import safe_open
from torch import nn
from torch.nn.parameter import is_lazy

from penstock.capture.attributes import find, named_tensors, put
from penstock.capture.meta import META, is_on_meta
from penstock.capture.randomness import Key, draw
from penstock.errors import InputError
from penstock.files import is_inside


@contextmanager
def empty_weights() -> Iterator[None]:
    """While open, new models have parameters without memory, on the `meta` device.

    Buffers, and whatever else a constructor computes, have their values. So a model that does not
    fit into memory can be built, captured, profiled and planned; `Pipeline(weights=...)` then gives
    each stage its own parameters. Not safe with several threads: `nn.Module` itself is patched.
    """
    register = nn.Module.register_parameter
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # tied ones are registered twice

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is None or parameter.is_meta or is_lazy(parameter):
            return
        if id(parameter) not in made:
            empty = nn.Parameter(parameter.detach().to(META), parameter.requires_grad)
            empty.__dict__.update(parameter.__dict__)
            made[id(parameter)] = parameter, empty
        module._parameters[name] = made[id(parameter)][1]

    nn.Module.register_parameter = register_on_meta  # type: ignore
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class Weights(Protocol):
    """A source of values for parameters and buffers on the `meta` device."""

    def materialise(self, model: nn.Module, names: Sequence[str], device: torch.device) -> None:
        """Put these of the model's tensors, which are on `meta`, on a device.

        Raises:
            InputError: one cannot be had.
        """


@dataclass(frozen=True)
class SeededWeights:
    """Initialises every module as its own `reset_parameters` does, and the model's `_init_weights`.

    A tied weight is initialised by the first module that holds it. Parameters that neither method
    sets, such as those of `nn.ParameterList`, cannot be initialised.

    The random numbers depend on the seed and the module's name alone, so the weights are the same
    for any number of stages.

    Attributes:
        seed: of the random numbers.
    """

    seed: int = 0

    def materialise(self, model: nn.Module, names: Sequence[str], device: torch.device) -> None:
        """Initialise the modules that hold these tensors."""
        for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
            module = model.get_submodule(path)
            own = {n: p for n, p in module._parameters.items() if p is not None}
            empty = {n: p for n, p in own.items() if p.is_meta}
            if not empty:
                continue
            made = {n: p.detach().clone() for n, p in own.items() if n not in empty}
            for old in empty.values():
                _put_everywhere(model, old, torch.full(old.shape, torch.nan, dtype=old.dtype))
            digest = hashlib.blake2b(path.encode(), digest_size=8).digest()
            identity = int.from_bytes(digest, "little")
            draw(Key(self.seed, 0, 0), identity, _initialise, model, module)
            for name, value in made.items():  # tied, and initialised by another module
                own[name].data.copy_(value)
            for name in empty:
                new = module._parameters[name]
                if new is None or bool(new.isnan().any()):
                    raise InputError(
                        f"{path}.{name} was not initialised: {type(module).__name__} has no "
                        "reset_parameters() that sets it, and the model no _init_weights(module). "
                        "Give weights= a file or a dictionary instead"
                    )
                _put_everywhere(model, new, new.detach().to(device))


def _initialise(model: nn.Module, module: nn.Module) -> None:
    with torch.no_grad():
        for name in ("reset_parameters", "_reset_parameters"):
            if callable(reset := getattr(module, name, None)):
                reset()
                break
        if callable(initialise := getattr(model, "_init_weights", None)):
            initialise(module)


class StoredWeights:
    """Reads each tensor of a state dict when it is needed.

    Args:
        names: the names that there are.
        read: gives the tensor of a name.
        what: what it is, for messages.
    """

    def __init__(
        self, names: Iterable[str], read: Callable[[str], torch.Tensor], what: str
    ) -> None:
        self._names = frozenset(names)
        self._read = read
        self._what = what

    def materialise(self, model: nn.Module, names: Sequence[str], device: torch.device) -> None:
        """Read these tensors; a buffer that has values gets those of the state dict, if it has any.

        Parameters that have values already are left as they are.
        """
        others = _aliases(model)
        found: dict[str, str | None] = {}
        for name in names:
            old = find(model, name)
            known = (n for n in (name, *others[id(old)]) if n in self._names)
            found[name] = next(known, None)
            if found[name] is None and old.is_meta:
                raise InputError(self._missing(name, isinstance(old, nn.Parameter)))
        for name, stored in found.items():
            old = find(model, name)
            if stored is None or (isinstance(old, nn.Parameter) and not old.is_meta):
                continue  # nothing to read, or set already, such as by way of another name
            tensor = self._read(stored)
            if tensor.shape != old.shape:
                raise InputError(
                    f"{stored!r} has shape {tuple(tensor.shape)} in {self._what}, but the model "
                    f"has {tuple(old.shape)}"
                )
            _put_everywhere(model, old, tensor.detach().to(device, old.dtype, copy=True))

    def _missing(self, name: str, is_parameter: bool) -> str:
        names = sorted(self._names)
        listed = ", ".join(map(repr, names[:3])) + (", …" if len(names) > 3 else "")
        text = f"{self._what} has no {name!r}, which is on the meta device; it has {listed}"
        if is_parameter:
            return text
        return (
            f"{text}. A buffer that no state dict holds keeps its values if the model is built "
            "within penstock.empty_weights()"
        )


def _put_everywhere(model: nn.Module, old: torch.Tensor, tensor: torch.Tensor) -> None:
    """Put a tensor wherever the model has `old`; as a parameter if that is one."""
    new = tensor
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(tensor, old.requires_grad)
        new.__dict__.update(old.__dict__)
    for name in _aliases(model)[id(old)]:
        put(model, name, new)


def _aliases(model: nn.Module) -> dict[int, list[str]]:
    """The names of every tensor, by its id."""
    names: dict[int, list[str]] = {}
    for name, tensor in named_tensors(model):
        names.setdefault(id(tensor), []).append(name)
    return names


def source_of(model: nn.Module, given: Any) -> Weights | None:
    """The source that the user means, if the model needs one.

    Args:
        model: with parameters on `meta`, or not.
        given: a state dict; or a file of one, written by `torch.save` or safetensors; or a
            directory or index of several safetensors files; or a `Weights`.

    Raises:
        InputError: it is something else, or there is no such file; or nothing is given and the
            model needs it, or the other way round.
    """
    if is_on_meta(model) != (given is not None):
        raise InputError(
            "weights= was given, but the model has no parameters on the meta device"
            if given is not None
            else "the model's parameters are on the meta device: give weights= a state dict, the "
            "path of its file, or penstock.SeededWeights(seed)"
        )
    if given is None:
        return None
    if isinstance(given, Mapping):
        return StoredWeights(given, given.__getitem__, "the state dict")
    if isinstance(given, (str, Path)):
        return _from_path(Path(given))
    if callable(getattr(given, "materialise", None)) and not isinstance(given, type):
        return given  # type: ignore[no-any-return]
    raise InputError(
        f"weights={given!r} is neither a state dict, nor the path of a file, nor "
        "penstock.SeededWeights()"
    )


def _from_path(path: Path) -> Weights:
    if path.is_dir():
        found = [
            *sorted(path.glob("*.safetensors.index.json")),
            *sorted(path.glob("*.safetensors")),
        ]
        if not found:
            raise InputError(f"the directory {path} holds no safetensors file")
        if found[0].suffix != ".json" and len(found) > 1:
            raise InputError(f"{path} holds {len(found)} safetensors files, but no index of them")
        path = found[0]
    if not path.is_file():
        raise InputError(f"there is no file {path} to read weights from")
    if path.suffix == ".json":
        return _from_index(path)
    if path.suffix == ".safetensors":
        handle = _safe_open(path)
        return StoredWeights(handle.keys(), handle.get_tensor, str(path))
    try:
        state = torch.load(path, map_location="cpu", mmap=is_zipfile(path), weights_only=True)
    except Exception as error:
        raise InputError(f"{path} is not a state dict for torch.load: {error}") from error
    if not isinstance(state, Mapping):
        raise InputError(f"{path} holds a {type(state).__name__}, not a state dict")
    return StoredWeights(state, state.__getitem__, str(path))


def _from_index(path: Path) -> Weights:
    """Several files, and an index that says which tensor is where."""
    places = _places_in(path)
    folder = path.parent
    # the cache of Hugging Face's hub: models--a--b/snapshots/1f3c/… are links to models--a--b/blobs
    blobs = [folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else []
    for file in dict.fromkeys(places.values()):
        if not is_inside(folder, file, blobs):
            raise InputError(
                f"{path} names the file {file!r}, which is outside of its folder. If you trust "
                "it, copy the file there"
            )
    handles: dict[str, Any] = {}

    def read(name: str) -> torch.Tensor:
        file = places[name]
        if file not in handles:
            handles[file] = _safe_open(folder / file)
        tensor: torch.Tensor = handles[file].get_tensor(name)
        return tensor

    return StoredWeights(places, read, str(path))


def _places_in(path: Path) -> dict[str, str]:
    """The file that each tensor is in, as an index says."""
    try:
        places = json.loads(path.read_text())["weight_map"]
        if not all(isinstance(text, str) for item in places.items() for text in item):
            raise TypeError("weight_map must have names of files")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not an index of weights: {error!r}") from error
    found: dict[str, str] = places
    return found


def _safe_open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except Exception as error:
        raise InputError(f"{path} is not a safetensors file: {error}") from error
