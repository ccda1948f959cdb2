"""`Checkpoint`: a saved training run in a folder, and how it is restored."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import Optimizer

from penstock.checkpoint.contents import (
    DATA,
    GENERATOR,
    OPTIMIZER,
    STATE,
    StateNames,
    groups_of,
    names_of,
    unlike,
    use_generators,
)
from penstock.errors import CheckpointError, InputError
from penstock.files import is_inside
from penstock.plan import Plan
from penstock.runner import Runner
from penstock.storage.folder import INDEX, Index, checked, is_begun, read_index
from penstock.storage.part import error_in_short, versions_of, with_versions
from penstock.workers.saving import TIMEOUT

_MANY = 5  # differences that a message lists
_EXTRA_STATE = "_extra_state"  # ends the name of what a module's get_extra_state() returns


def load(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint that `Pipeline.save` has written.

    Weights and optimizer state are read, and their checksums verified, only when needed. No code
    from the files is run.

    Args:
        path: the folder.

    Raises:
        CheckpointError: there is no checkpoint, or it is incomplete.
    """
    return Checkpoint(Path(path))


@runtime_checkable
class Restorable(Protocol):
    """What restoring needs of a pipeline."""

    model: nn.Module
    _runner: Runner


class Checkpoint:
    """A saved training run. Reading it needs neither a pipeline nor the model.

    Args:
        path: the folder.

    Attributes:
        path: the folder.
        number: the number of the save; every save to this folder gets a higher one.
        batches: the number of batches that the pipeline had trained on.
        random_state: the pipeline's, see `Pipeline.random_state`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        while True:
            index = _index_at(path)
            self._weights, self._files, self.number = index.weights, index.files, index.number
            try:
                self._check_sizes()
                break
            except CheckpointError:
                if _index_at(path).number == index.number:
                    raise  # else a save has replaced it meanwhile
        training = self._pickled(self._name("training"))
        self._model: StateNames = training["model"]
        self.batches: int = training["batches"]
        # Earlier versions saved the count alone; the seed is then that of the generators.
        self.random_state: dict[str, int] = training.get("random_state", {"trained": self.batches})
        self._things: dict[str, tuple[str, Any]] = training["things"]

    def _check_sizes(self) -> None:
        for name, entry in self._files.items():
            file = self.path / name
            if not is_inside(self.path, name):
                raise CheckpointError(
                    f"{file} is a link to {file.resolve()}, outside of the checkpoint. If you "
                    "trust it, copy the file into the folder"
                )
            size = file.stat().st_size if file.exists() else None
            if size != entry["size"]:
                found = "is missing" if size is None else f"has {size} bytes"
                raise CheckpointError(
                    f"the checkpoint {self.path} is incomplete: {name} {found}, and was written "
                    f"with {entry['size']}. Copy the whole folder, or use another checkpoint"
                )

    # -- what is in it --------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """The names of what was saved with the model, such as `"optimizer"`."""
        return tuple(self._things)

    @property
    def data(self) -> dict[str, Any]:
        """The plain data that was saved, by name."""
        found = {name: value for name, (kind, value) in self._things.items() if kind == DATA}
        return copy.deepcopy(found)

    @property
    def plan(self) -> Plan:
        """The plan of the saved run. A restored run may use another one."""
        return Plan.load(checked(self.path / self._name("plan"), self._files[self._name("plan")]))

    def model_state(self) -> dict[str, Any]:
        """The model's state dict, under the model's own names; tensors are on the CPU.

        Raises:
            CheckpointError: a file is damaged.
        """
        tensors: dict[str, torch.Tensor] = {}
        for file in dict.fromkeys(self._weights.values()):
            tensors |= load_file(checked(self.path / file, self._files[file]))
        tied, extras = self._model["tied"], self._model["extras"]
        names = [tied.get(name, name) for name in self._model["names"] if name not in extras]
        if missing := next((name for name in names if name not in tensors), None):
            raise CheckpointError(
                f"the checkpoint {self.path} is incomplete: no file has {missing!r}. Use another "
                "checkpoint"
            )
        state = {
            name: extras[name] if name in extras else tensors[tied.get(name, name)]
            for name in self._model["names"]
        }
        return with_versions(state, self._model.get("metadata"))

    def optimizer_state(self, name: str = "optimizer") -> dict[str, Any]:
        """A state dict for a plain optimizer with the same groups and order of parameters.

        `restore` matches parameters by name instead, so their order may differ.

        Raises:
            InputError: there is no such optimizer.
            CheckpointError: a file is damaged.
        """
        groups = self._thing(name, OPTIMIZER)
        return _numbered(groups, self._remembered(name), [group["params"] for group in groups])

    def state(self, name: str) -> Any:
        """The saved `state_dict()` of another object, or the state of a generator.

        Raises:
            InputError: nothing was saved under this name.
        """
        return copy.deepcopy(self._thing(name, STATE, GENERATOR))

    def __str__(self) -> str:
        size = sum(entry["size"] for entry in self._files.values())
        lines = [
            f"checkpoint {self.path}: save {self.number}, {size / 1e6:.1f} MB",
            f"  model: {len(self._model['names'])} tensors, after {self.batches} batches",
        ]
        for name, (kind, value) in self._things.items():
            lines.append(f"  {name}: {repr(value)[:60] if kind == DATA else kind}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r})"

    # -- putting it back ------------------------------------------------------------------

    def restore(self, target: Restorable | nn.Module, /, **things: Any) -> dict[str, Any]:
        """Restore the saved run, which then continues as if it had not been interrupted.

        This restores the model's state, the given objects, the random generators, and a pipeline's
        `random_state()`, and clears gradients. If something does not fit, nothing changes. Under
        torchrun all ranks must call it.

        Args:
            target: a pipeline, with any number of stages and kind of workers, or a plain model.
            **things: the objects to restore, under the names under which they were saved. Every
                saved object with a state must be given; `scheduler=None` leaves one out.

        Returns:
            the plain data that was saved, by name.

        Raises:
            InputError: names or shapes of the model differ, the groups of an optimizer differ, or
                an object is missing.
            CheckpointError: a file is damaged.
        """
        running = target if isinstance(target, Restorable) else None
        model = target if running is None else running.model
        if not isinstance(model, nn.Module):
            raise InputError(f"cannot restore {target!r}: give a Pipeline, or the plain model")
        runner = None if running is None else running._runner
        with nullcontext() if runner is None else runner.workers.operation("restore", TIMEOUT):
            self._check_names(things)
            state = self._fitting(model)
            loads = {name: self._load_of(model, name, thing) for name, thing in things.items()}
            foreign = [name for name in things if self._things[name][0] == STATE]
            generators = self._pickled(self._name("random"))
            place = 0 if runner is None else runner.workers.role.index
            # What is not of PyTorch's optimizers may refuse: if it does, nothing has changed.
            _load_all([(loads[name], things[name]) for name in foreign])
            model.load_state_dict(state, strict=False)
            for name in things:
                if name not in foreign:
                    loads[name]()
            model.zero_grad()
            use_generators(generators[place if place < len(generators) else 0])
            if runner is not None:
                runner.load_random_state(self.random_state)
        return self.data

    def _check_names(self, things: Mapping[str, Any]) -> None:
        with_state = {name for name, (kind, _) in self._things.items() if kind != DATA}
        listed = ", ".join(f"{name}=" for name in sorted(with_state)) or "nothing besides the model"
        left_out = {name for name, thing in things.items() if thing is None} & self._things.keys()
        if unknown := sorted(things.keys() - with_state - left_out):
            what = "plain data, which is returned" if unknown[0] in self._things else "not in it"
            raise InputError(
                f"cannot restore {unknown[0]}= from {self.path}: it is {what}. Give {listed}"
            )
        if missing := sorted(with_state - things.keys()):
            raise InputError(
                f"{self.path} also has {missing[0]}=, which was not given; give it, or "
                f"{missing[0]}=None to leave it out"
            )

    def _fitting(self, model: nn.Module) -> dict[str, Any]:
        """The state for this model, without tensors that are on `meta` here."""
        own, state = model.state_dict(keep_vars=True), self.model_state()
        wrong = [f"{name!r} is not in the model" for name in state if name not in own]
        wrong += [f"{name!r} is only in the model" for name in own if name not in state]
        for name in state.keys() & own.keys():
            if name.endswith(_EXTRA_STATE):  # which may be of any size
                continue
            theirs, mine = (getattr(found[name], "shape", None) for found in (state, own))
            if mine != theirs:
                wrong.append(f"{name!r} has shape {_shape(theirs)}, in the model {_shape(mine)}")
        if wrong:
            more = f", and {len(wrong) - _MANY} more" if len(wrong) > _MANY else ""
            raise InputError(
                f"{self.path} is of another model: {'; '.join(wrong[:_MANY])}{more}. "
                "model_state() gives what there is"
            )
        fitting = {n: v for n, v in state.items() if not getattr(own[n], "is_meta", False)}
        return with_versions(fitting, versions_of(state) or versions_of(own))

    def _load_of(self, model: nn.Module, name: str, thing: Any) -> Callable[[], Any]:
        """A function that restores one object."""
        kind, saved = self._things[name]
        if thing is None:
            return lambda: None
        if kind == OPTIMIZER and isinstance(thing, Optimizer):
            state = self._optimizer_for(name, thing, model)
            return lambda: thing.load_state_dict(state)
        if kind == GENERATOR and isinstance(thing, torch.Generator):
            return lambda: thing.set_state(saved)
        loads = getattr(thing, "load_state_dict", None)
        if kind == STATE and callable(loads) and not isinstance(thing, Optimizer):
            return lambda: loads(copy.deepcopy(saved))
        words = {OPTIMIZER: "an optimizer", GENERATOR: "a torch.Generator"}
        raise InputError(
            f"{name}= is a {type(thing).__name__}, which cannot load what {self.path} has under "
            f"that name, the state of {words.get(kind, 'an object with load_state_dict()')}"
        )

    def _optimizer_for(self, name: str, optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
        """The state of an optimizer whose groups have the same parameters, in any order."""
        groups = self._thing(name, OPTIMIZER)
        own = [group["params"] for group in groups_of(optimizer, names_of(model))]
        saved = [group["params"] for group in groups]
        if [set(group) for group in own] != [set(group) for group in saved]:
            sizes = [", ".join(str(len(group)) for group in part) for part in (own, saved)]
            raise InputError(
                f"{name}= has other groups than in {self.path}: groups of {sizes[0]} parameters, "
                f"there of {sizes[1]}. Create it with the same groups of the same parameters"
            )
        missing, other = unlike(optimizer, groups)
        if missing and other:
            raise InputError(
                f"{name}= is of another class than in {self.path}: it needs {', '.join(missing)}, "
                f"which are not there, and does not know {', '.join(other)}, which are. Create "
                "one of the class that was saved"
            )
        return _numbered(groups, self._remembered(name), own)

    # -- files ----------------------------------------------------------------------------

    def _thing(self, name: str, *kinds: str) -> Any:
        kind, value = self._things.get(name, ("", None))
        if kind not in kinds:
            having = [n for n, (k, _) in self._things.items() if k in kinds]
            raise InputError(
                f"{self.path} has no {kinds[0]} {name!r}; it has {', '.join(having) or 'none'}"
            )
        return value

    def _remembered(self, optimizer: str) -> dict[Any, Any]:
        """The state of an optimizer, by parameter names."""
        found: dict[Any, Any] = {}
        for file in self._files:
            if file.startswith("optimizer-"):
                found = self._pickled(file).get(optimizer, {}) | found
        return found

    def _name(self, what: str) -> str:
        found = next((name for name in self._files if name.startswith(f"{what}-")), None)
        if found is None:
            raise CheckpointError(
                f"the checkpoint {self.path} is incomplete: its index names no {what}-… file. Use "
                "another checkpoint"
            )
        return found

    def _pickled(self, name: str) -> Any:
        path = checked(self.path / name, self._files[name])
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(
                f"{path} cannot be read as plain data: {error_in_short(error)}. Use another "
                "checkpoint"
            ) from error


def _load_all(loads: Sequence[tuple[Callable[[], Any], Any]]) -> None:
    """Load the states of several things, or of none: those before one that refuses are put back.

    Args:
        loads: for each what loads it, and the thing.
    """
    done: list[tuple[Any, Any]] = []
    try:
        for load_one, thing in loads:
            if thing is not None:
                done.append((thing, copy.deepcopy(thing.state_dict())))
            load_one()
    except BaseException:
        for thing, before in reversed(done):
            with suppress(Exception):
                thing.load_state_dict(before)
        raise


def _index_at(path: Path) -> Index:
    """The index of a checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    if not (path / INDEX).is_file():
        what = "there is no such folder"
        if path.is_dir():
            begun = is_begun(path)
            what = "no save to it was completed" if begun else f"it has no {INDEX}"
        raise CheckpointError(f"there is no checkpoint {path}: {what}")
    index = read_index(path / INDEX)
    if index is None:
        raise CheckpointError(
            f"{path} has weights, but is not a checkpoint of Penstock; Pipeline(weights=...) reads "
            "weights alone"
        )
    return index


def _numbered(
    groups: Sequence[Mapping[str, Any]],
    remembered: Mapping[Any, Any],
    order: Sequence[Sequence[str]],
) -> dict[str, Any]:
    """An optimizer's state as `torch.optim` has it, for groups with parameters in this order."""
    places = {name: k for k, name in enumerate(name for group in order for name in group)}
    numbered = [
        {**group, "params": [places[name] for name in names]}
        for group, names in zip(groups, order, strict=True)
    ]
    return {
        "state": {places.get(key, key): values for key, values in remembered.items()},
        "param_groups": numbered,
    }


def _shape(shape: Any) -> str:
    return "none" if shape is None else str(tuple(shape))
