"""CUDA: an accelerator, and what only CUDA has. ROCm calls itself CUDA as well."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from operator import attrgetter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from penstock.devices.accelerator import MAKING_STREAMS, Accelerator
from penstock.devices.kind import DeviceMemory, Event, GraphRecorder, Recording
from penstock.torch_internals import end_allocating

T = TypeVar("T")

_Pool = Any
"""Names memory of PyTorch's caching allocator; the type has no public name."""

_ONE_AT_A_TIME = threading.Lock()  # for recordings: a device that records cannot be waited for


class Cuda(Accelerator):
    """GPUs that PyTorch reaches by CUDA."""

    can_record = True
    can_share = True

    def __init__(self) -> None:
        super().__init__("cuda")

    def settings(self) -> tuple[str, ...]:
        """Those of cuDNN, of cuBLAS, and of attention."""
        return tuple(map(_said, _SETTINGS))

    def set_settings(self, settings: Sequence[str]) -> None:
        """Set those that differ: several names may stand for one setting."""
        for setting, wanted in zip(_SETTINGS, settings, strict=True):
            if wanted and _said(setting) != wanted:
                _set(setting, wanted)

    def shared(self, tensor: torch.Tensor) -> Any:
        """By an IPC handle, as in `torch.multiprocessing`."""
        return _Shared(tensor)

    def new_shared_event(self, device: torch.device) -> Event:
        """By an IPC handle; the device is the current one while it is made."""
        with self.on(device):
            event = _SharedEvent(interprocess=True)
            event.ipc_handle()  # which makes it
        return event

    def identity(self, device: torch.device) -> str:
        """Its UUID, which differs for the parts of a GPU."""
        return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))

    def release_shared(self) -> None:
        """PyTorch looks for such memory only now and then."""
        torch.cuda.ipc_collect()

    def recorder(self, device: torch.device) -> GraphRecorder:
        """By CUDA graphs."""
        return _Recorder(device)

    def random_states(self) -> list[torch.Tensor]:
        """Those of all GPUs, once CUDA was used in this process."""
        return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def memory(self, device: torch.device) -> DeviceMemory:
        """As the driver says, of all processes together."""
        return DeviceMemory(*torch.cuda.mem_get_info(device))

    def has_kernels(self, device: torch.device) -> bool:
        """Whether this build of PyTorch has kernels for a GPU of this architecture."""
        known = self.architectures()
        major = torch.cuda.get_device_properties(device).major
        return not known or any(each.startswith(f"sm_{major}") for each in known)

    def architectures(self) -> list[str]:
        """Those that this build has kernels for, such as `sm_90`."""
        return torch.cuda.get_arch_list()

    def capability(self, device: torch.device) -> tuple[int, int]:
        """The compute capability of a GPU."""
        properties: Any = torch.cuda.get_device_properties(device)
        return properties.major, properties.minor

    def are_peers(self, one: int, other: int) -> bool:
        """Whether two GPUs, by number, reach each other's memory without the CPU's."""
        return torch.cuda.can_device_access_peer(one, other)

    def nccl(self) -> str:
        """The version of NCCL; empty if this build has none."""
        if not (dist.is_available() and dist.is_nccl_available()):
            return ""
        version = torch.cuda.nccl.version()
        return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


_SETTINGS = (
    *("cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic", "cudnn.allow_tf32"),
    *("cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision", "cuda.matmul.fp32_precision"),
    *("cuda.matmul.allow_tf32", "cuda.matmul.allow_fp16_accumulation"),
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    *("cuda.preferred_blas_library", "cuda.preferred_linalg_library"),
    *("cuda.flash_sdp_enabled", "cuda.mem_efficient_sdp_enabled", "cuda.math_sdp_enabled"),
    "cuda.cudnn_sdp_enabled",
)


def _said(setting: str) -> str:
    """What `torch.backends` says of a setting; nothing if it is set in another way as well."""
    try:
        found = attrgetter(setting)(torch.backends)
        return str(found() if callable(found) else found)
    except (AttributeError, RuntimeError):
        return ""


