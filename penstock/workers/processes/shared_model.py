"""A model whose tensors the driver shares with its worker processes.

Every worker has the parameters and buffers of its stages in memory that it shares with the driver,
whose own tensors are moved there. So what one changes, the other sees: an optimizer's step on the
worker, `load_state_dict` and `clip_grad_norm_` on the driver. Gradients are put where the driver
wants them at the end of each pass. Workers at the same place of different replicas share all of
this, so they know tensors by the same numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from penstock.devices.kinds import kind_of
from penstock.errors import InputError
from penstock.links.segment import Segment, TensorPlace, alone, fill, place_of
from penstock.links.slots import Slots
from penstock.torch_internals import storage_uses
from penstock.workers.ownership import conflict
from penstock.workers.tensors import Shared, described, hooks_of_tensors

_OWN = 2  # references to a tensor that is in one list, as `sys.getrefcount` counts
_ALONE = storage_uses(torch.empty(1))
_REQUIRES_GRAD = attrgetter("requires_grad")
_VERSION = attrgetter("_version")
with torch.inference_mode(False):
    _NEVER_CHANGES = torch.empty(0, device="cpu")

CHANGED = 2
"""In place of 1 for a gradient that a parameter had before the pass, which has added to it."""

Grant = Callable[[int, int], int]
"""Sends the workers at a place a file descriptor; returns the number under which they have it."""


@dataclass(frozen=True)
class Package:
    """Tensors for a worker that are in one segment.

    Attributes:
        grant: the number under which the worker has the segment's file descriptor; -1 for tensors
            on a device other than the CPU, which are in no segment.
        size: the size of the segment in bytes.
        tensors: the tensors.
    """

    grant: int
    size: int
    tensors: list[Shared]


@dataclass(frozen=True)
class Crossing:
    """Weights that cross links between workers; messages name each by a number common to both.

    Attributes:
        numbers: for every link, by the stage before it, the common numbers of the weights that
            cross it; under each the number by which the worker knows the weight, or `None` if it
            is another worker's.
        others: weights of other workers that this one does not see yet, under common numbers.
    """

    numbers: Mapping[int, Mapping[int, int | None]]
    others: Sequence[Package]


@dataclass(frozen=True)
class SharedLocation:
    """Where a tensor of the driver is that workers share.

    Attributes:
        tensor: the tensor.
        segment: in which it is, with its file descriptor; `None` on a device other than the CPU.
        place: where in it.
        address: of its first element in this process, when it came there.
    """

    tensor: torch.Tensor
    segment: Segment | None
    place: TensorPlace
    address: int

    @property
    def is_current(self) -> bool:
        """Whether the tensor is still there."""
        return self.tensor.data_ptr() == self.address


NewSlot = tuple[int, int, list[TensorPlace], Sequence[Any]]
"""A segment's grant and size, the places in it, and the tensors that are not in it but shared."""


@dataclass(frozen=True)
class Gradients:
    """What a worker has to know of the gradients before a pass.

    Attributes:
        slot: the number of the slot for them.
        new_slot: if the slot is new, its segment's grant and size, the places in it, and the
            gradients that are not in it, as they are on a device other than the CPU. At the last
            place is a byte for each parameter: whether its gradient is present.
        present: the numbers of the parameters that have a gradient now.
        requires_grad: for every parameter, if that has changed.
        written: the numbers of tensors that the driver has changed in place since the last message.
        crossing: the common numbers of weights of other workers, among those that it sees, that the
            driver has changed in place since the last message.
    """

    slot: int = -1
    new_slot: NewSlot | None = None
    present: tuple[int, ...] = ()
    requires_grad: tuple[bool, ...] | None = None
    written: tuple[int, ...] = ()
    crossing: tuple[int, ...] = ()


