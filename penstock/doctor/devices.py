"""torch and the devices that it finds. Run as a process: prints findings as JSON."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from penstock.devices.cores import flushes_denormal
from penstock.devices.cuda import Cuda
from penstock.devices.kinds import accelerator, all_devices
from penstock.devices.settings import TorchSettings
from penstock.doctor.findings import Finding, made, size
from penstock.errors import InputError
from penstock.profile.cache import cache_directory
from penstock.workers.ranks.rendezvous import check_is_alone, is_torchrun

_PROBE = 64  # rows and columns of what is computed twice


def torch_itself() -> Iterator[Finding]:
    """The build of torch, and torchvision beside it."""
    kind = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    if getattr(torch.version, "hip", None):
        kind = f"ROCm {torch.version.hip}"
    capability = torch.backends.cpu.get_cpu_capability()
    threads = torch.get_num_threads()
    found = f"{torch.__version__}, {kind} build, {capability}, {threads} intra-op threads"
    yield Finding("torch", "ok", found)
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return
    except (RuntimeError, ImportError, OSError) as error:
        channel = (
            "cpu" if torch.version.cuda is None else f"cu{torch.version.cuda}".replace(".", "")
        )
        yield Finding(
            "torchvision",
            "warning",
            f"does not fit this torch: {str(error).splitlines()[0]}. Penstock's commands work "
            "around that, a script that imports torchvision or transformers fails",
            "pip install --force-reinstall --no-deps torchvision --index-url "
            f"https://download.pytorch.org/whl/{channel}",
        )
    else:
        yield Finding("torchvision", "ok", str(sys.modules["torchvision"].__version__))


def accelerators() -> Iterator[Finding]:
    """The GPUs, or why there are none."""
    kind = Cuda()
    devices = kind.devices()
    if not devices:
        driver = Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None
        if driver and torch.version.cuda is None:
            yield Finding(
                "devices",
                "warning",
                "cpu; this machine has NVIDIA's driver, but torch is a build without CUDA",
                "install torch with CUDA: see https://pytorch.org/get-started/locally",
            )
        elif driver and os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            hidden = os.environ["CUDA_VISIBLE_DEVICES"]
            yield Finding("devices", "info", f"cpu; CUDA_VISIBLE_DEVICES={hidden!r} hides the GPUs")
        elif driver:
            yield Finding(
                "devices",
                "problem",
                "cpu; this machine has NVIDIA's driver, but torch cannot use a GPU",
                "run nvidia-smi; the driver may be too old for this torch, or the container was "
                "started without --gpus all",
            )
        else:
            yield Finding("devices", "ok", "cpu")
        yield from _others()
        return
    for device in devices:
        free, total = kind.memory(device)
        major, minor = kind.capability(device)
        is_known, known = kind.has_kernels(device), ", ".join(kind.architectures())
        yield Finding(
            str(device),
            "ok" if is_known else "problem",
            f"{kind.name(device)}, {size(free)} of {size(total)} are free, compute capability "
            f"{major}.{minor}",
            "" if is_known else f"this torch has no kernels for sm_{major}{minor}: {known}",
        )
    if len(devices) > 1:
        yield from _peers(kind)
    if nccl := kind.nccl():
        yield Finding("NCCL", "ok", nccl)


def _peers(kind: Cuda) -> Iterator[Finding]:
    pairs = combinations(range(kind.count()), 2)
    without = [f"{a}-{b}" for a, b in pairs if not kind.are_peers(a, b)]
    yield Finding(
        "peer access",
        "warning" if without else "ok",
        f"not between {', '.join(without)}" if without else "between all GPUs",
        "values go by way of the CPU's memory there; put neighbouring stages on other pairs"
        if without
        else "",
    )
    names = {kind.name(device) for device in kind.devices()}
    if len(names) > 1:
        yield Finding(
            "kinds of GPU",
            "warning",
            f"{', '.join(sorted(names))}: bits depend on which of them runs a stage",
            "for the bits of one device, use GPUs of one kind (CUDA_VISIBLE_DEVICES)",
        )


def _others() -> Iterator[Finding]:
    """Accelerators that are not CUDA's."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is not None:
        count, is_used = torch.accelerator.device_count(), accelerator() is not None
        yield Finding(
            "accelerator",
            "info",
            f"{count} of {found.type}, which pipelines {'use' if is_used else 'do not use'}",
            "" if is_used else "PyTorch has no streams for it; stages run on the CPU",
        )