class _Shared:
    """A tensor that is pickled as an IPC handle."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()

    def __reduce__(self) -> Any:
        return reductions.reduce_tensor(self._tensor)


class _SharedEvent(torch.cuda.Event):
    """An event that is pickled as an IPC handle."""

    def __reduce__(self) -> Any:
        return _opened_event, (self.device.index, self.ipc_handle())


def _opened_event(index: int, handle: bytes) -> Event:
    """The event of another process, on the GPU that has this number in both."""
    event: Event = torch.cuda.Event.from_ipc_handle(torch.device("cuda", index), handle)
    return event


def _set(setting: str, wanted: str) -> None:
    """Set one of `torch.backends` to what `_said` says of it."""
    path, _, name = setting.rpartition(".")
    owner = attrgetter(path)(torch.backends)
    if name.endswith("_sdp_enabled"):
        getattr(owner, f"enable_{name.removesuffix('_enabled')}")(wanted == "True")
    elif name.startswith("preferred_"):
        getattr(owner, name)(wanted.rpartition(".")[2].lower())
    else:
        setattr(owner, name, {"True": True, "False": False}.get(wanted, wanted))


class _Recorder:
    """Records CUDA graphs of one GPU.

    Other threads may go on: they are not recorded. What autograd's thread for the GPU does is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with MAKING_STREAMS:
            self._stream = torch.cuda.Stream(device, priority=-1)  # no copies are on such a one

    def record(
        self,
        work: Callable[[Sequence[AbstractContextManager[None]]], T],
        generators: int = 0,
        after: Recording | None = None,
        alone: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> tuple[T, Recording]:
        """See `GraphRecorder`."""
        graph = torch.cuda.CUDAGraph()
        memory = after.memory if isinstance(after, _Graph) else torch.cuda.graph_pool_handle()
        drawn_from = [torch.Generator(self._device) for _ in range(generators)]
        for generator in drawn_from:
            graph.register_generator_state(generator)
        opened = [self._drawing_from(generator) for generator in drawn_from]
        with _ONE_AT_A_TIME, torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                with alone():
                    self._begin(graph, memory)
                try:
                    torch.zeros(1, device=self._device)  # a recording of views alone is warned of
                    made = work(opened)
                    graph.capture_end()
                except BaseException:
                    self._give_up(graph, memory)
                    raise
            current.wait_stream(self._stream)
        return made, _Graph(graph, memory, drawn_from)

    def _begin(self, graph: torch.cuda.CUDAGraph, memory: _Pool) -> None:
        """Begin to record, and let other threads draw from the GPU's generator as ever.

        A graph takes for its own what that draws from as it begins.
        """
        usual = self._usual
        before = usual.graphsafe_get_state()
        usual.graphsafe_set_state(usual.clone_state())
        try:
            graph.capture_begin(memory, capture_error_mode="thread_local")
        finally:
            usual.graphsafe_set_state(before)

    @contextmanager
    def _drawing_from(self, generator: torch.Generator) -> Iterator[None]:
        """While open, torch functions draw from this one on the GPU."""
        usual = self._usual
        before = usual.graphsafe_get_state()
        usual.graphsafe_set_state(generator.graphsafe_get_state())
        try:
            yield
        finally:
            usual.graphsafe_set_state(before)

    @property
    def _usual(self) -> torch.Generator:
        return torch.cuda.default_generators[torch.cuda.current_device()]

    def _give_up(self, graph: torch.cuda.CUDAGraph, memory: _Pool) -> None:
        """End a recording that has failed, so that the GPU can be used as before."""
        with suppress(RuntimeError):
            graph.capture_end()
        with suppress(RuntimeError):
            end_allocating(torch.cuda.current_device(), memory)


class _Graph:
    """A CUDA graph, the pool that its memory is from, and the generators that it draws from."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, memory: _Pool, generators: Sequence[torch.Generator]
    ) -> None:
        self._graph, self.memory, self._generators = graph, memory, generators

    def replay(self, seeds: Sequence[int] = ()) -> None:
        """See `Recording`."""
        for generator, seed in zip(self._generators, seeds, strict=True):
            generator.manual_seed(seed)
        self._graph.replay()