@dataclass
class _Versions:
    """How often tensors were changed in place.

    Attributes:
        tensors: the tensors.
        counting: the tensors whose versions are read: an inference tensor, which has no version,
            is replaced by one that never changes.
        sent: the versions that were last sent to the workers.
        known: the versions that the workers certainly know.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    counting: list[torch.Tensor] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    known: list[int] = field(default_factory=list)

    def add(self, tensor: torch.Tensor) -> None:
        """Watch one more tensor; its present version counts as sent and known."""
        self.tensors.append(tensor)
        self.counting.append(_NEVER_CHANGES if tensor.is_inference() else tensor)
        self.sent.append(self.counting[-1]._version)
        self.known.append(self.sent[-1])

    def replace(self, number: int, tensor: torch.Tensor) -> None:
        """Watch another tensor in the place of one."""
        self.tensors[number] = self.counting[number] = tensor
        self.sent[number] = self.known[number] = tensor._version

    def written(self) -> tuple[int, ...]:
        """The indices of the tensors that were changed in place since the last call."""
        now = list(map(_VERSION, self.counting))
        if now == self.sent:
            return ()
        before, self.sent = self.sent, now
        return tuple(k for k, version in enumerate(before) if version != now[k])

    def confirm(self) -> None:
        """Note that what was sent has arrived."""
        self.known = list(self.sent)

    def resend(self) -> None:
        """Take it that what was sent and not confirmed is lost."""
        self.sent = list(self.known)


_Layouts = tuple[list[int], list[torch.Size], list[tuple[int, ...]]]


def _layouts_of(tensors: Collection[torch.Tensor]) -> _Layouts:
    """Where each of these tensors begins, its shape and its strides."""
    begins, shapes = map(torch.Tensor.data_ptr, tensors), map(torch.Tensor.size, tensors)
    return list(begins), list(shapes), list(map(torch.Tensor.stride, tensors))


@dataclass
class _Part:
    """The tensors of the workers at a place, and the slots for their gradients.

    On CPUs, a pass adds to the gradients in a slot as long as these are what the last one has left;
    otherwise it has another slot, of which nobody uses the memory any more. On another device each
    gradient has memory of its own, and there is one slot. It is replaced by a new one once the user
    keeps a gradient that is in it, or has changed what it is.
    """

    device: torch.device
    versions: _Versions = field(default_factory=_Versions)  # of the tensors
    crossing: _Versions = field(default_factory=_Versions)  # of other workers' that they see
    parameters: list[nn.Parameter] = field(default_factory=list)
    places: list[TensorPlace] = field(default_factory=list)  # of the gradients, and `present`
    size: int = 0  # of all that
    slots: Slots[Segment] = field(default_factory=lambda: Slots(Segment))
    slot: int = -1
    memory: memoryview | None = None  # of that slot
    requires_grad: tuple[bool, ...] = ()
    addresses: list[int] = field(default_factory=list)  # of the tensors
    hooks: list[Any] = field(default_factory=list)  # of them all
    _gradients: list[torch.Tensor] = field(default_factory=list)
    _layouts: _Layouts = field(default_factory=partial(_layouts_of, ()))  # as they were made
    given: set[int] = field(default_factory=set)  # those that parameters have had, by index
    present_before: tuple[int, ...] = ()  # those that parameters had before the pass
    _made_slots: int = 0  # on a device other than the CPU

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that the workers at this place have, in the order of their numbers."""
        return self.versions.tensors

    def gradients(self) -> list[torch.Tensor]:
        """One for every parameter in the slot's memory, in the order of `parameters`."""
        if not self._are_in_segments or self.memory is None:
            return self._gradients
        if not self._gradients:
            self._have(alone(self.memory, self.places[:-1]))
        return self._gradients

    def _have(self, gradients: list[torch.Tensor]) -> None:
        """Have these gradients from now on, of which no parameter has any yet."""
        self._gradients, self._layouts, self.given = gradients, _layouts_of(gradients), set()

    def lay_out(self) -> None:
        """Have other parameters than before, or more."""
        self.parameters = [t for t in self.tensors if isinstance(t, nn.Parameter)]
        self.places, self.size = _consecutive(self.parameters if self._are_in_segments else [])
        present = torch.empty(len(self.parameters), dtype=torch.uint8)
        self.places.append(place_of(present, self.size))
        self.size = self.places[-1].end
        self.let_go()
        self.slot, self.slots = -1, Slots(Segment)

    def renew(
        self, found: Sequence[torch.Tensor | None], grant: Callable[[int], int]
    ) -> NewSlot | None:
        """Have a slot for the gradients of the next pass, which is the last one's if that suits.

        Args:
            found: the gradients of the parameters.
            grant: sends the workers a file descriptor.

        Returns:
            what they have to know of it, if it is new to them.
        """
        if self.slot >= 0 and self._suits(found):
            return None
        self.let_go()  # whoever else refers to them now keeps their memory
        if not self.parameters:
            return None
        if self._are_in_segments:
            self.slot, segment, is_new = self.slots.lend(self.size)
        else:
            self.slot = -1  # unless there is memory for all of it
            self._have(self._made())
            segment, is_new = Segment(self.size), True
            self.slot, self._made_slots = self._made_slots, self._made_slots + 1
        self.memory = segment.borrow()
        if not is_new:
            return None
        shared = [kind_of(self.device).shared(gradient) for gradient in self._gradients]
        new = grant(segment.fd), segment.size, self.places, shared
        segment.close()
        return new

    @property
    def _are_in_segments(self) -> bool:
        return self.device.type == "cpu"

    def _made(self) -> list[torch.Tensor]:
        """Memory for the gradients of all parameters that have or require one."""
        with torch.inference_mode(False):
            return [_room_for(parameter) for parameter in self.parameters]

    def _suits(self, found: Sequence[torch.Tensor | None]) -> bool:
        """Whether the next pass can use the current slot, as nothing else uses its memory.

        Args:
            found: the gradients of the parameters.
        """
        known = self._gradients
        left = [k for k in self.given if found[k] is not known[k]]
        if self._are_in_segments and all(gradient is None for gradient in found):
            return False
        return (
            not any(sys.getrefcount(known[k]) > _OWN for k in left)
            and not any(storage_uses(known[k]) > _ALONE for k in left)
            and not any(known[k].requires_grad or known[k].__dict__ for k in left)
            and self._layouts == _layouts_of(known)
            and (self._are_in_segments or self._has_room(found))
        )

    def _has_room(self, found: Sequence[torch.Tensor | None]) -> bool:
        """Whether there is memory for the gradient of every parameter that has or requires one."""
        rooms = map(torch.Tensor.numel, self._gradients)
        pairs = zip(self.parameters, rooms, found, strict=True)
        return all(
            room or (gradient is None and not parameter.requires_grad)
            for parameter, room, gradient in pairs
            if parameter.numel()
        )

    def note(self, present: Sequence[bool]) -> None:
        """Write into the slot for every parameter whether it has a gradient."""
        if self.memory is not None:
            self.present()[:] = bytes(present)

    def present(self) -> memoryview:
        """A byte for each parameter in the slot: whether it has a gradient there, see `CHANGED`."""
        first = self.places[-1].offset if self.places else 0
        return (self.memory or memoryview(b""))[first : first + len(self.parameters)]

    def let_go(self) -> None:
        """Drop the references to the slot that this part had."""
        self._have([])
        self.memory = None