def numerics() -> Iterator[Finding]:
    """Settings on which bits depend, and whether kernels give the same bits twice."""
    settings = TorchSettings.here()
    precisions = sorted({each for each in settings.precisions if each})
    yield Finding(
        "numerics",
        "info",
        f"float32 precision {', '.join(precisions)}; denormal numbers are "
        f"{'flushed to 0' if flushes_denormal() else 'kept'}; oneDNN is "
        f"{'on' if settings.mkldnn else 'off'}",
    )
    devices = all_devices()
    for device in devices:
        is_same = _twice(device)
        what = "the same bits twice" if is_same else "other bits the second time"
        yield Finding(
            f"exactness on {device}",
            "ok" if is_same else "warning",
            f"a convolution and a matrix product, with their backwards: {what}",
            ""
            if is_same
            else "torch.use_deterministic_algorithms(True), with CUBLAS_WORKSPACE_CONFIG=:4096:8",
        )
    if len(devices) > 1 and not torch.are_deterministic_algorithms_enabled():
        yield Finding(
            "determinism",
            "info",
            "some CUDA kernels add in any order, so their results are not the same twice, with or "
            "without a pipeline",
            "for the same bits call torch.use_deterministic_algorithms(True), and set "
            "CUBLAS_WORKSPACE_CONFIG=:4096:8",
        )


def _twice(device: torch.device) -> bool:
    """Whether two runs of the same calls on a device give bitwise equal gradients."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(4, 3, 16, 16, generator=generator).to(device)
    kernel = torch.randn(8, 3, 3, 3, generator=generator).to(device)
    matrix = torch.randn(8 * 14 * 14, _PROBE, generator=generator).to(device)
    results = []
    for _ in range(2):
        own = [each.clone().requires_grad_() for each in (kernel, matrix)]
        hidden = torch.nn.functional.conv2d(images, own[0]).flatten(1)
        results.append(torch.autograd.grad((hidden @ own[1]).square().mean(), own))
    return all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def distributed() -> Iterator[Finding]:
    """What carries values between machines, and whether this process is a rank."""
    if not dist.is_available():
        yield Finding(
            "torch.distributed",
            "warning",
            "this torch was built without it",
            "for torchrun, install a build with it; threads and processes do not need it",
        )
        return
    asked = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
    }
    there = [name for name, is_there in asked.items() if is_there]
    yield Finding(
        "torch.distributed",
        "ok" if "gloo" in there else "warning",
        f"backends: {', '.join(there) or 'none'}",
        "" if "gloo" in there else "ranks need gloo: install a build of torch with it",
    )
    if is_torchrun():
        yield Finding("launched by", "ok", "torchrun: every rank is a worker of one pipeline")
        return
    try:
        check_is_alone()
    except InputError as error:
        what, _, to_do = str(error).partition(". ")
        yield Finding("launched by", "warning", what, to_do)
    else:
        yield Finding("launched by", "ok", "no launcher: the script drives all workers")


def cache() -> Iterator[Finding]:
    """Where profiles are kept."""
    folder = cache_directory()
    if folder is None:
        yield Finding(
            "profile cache",
            "warning",
            "there is no home folder, so every run measures its model again",
            "set PENSTOCK_CACHE to a folder",
        )
        return
    above = next(each for each in (folder, *folder.parents) if each.exists())
    files = [path for path in folder.glob("*.json") if path.is_file()] if folder.is_dir() else []
    total = sum(path.stat().st_size for path in files)
    can_write = above.is_dir() and os.access(above, os.W_OK)
    yield Finding(
        "profile cache",
        "ok" if can_write else "warning",
        f"{folder}, {len(files)} profiles, {size(total)}{'' if can_write else ', not writable'}",
        "" if can_write else "every run measures its model again; set PENSTOCK_CACHE to a folder",
    )


CHECKS = (torch_itself, accelerators, numerics, distributed, cache)

if __name__ == "__main__":
    print(msgspec.json.encode(list(made("torch", CHECKS))).decode())
