"""Tensors of simulated devices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.support.simulated.machine import (
    POISON,
    Block,
    DeviceFault,
    Handle,
    Machine,
    Stream,
    undisturbed,
)

aten = torch.ops.aten
_TO_HOST = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


class Current(threading.local):
    """What a thread's work goes to.

    Attributes:
        machine: the one that runs; the same for all threads.
        streams: of devices whose current stream is not the default one.
        device: the number of the current device.
    """

    def __init__(self) -> None:
        self.streams: dict[torch.device, Stream] = {}
        self.device = 0


class Running:
    """The machine that runs, and where threads give it work."""

    def __init__(self) -> None:
        self.machine: Machine | None = None
        self.current = Current()

    @property
    def here(self) -> Machine:
        """The machine."""
        if self.machine is None:
            raise RuntimeError("no simulated machine runs")
        return self.machine

    def stream(self, device: torch.device) -> Stream:
        """The calling thread's current stream of a device."""
        default = self.here.defaults[device.index or 0]
        stream = self.current.streams.get(default.device, default)
        return stream if stream in self.here.streams else default  # not of an earlier machine


RUNNING = Running()


class SimulatedTensor(torch.Tensor):
    """A tensor of a simulated device.

    Its own memory is that of the operators that run at once. The device's belongs to its storage,
    so tensors that share memory there share it here.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, shadow: torch.Tensor) -> SimulatedTensor:
        device = _device_of(shadow)
        make: Callable[..., Any] = torch.Tensor._make_subclass
        return make(cls, shadow, False, dispatch_device=True, device_for_backend_keys=device)

    @property
    def device(self) -> torch.device:
        return _device_of(self)

    def record_stream(self, stream: Stream) -> None:
        RUNNING.here.used_on(_block_of(self), stream)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        with torch.no_grad():
            copy = self.clone()
        copy.requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copy._is_param = True  # type: ignore[attr-defined]
        if self.grad is not None:
            copy.grad = self.grad.clone()
        memo[id(self)] = copy
        return copy

    def __repr__(self) -> str:  # type: ignore[override]
        return f"simulated({self.cpu()!r}, {self.device})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return _device_of(args[0])
        special = _SPECIAL.get(func)
        return (special or _operate)(func, *args, **(kwargs or {}))


def empty(
    size: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype, device: torch.device
) -> SimulatedTensor:
    """A tensor without values."""
    machine = RUNNING.here
    with undisturbed():
        shadow = torch.empty(size, dtype=dtype, device="cpu")
        if stride is not None:
            shadow = torch.empty_strided(size, stride, dtype=dtype, device="cpu")
    return _owned(shadow, RUNNING.stream(machine.devices[device.index or 0]))


def _owned(shadow: torch.Tensor, stream: Stream) -> SimulatedTensor:
    """A tensor with memory of its own on the stream's device."""
    storage: Any = shadow.untyped_storage()
    storage.handle = RUNNING.here.allocate(stream, storage.nbytes())
    return SimulatedTensor(shadow)


def _handle_of(tensor: torch.Tensor) -> Handle | None:
    return getattr(tensor.untyped_storage(), "handle", None)


def _block_of(tensor: torch.Tensor) -> Block:
    handle = _handle_of(tensor)
    assert handle is not None
    return handle.block


def _device_of(tensor: torch.Tensor) -> torch.device:
    return _block_of(tensor).stream.device


