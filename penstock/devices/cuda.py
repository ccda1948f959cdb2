"""CUDA: an accelerator, and what only CUDA has. ROCm calls itself CUDA as well."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from penstock.devices.accelerator import Accelerator
from penstock.devices.kind import Memory


class Cuda(Accelerator):
    """GPUs that PyTorch reaches by CUDA."""

    def __init__(self) -> None:
        super().__init__("cuda")

    def random_states(self) -> list[torch.Tensor]:
        """Those of all GPUs, once CUDA was used in this process."""
        return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def memory(self, device: torch.device) -> Memory:
        """As the driver says, of all processes together."""
        return Memory(*torch.cuda.mem_get_info(device))

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
