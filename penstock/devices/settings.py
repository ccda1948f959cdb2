"""The settings of torch that change what is computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from penstock.devices.kind import DeviceKind
from penstock.devices.kinds import kind_of
from penstock.torch_internals import nnpack_is_used

_BACKENDS = [
    getattr(torch.backends.mkldnn, name)
    for name in ("matmul", "conv", "rnn")
    if hasattr(torch.backends.mkldnn, name)
]

TF32 = 2.0**-10
"""The machine epsilon of TF32."""

_ROUNDINGS = {"high": TF32, "tf32": TF32} | dict.fromkeys(
    ("medium", "bf16"), torch.finfo(torch.bfloat16).eps
)
"""By how `torch` names a precision; the others round as float32 does."""

_ATTENTIONS = [
    name
    for name in ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
    if hasattr(torch.backends.cuda, f"{name}_enabled")
]
"""Ways to compute attention; the settings hold for all kinds of devices."""


class TorchSettings(NamedTuple):
    """The settings of torch that users may change at any time, and that change what is computed.

    Attributes:
        dtype: the default dtype.
        precisions: the precision of float32 matrix products, `""` if backends differ; then those of
            oneDNN's matrix products, convolutions and recurrent networks, as far as torch has them.
        deterministic: whether only deterministic algorithms are used, and whether others only warn.
        anomaly: whether autograd's anomaly detection is on, and whether it looks for NaN.
        mkldnn: whether oneDNN is used, and whether its algorithms are deterministic.
        nnpack: whether NNPACK is used.
        attention: which ways to compute it are allowed, as by `torch.nn.attention.sdpa_kernel`.
        kind: the type of the accelerator that is used; `"cpu"` if there is none.
        of_kind: the settings of that kind, see `DeviceKind.settings`.
    """

    dtype: torch.dtype
    precisions: tuple[str, ...]
    deterministic: tuple[bool, bool]
    anomaly: tuple[bool, bool]
    mkldnn: tuple[bool, bool]
    nnpack: bool
    attention: tuple[bool, ...]
    kind: str = "cpu"
    of_kind: tuple[str, ...] = ()

    @classmethod
    def here(cls, kind: DeviceKind | None = None) -> TorchSettings:
        """Those of this process, and of a kind of device."""
        return cls(
            torch.get_default_dtype(),
            (_precision(), *(backend.fp32_precision for backend in _BACKENDS)),
            _deterministic(),
            (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            (bool(torch.backends.mkldnn.enabled), bool(torch.backends.mkldnn.deterministic)),
            nnpack_is_used(),
            _attention(),
            *((kind.type, kind.settings()) if kind else ()),
        )

    def changed_in(self, other: TorchSettings) -> list[str]:
        """The names of the settings that differ in `other`."""
        return [n for n, a, b in zip(self._fields, self, other, strict=True) if a != b]

    def apply(self) -> None:
        """Apply these settings to this process."""
        torch.set_default_dtype(self.dtype)
        general, *others = self.precisions
        if general:
            torch.set_float32_matmul_precision(general)
        for backend, precision in zip(_BACKENDS, others, strict=True):
            backend.fp32_precision = precision
        if self.deterministic != _deterministic():  # to set it imports much of torch
            enabled, warns = self.deterministic
            torch.use_deterministic_algorithms(enabled, warn_only=warns)
        torch.set_anomaly_enabled(*self.anomaly)
        torch.backends.mkldnn.set_flags(*self.mkldnn)
        torch.backends.nnpack.set_flags(self.nnpack)
        for name, allowed in zip(_ATTENTIONS, self.attention, strict=True):
            getattr(torch.backends.cuda, f"enable_{name}")(allowed)
        kind_of(self.kind).set_settings(self.of_kind)


@contextmanager
def with_autograd() -> Iterator[None]:
    """While open, autograd works as outside of `torch.no_grad()` and `torch.inference_mode()`."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def float32_rounding() -> float:
    """The machine epsilon to which float32 may be rounded where matrices are multiplied.

    A larger one than float32's own if `torch.set_float32_matmul_precision`, or the
    `fp32_precision` of oneDNN, lets kernels multiply in TF32 or bfloat16, as CPUs with AMX do.
    """
    allowed = [_precision(), *(backend.fp32_precision for backend in _BACKENDS)]
    found = [_ROUNDINGS[name] for name in allowed if name in _ROUNDINGS]
    return max([torch.finfo(torch.float32).eps, *found])


def _attention() -> tuple[bool, ...]:
    return tuple(getattr(torch.backends.cuda, f"{name}_enabled")() for name in _ATTENTIONS)


def _deterministic() -> tuple[bool, bool]:
    """Whether only deterministic algorithms are used, and whether others warn."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _precision() -> str:
    """Of float32 matrix products; torch refuses to say it if backends differ."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return ""