class SharedModel:
    """The driver's side.

    Args:
        devices: of the workers of a replica.
        replicas: how many there are.
        grant: sends them memory.
        memories: where workers that were there before have shared tensors, by id; these stay there.

    Attributes:
        memories: where all tensors are that were ever shared, by id.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        replicas: int,
        grant: Grant,
        memories: Mapping[int, SharedLocation] | None = None,
    ) -> None:
        self.memories = dict(memories or {})
        self._grant = grant
        self._is_replicated = replicas > 1
        self._is_renewed = False
        self._has_inference = False
        self._parts = [_Part(device) for device in devices]
        self._owners: dict[int, tuple[int, int]] = {}  # by id: the place, and its number there
        self._crossing: dict[int, int] = {}  # by id: the numbers of those that several see

    def number(self, place: int, tensor: Any) -> int | None:
        """The number by which the workers at a place know a tensor."""
        owner, number = self._owners.get(id(tensor), (None, None))
        return number if owner == place else None

    def tensors(self, place: int) -> Sequence[torch.Tensor]:
        """The tensors of the workers at a place, by number."""
        return self._parts[place].tensors

    def numbers(self, place: int, tensors: Sequence[torch.Tensor] | None) -> list[int] | None:
        """The numbers of those tensors that the workers at a place know; `None` stays `None`."""
        if tensors is None:
            return None
        found = (self.number(place, tensor) for tensor in tensors)
        return [number for number in found if number is not None]

    def names(self, place: int, names: Mapping[int, str]) -> dict[int, str]:
        """The names of the tensors of the workers at a place, by number; `names` has all, by id."""
        tensors = enumerate(self._parts[place].tensors)
        return {number: names[id(t)] for number, t in tensors if id(t) in names}

    def share(self, place: int, tensors: Iterable[torch.Tensor]) -> list[Package]:
        """Move tensors to where the workers at a place see them; those that are there stay.

        Raises:
            InputError: another worker has one, or one is not on the worker's device.
        """
        part = self._parts[place]
        known = (t for t in tensors if self._owners.get(id(t), (-1, 0))[0] != place)
        new = list({id(tensor): tensor for tensor in known}.values())
        if not new:
            return []
        for tensor in new:
            self._check(tensor, place)
        self._move([tensor for tensor in new if not self._is_shared(tensor)])
        packages: dict[int, Package] = {}
        for tensor in new:
            memory, number = self.memories[id(tensor)], len(part.tensors)
            package = self._package(place, memory.segment, packages)
            shared = described(number, tensor, memory.place)
            if memory.segment is None:
                shared = replace(shared, shared=kind_of(tensor.device).shared(tensor))
            package.tensors.append(shared)
            part.versions.add(tensor)
            self._has_inference |= tensor.is_inference()
            part.addresses.append(memory.address)
            self._owners[id(tensor)] = place, number
        part.hooks += hooks_of_tensors(new)
        part.lay_out()
        return list(packages.values())

    def give_up(self, place: int, tensors: Iterable[torch.Tensor]) -> None:
        """Let workers elsewhere share tensors that those at this place have for optimizers alone.

        These go on mapping the memory, but no longer get gradients.
        """
        part = self._parts[place]
        owned = [(self.number(place, tensor), tensor) for tensor in tensors]
        leaving = {number: tensor for number, tensor in owned if number is not None}
        if not leaving:
            return
        for number, tensor in leaving.items():
            part.versions.replace(number, _stand_in(tensor))
            part.addresses[number] = part.tensors[number].data_ptr()
            del self._owners[id(tensor)]
        part.hooks = hooks_of_tensors(part.tensors)
        part.lay_out()

    def _package(
        self, place: int, segment: Segment | None, packages: dict[int, Package]
    ) -> Package:
        """That of these packages in which the tensors of a segment go to the workers at a place."""
        if id(segment) not in packages:
            grant = -1 if segment is None else self._grant(place, segment.fd)
            packages[id(segment)] = Package(grant, segment.size if segment else 0, [])
        return packages[id(segment)]

    def show(self, place: int, links: Mapping[int, Sequence[torch.Tensor]]) -> Crossing:
        """Let messages between the workers at a place and others name weights, and not copy them.

        Tensors that are not in shared memory are left out, and so are those on devices other than
        the CPU.

        Args:
            place: of the workers.
            links: by the stage before a link, the weights that cross it, of the workers at this
                place or of others.
        """
        part = self._parts[place]
        numbers: dict[int, dict[int, int | None]] = {stage: {} for stage in links}
        packages: dict[int, Package] = {}
        for stage, tensor in ((stage, t) for stage, tensors in links.items() for t in tensors):
            if not self._is_shared(tensor) or tensor.device.type != "cpu":
                continue
            common = self._crossing.setdefault(id(tensor), len(self._crossing))
            numbers[stage][common] = self.number(place, tensor)
            is_new = not any(tensor is known for known in part.crossing.tensors)
            if numbers[stage][common] is None and is_new:
                memory = self.memories[id(tensor)]
                package = self._package(place, memory.segment, packages)
                place_of_it = memory.place._replace(requires_grad=False)
                package.tensors.append(Shared(common, place_of_it, False, {}, ((), ())))
                part.crossing.add(tensor)
        return Crossing(numbers, list(packages.values()))

    def _is_shared(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is where workers that were there before have shared it."""
        memory = self.memories.get(id(tensor))
        return memory is not None and memory.tensor is tensor and memory.is_current

    def _move(self, tensors: Sequence[torch.Tensor]) -> None:
        """Move tensors to memory that can be shared, one behind the other.

        Those on devices other than the CPU stay where they are.
        """
        for tensor in tensors:
            if tensor.device.type != "cpu":
                own = SharedLocation(tensor, None, place_of(tensor, 0), tensor.data_ptr())
                self.memories[id(tensor)] = own
        tensors = [tensor for tensor in tensors if tensor.device.type == "cpu"]
        if not tensors:
            return
        places, size = _consecutive(tensors)
        segment = Segment(max(1, size))
        for tensor, place, memory in zip(tensors, places, segment.tensors(places), strict=True):
            fill(memory, tensor)
            tensor.data = memory
            self.memories[id(tensor)] = SharedLocation(tensor, segment, place, memory.data_ptr())

    def _check(self, tensor: torch.Tensor, place: int) -> None:
        if id(tensor) in self._owners:
            raise conflict(tensor, self._owners[id(tensor)][0], place)
        if tensor.device != self._parts[place].device:
            raise InputError(
                f"a parameter or buffer of shape {tuple(tensor.shape)} is on {tensor.device}, and "
                f"its worker process on {self._parts[place].device}: build a new pipeline after "
                "moving a model"
            )

    def check(self, place: int) -> None:
        """Notice what the user has replaced, and not only changed.

        Raises:
            InputError: a tensor has other memory, or other hooks, which the worker does not see.
        """
        part = self._parts[place]
        if hooks_of_tensors(part.tensors) != part.hooks:
            raise InputError(
                "hooks of a parameter were registered or removed after the pipeline was built, "
                "which its worker process does not see; register them before, or use "
                'workers="threads"'
            )
        self.check_memory(place)

    def check_memory(self, place: int) -> None:
        """Notice that the model has left the memory that the workers at this place see.

        Raises:
            InputError: it has.
        """
        part = self._parts[place]
        if list(map(torch.Tensor.data_ptr, part.tensors)) == part.addresses:
            return
        for tensor, address in zip(part.tensors, part.addresses, strict=True):
            if tensor.data_ptr() != address:
                raise InputError(
                    f"a parameter or buffer of shape {tuple(tensor.shape)}, {tensor.dtype} on "
                    f"{tensor.device}, was given other memory after the pipeline was built (by "
                    "model.to(), .half(), .data = ..., or another pipeline of it), which its "
                    "worker process does not see. Copy values into it instead "
                    "(tensor.data.copy_(...)), or build a new pipeline"
                )

    def before(self, place: int) -> Gradients:
        """Prepare the slot for the gradients of the next pass, and describe it for the worker.

        Gradients that parameters have already are copied to it, if they are elsewhere.
        """
        part = self._parts[place]
        found = [parameter.grad for parameter in part.parameters]
        new_slot = part.renew(found, partial(self._grant, place))
        self._is_renewed |= new_slot is not None
        are_present = [gradient is not None for gradient in found]
        present = tuple([k for k, is_present in enumerate(are_present) if is_present])
        slots = part.gradients() if present else []
        others = [k for k in present if found[k] is not slots[k]]
        given = [gradient for gradient in map(found.__getitem__, others) if gradient is not None]
        copies = [gradient.detach().clone() for gradient in given]  # they may be in other slots
        for k, gradient in zip(others, copies, strict=True):
            part.parameters[k].grad = slots[k].copy_(gradient)
        part.note(are_present)
        part.present_before = present
        part.given.update(present)
        requires_grad = tuple(map(_REQUIRES_GRAD, part.parameters))
        changed = requires_grad != part.requires_grad
        part.requires_grad = requires_grad
        changed_to = requires_grad if changed else None
        written, crossing = part.versions.written(), part.crossing.written()
        crossing = tuple(self._crossing[id(part.crossing.tensors[k])] for k in crossing)
        return Gradients(part.slot, new_slot, present, changed_to, written, crossing)

    def renewed(self) -> bool:
        """Whether there were new slots since this was last asked."""
        is_renewed, self._is_renewed = self._is_renewed, False
        return is_renewed

    def stepped(self, place: int, parameters: Iterable[torch.Tensor]) -> None:
        """Let autograd here know that a worker changes these in place, right after `before`."""
        changed = [p for p in parameters if p.grad is not None]
        if self._has_inference:
            changed = [p for p in changed if not p.is_inference()]
        torch.autograd.graph.increment_version(changed)
        if not self._is_replicated:  # else this worker knows of the changes, but others do not
            self._parts[place].versions.written()

    def confirm(self) -> None:
        """All that was sent to the workers has arrived."""
        for part in self._parts:
            part.versions.confirm()
            part.crossing.confirm()

    def resend(self) -> None:
        """Take it that the workers know nothing of all this: what was sent may be lost."""
        for part in self._parts:
            part.let_go()
            part.slot, part.slots, part.requires_grad = -1, Slots(Segment), ()
            part.versions.resend()
            part.crossing.resend()

    def during(self, place: int) -> list[torch.Tensor]:
        """What `after` needs, while the pass runs: a gradient for every parameter."""
        return self._parts[place].gradients()

    def after(self, place: int, gradients: Sequence[torch.Tensor]) -> None:
        """Let the parameters have those of these gradients that the pass has left."""
        part = self._parts[place]
        present = part.present().tolist()
        added_to = [gradients[k] for k in part.present_before if present[k] == CHANGED]
        torch.autograd.graph.increment_version(added_to)
        part.given.update(compress(range(len(present)), present))
        for parameter, gradient, there in zip(part.parameters, gradients, present, strict=True):
            if there:
                parameter.grad = gradient
            elif parameter.grad is not None:
                parameter.grad = None  # a hook has dropped it


def _consecutive(tensors: Iterable[torch.Tensor]) -> tuple[list[TensorPlace], int]:
    """Places for tensors, one behind the other."""
    places, size = [], 0
    for tensor in tensors:
        place = place_of(tensor, size)
        size = place.end
        places.append(place)
    return places, size


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A frozen tensor of the same kind, without entries."""
    with torch.inference_mode(False):
        empty = tensor.new_empty(0)
    return nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty


def _room_for(parameter: nn.Parameter) -> torch.Tensor:
    """Memory for a parameter's gradient, with its strides; empty if it has and requires none."""
    shape, stride = parameter.shape, parameter.stride()
    if not parameter.requires_grad and parameter.grad is None:
        shape, stride = torch.Size([0]), (1,)
    return torch.empty_strided(shape, stride, dtype=parameter.dtype, device=parameter.device)
