"""The forwards of stages by `torch.compile`, where nothing needs gradients.

A compiled stage fuses what the model's own forward does one after the other, so it may round
differently: its bits are not those of one device that runs the model as it is. They are those of
the same stages compiled elsewhere, for the same cuts, options and versions. So only pipelines for
inference are compiled, and they are not audited.

Every way through the model has stages of its own, and each is compiled by its worker when it is
first run. Sizes come in as they are, so the first recording that is run with other sizes is
compiled once more, for any size (`dynamic=None`, as torch does by default); `{"dynamic": True}`
compiles for any size from the beginning.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from penstock.capture.lowering import StageModule, build_with, leaf_of
from penstock.capture.randomness import draw, draw_in_python
from penstock.engine.hooks import users_hooks_of
from penstock.errors import InputError
from penstock.links.link import Values
from penstock.torch_internals import backends_of_compile, check_cxx_compiler

Compile = Mapping[str, Any]
"""Arguments of `torch.compile`."""

_NOT_ARGUMENTS = ("model", "disable")
_OUTSIDE = (draw, draw_in_python, build_with, leaf_of)
_DEFAULT = "inductor"


COMPILED_WHOLE = (
    "torch.compile cannot compile a Pipeline, whose stages run on workers: build it with "
    "Pipeline(..., inference=True, compile=True), and each worker compiles its own stage; to "
    "train, compile submodules of the model before the pipeline is built"
)
"""The message for `torch.compile(pipe)`."""


def check_compiles(inference: bool) -> None:
    """Raise unless a pipeline may be compiled.

    Raises:
        InputError: it may train.
    """
    if not inference:
        raise InputError(
            "compile= needs inference=True: compiled stages may round differently, so gradients "
            "would not be those of one device. To train, leave out compile="
        )


def compile_options(given: bool | Mapping[str, Any]) -> Compile | None:
    """What `compile=` means: the arguments of `torch.compile`, or `None`.

    Raises:
        InputError: they are no such arguments; or code for CPUs would have to be compiled, and
            there is no C++ compiler.
    """
    if given is False or given is None:
        return None
    known = [n for n in inspect.signature(torch.compile).parameters if n not in _NOT_ARGUMENTS]
    if given is not True and not isinstance(given, Mapping):
        raise InputError(
            f"compile={given!r}; give True, or a dict of arguments of torch.compile "
            f"({', '.join(known)})"
        )
    options = {} if given is True else dict(given)
    unknown = [name for name in options if name not in known]
    if unknown:
        raise InputError(
            f"compile= has {unknown[0]!r}, which is no argument of torch.compile: choose among "
            f"{', '.join(known)}"
        )
    backend = options.get("backend") or _DEFAULT
    if isinstance(backend, str) and backend not in (backends := backends_of_compile()):
        raise InputError(
            f"compile= has the backend {backend!r}, which torch does not know; there are "
            f"{', '.join(backends)}"
        )
    if backend == _DEFAULT:
        _check_compiler()
    return options


def _check_compiler() -> None:
    """Raise if inductor would not find a compiler for what it writes.

    Raises:
        InputError: there is none.
    """
    try:
        check_cxx_compiler()
    except RuntimeError as error:
        raise InputError(
            f"compile= needs a C++ compiler, and torch finds none ({error}): install g++ "
            '("apt install g++", "dnf install gcc-c++") or clang, or let the environment variable '
            'CXX name it; or give compile={"backend": "aot_eager"}, which writes no code'
        ) from error


class CompiledForward:
    """Runs the module of a span, compiled when it is first called.

    Calls that draw random numbers run between the parts that are compiled, as each is seeded by
    itself; and so does what takes apart or makes objects of the user's classes. torch.compile takes
    no notice of hooks that come or go later, so then the module is compiled anew.

    Args:
        module: of the span.
        options: arguments of `torch.compile`.
    """

    def __init__(self, module: Callable[..., Values], options: Compile) -> None:
        self._module, self._options = module, options
        self._modules = list(module.modules()) if isinstance(module, nn.Module) else []
        self._hooks: list[int] | None = None  # when it was compiled
        self._run: Callable[..., Values] = module

    def __call__(self, *args: Any) -> Values:
        """What the module returns, without gradients."""
        if (hooks := users_hooks_of(self._modules)) != self._hooks:
            self._hooks, self._run = hooks, self._compiled()
        return self._run(*args)

    def _compiled(self) -> Callable[..., Values]:
        module = self._module
        if isinstance(module, StageModule):
            module = module.with_functions({function: _outside(function) for function in _OUTSIDE})
        made: Callable[..., Values] = torch.compile(module, **self._options)
        return made


@cache
def _outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which is not compiled."""
    found: Callable[..., Any] = torch.compiler.disable(function)
    return found