def _shadow(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor in the memory of the operators that run at once."""
    return _placed(tensor, tensor.untyped_storage())


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor in the device's memory."""
    return _placed(tensor, _block_of(tensor).memory)


def _placed(like: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    with undisturbed():
        plain = torch.empty(0, dtype=like.dtype)
        plain.set_(storage, like.storage_offset(), like.size(), like.stride())
        return plain.conj() if like.is_conj() else plain


def _is_simulated(value: object) -> bool:
    return isinstance(value, SimulatedTensor)


# -- operators in general -------------------------------------------------------------------------


def _operate(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator at once for its shapes, and put it on the current stream."""
    asked = kwargs.get("device")  # where `empty_like` and others make something new
    kwargs = {name: _here(value) for name, value in kwargs.items() if name != "pin_memory"}
    leaves, structure = tree_flatten((args, kwargs))
    own = [leaf for leaf in leaves if _is_simulated(leaf)]
    device = _one_device(func, leaves, own)
    if asked is not None and asked.type == "sim" and asked.index is not None:
        device = asked
    stream = RUNNING.stream(device)
    if _TO_HOST & set(func.tags):
        _wait_for(stream)
    before = _drawn_from(func, kwargs)
    shadows = [_shadow(leaf) if _is_simulated(leaf) else leaf for leaf in leaves]
    given = {id(s): leaf for s, leaf in zip(shadows, leaves, strict=True) if _is_simulated(leaf)}
    shadow_args, shadow_kwargs = tree_unflatten(shadows, structure)
    with undisturbed():
        found, results = tree_flatten(func(*shadow_args, **shadow_kwargs))
    outputs: list[Any] = []
    fresh: list[SimulatedTensor | None] = []
    for result in found:
        is_new = isinstance(result, torch.Tensor) and id(result) not in given
        is_new = is_new and _handle_of(result) is None
        output = given.get(id(result), result)
        if is_new:
            output = _owned(result, stream)
        elif output is result and isinstance(result, torch.Tensor):
            output = SimulatedTensor(result)
        outputs.append(output)
        fresh.append(output if is_new else None)
    for leaf, shadow in zip(leaves, shadows, strict=True):
        if _is_simulated(leaf):
            _follow(leaf, shadow)
    if func._schema.is_mutable or any(output is not None for output in fresh):
        work = _Work(func, leaves, structure, fresh, before)
        written = _written(func, args, kwargs)
        writes = [_block_of(t) for t in (*written, *fresh) if t is not None]
        name = str(func)
        unread = _unread(func, args)
        reads = [_block_of(t) for t in own if not any(t is other for other in unread)]
        RUNNING.here.launch(stream, name, work.run, reads, writes)
    return tree_unflatten(outputs, results)


def _unread(func: Any, args: Sequence[Any]) -> Sequence[Any]:
    """The arguments whose contents a kernel does not read."""
    if func is aten.native_batch_norm_backward.default:
        is_training, running = args[7], args[3:5]
        return running if is_training else ()
    return args if func in (aten.empty_like.default, aten.zeros_like.default) else ()


class _Work:
    """An operator that runs in the device's memory, when its turn comes."""

    def __init__(
        self,
        func: Any,
        leaves: Sequence[Any],
        structure: Any,
        fresh: Sequence[SimulatedTensor | None],
        generator: tuple[torch.Generator, torch.Tensor] | None,
    ) -> None:
        self._func, self._structure, self._generator = func, structure, generator
        self._leaves = [_given(leaf) for leaf in leaves]
        self._outputs = [None if output is None else _real(output) for output in fresh]

    def run(self) -> None:
        args, kwargs = tree_unflatten(self._leaves, self._structure)
        if self._generator is None:
            found = self._func(*args, **kwargs)
        else:
            generator, state = self._generator
            now = generator.get_state()
            generator.set_state(state)
            try:
                found = self._func(*args, **kwargs)
            finally:
                generator.set_state(now)
        for result, output in zip(tree_flatten(found)[0], self._outputs, strict=True):
            if output is not None:
                if result.shape != output.shape:
                    raise DeviceFault(f"{self._func} made {result.shape}, not {output.shape}")
                output.copy_(result)


def _given(leaf: Any) -> Any:
    """What a kernel is launched with: device memory; a number of the CPU as it is now."""
    if _is_simulated(leaf):
        return _real(leaf)
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _here(value: Any) -> Any:
    is_device = isinstance(value, torch.device) and value.type == "sim"
    return torch.device("cpu") if is_device else value


def _one_device(func: Any, leaves: Iterable[Any], own: Sequence[torch.Tensor]) -> torch.device:
    """The device of all these tensors."""
    devices = {_device_of(tensor) for tensor in own}
    if len(devices) != 1:
        raise DeviceFault(f"{func} cannot read the memory of {sorted(map(str, devices))} at once")
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and not _is_simulated(leaf) and leaf.dim():
            raise DeviceFault(f"{func} on {devices} cannot read a tensor of the CPU")
    return devices.pop()


def _drawn_from(func: Any, kwargs: Any) -> tuple[torch.Generator, torch.Tensor] | None:
    """The generator of an operator that draws random numbers, and its state now."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    generator = kwargs.get("generator") or torch.default_generator
    return generator, generator.get_state()


def _written(func: Any, args: Sequence[Any], kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an operator writes."""
    found = []
    for k, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[k] if k < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_flatten(value)[0] if _is_simulated(leaf)]
    return found


def _follow(tensor: torch.Tensor, shadow: torch.Tensor) -> None:
    """Give a tensor the shape that an operator in place has given it."""
    place = shadow.size(), shadow.stride(), shadow.storage_offset()
    if place != (tensor.size(), tensor.stride(), tensor.storage_offset()):
        block, size = _block_of(tensor), shadow.untyped_storage().nbytes()
        if block.memory.nbytes() < size:
            block.memory.resize_(size)
        internals: Any = torch._C
        before = internals._meta_in_tls_dispatch_include()
        with internals._DisableTorchDispatch():
            internals._set_meta_in_tls_dispatch_include(True)
            try:
                where = shadow.untyped_storage(), place[2], place[0], place[1]
                aten.set_.source_Storage_storage_offset(tensor, *where)
            finally:
                internals._set_meta_in_tls_dispatch_include(before)


def _wait_for(stream: Stream) -> None:
    stream.synchronize()


# -- what reads values, and copies ----------------------------------------------------------------


def _item(func: Any, tensor: torch.Tensor) -> Any:
    _wait_for(RUNNING.stream(_device_of(tensor)))
    RUNNING.here.host_reads(_block_of(tensor))
    with undisturbed():
        return func(_real(tensor))


def _equal(func: Any, one: torch.Tensor, other: torch.Tensor) -> bool:
    _wait_for(RUNNING.stream(_one_device(func, (one, other), (one, other))))
    for tensor in (one, other):
        RUNNING.here.host_reads(_block_of(tensor))
    with undisturbed():
        return bool(func(_real(one), _real(other)))


def _to_copy(func: Any, tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    own = _device_of(tensor)
    device = kwargs.get("device")
    if device is None or device == own or (device.type == "sim" and device.index is None):
        return _operate(func, tensor, **{k: v for k, v in kwargs.items() if k != "non_blocking"})
    non_blocking = kwargs.pop("non_blocking", False)
    dtype, layout = kwargs.get("dtype"), kwargs.get("memory_format") or torch.preserve_format
    with undisturbed():
        like = _shadow(tensor).to("meta").to(dtype or tensor.dtype, memory_format=layout)
    if device.type == "cpu":
        result = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
        result.untyped_storage().is_pinned_here = True  # type: ignore[attr-defined]
    else:
        result = empty(like.size(), like.stride(), like.dtype, device)
    return _copy(aten.copy_.default, result, tensor, non_blocking)


def _copy(
    func: Any, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    """A copy, as CUDA has them; between two devices both current streams wait for each other."""
    if not _is_simulated(source):
        return _from_cpu(target, source, non_blocking)
    if not _is_simulated(target):
        return _to_cpu(target, source, non_blocking)
    stream, other = (RUNNING.stream(_device_of(tensor)) for tensor in (source, target))
    if stream.device == other.device:
        return _operate(func, target, source)
    with undisturbed():
        func(_shadow(target), _shadow(source))
    stream.wait_stream(other)
    into, out_of = _real(target), _real(source)
    blocks = [_block_of(source)], [_block_of(target)]
    RUNNING.here.launch(stream, "copy", lambda: _put(into, out_of), *blocks)
    other.wait_stream(stream)
    return target


def _put(into: torch.Tensor, out_of: torch.Tensor) -> None:
    into.copy_(out_of)


def _from_cpu(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    with undisturbed():
        _shadow(target).copy_(source)
        is_late = is_pinned(source)
        read = source.detach() if is_late else source.detach().clone()
    stream, into = RUNNING.stream(_device_of(target)), _real(target)
    RUNNING.here.launch(stream, "upload", lambda: _put(into, read), (), [_block_of(target)])
    if is_late and not non_blocking:
        _wait_for(stream)
    return target


def _to_cpu(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    is_late = non_blocking and is_pinned(target)
    with undisturbed():
        into = target.detach()
        if is_late:
            whole = torch.empty(0, dtype=torch.uint8).set_(into.untyped_storage())
            whole.fill_(POISON)
    stream, out_of = RUNNING.stream(_device_of(source)), _real(source)
    RUNNING.here.launch(stream, "download", lambda: _put(into, out_of), [_block_of(source)], ())
    if not is_late:
        _wait_for(stream)
    return target


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether copies of a tensor of the CPU to devices are late."""
    return getattr(tensor.untyped_storage(), "is_pinned_here", False)


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor of the CPU for which that is so."""
    with undisturbed():
        copy = tensor.detach().clone()
    copy.untyped_storage().is_pinned_here = True  # type: ignore[attr-defined]
    return copy


_SPECIAL: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: _item,
    aten.equal.default: _equal,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy,
}
