"""Which modules of a model are opened, and which stay closed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.capture.calls import Attribute, Trace
from penstock.capture.closed_functions import ClosedFunctions
from penstock.capture.meta import is_on_meta
from penstock.capture.norms import is_small_norm
from penstock.capture.watching import is_compiled, with_owners
from penstock.errors import CaptureError, InputError
from penstock.torch_internals import GLOBAL_HOOKS

# torch.nn's composites with fused kernels of their own: opened, they would compute otherwise.
_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.RNNBase)
# Those that do not take their own kernels while any mode for torch functions is active.
_FUSED_IN_PYTHON = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
_TIED = (nn.Linear, nn.Embedding)  # opened before a recording, where they share a weight
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

_COLLECTING = ("transformers.utils.output_capturing",)
"""Python modules whose hooks only collect what a forward makes, when it is called for that.

transformers installs them when outputs such as hidden states are first wanted, and leaves them.
They act while a forward is recorded; what they collect is then a result of the recording.
"""


def is_collecting(hook: object) -> bool:
    """Whether a hook does nothing but collect outputs for the forward that is running."""
    return getattr(hook, "__module__", None) in _COLLECTING


def _has_forward_hooks(module: nn.Module) -> bool:
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return not all(map(is_collecting, hooks))


def check_no_global_hooks() -> None:
    """Raise if there are global module hooks, which run around every module.

    Raises:
        InputError: there are.
    """
    if any(GLOBAL_HOOKS):
        raise InputError(
            "there are global module hooks (torch.nn.modules.module.register_module_forward_hook "
            "or similar). A pipeline would call them for some modules only: remove them while a "
            "pipeline is built or used, or register hooks on modules"
        )


class Opening:
    """Which modules the program looks inside, and why it does not look inside others.

    Args:
        model: the model.
        keep_closed: qualified names of modules that the user wants to be one call.

    Attributes:
        modules: all modules of the model, by qualified name.
        closed: the modules that it must not look inside, by qualified name, with the reason.
        functions: the plain functions that it does not look inside.
        forced: the modules that it looks inside because they share a parameter or a buffer.
        sized: the closed modules, by qualified name, and the other calls, by identity, that give
            results whose sizes depend on values.
        saves: whether forwards are recorded with all that their backwards need.
        without_values: whether forwards may be recorded on shapes alone, which compiled code and
            hooks are not given.
    """

    def __init__(self, model: nn.Module, keep_closed: Iterable[str]) -> None:
        self.modules = dict(model.named_modules())
        names = {id(module): name for name, module in self.modules.items()}
        aliases = {n: names[id(m)] for n, m in model.named_modules(remove_duplicate=False)}
        self.closed: dict[str, str] = {}
        self.functions = ClosedFunctions()
        self.forced: set[str] = set()
        self.sized: set[str | int] = set()
        self.saves = False
        self.without_values = not is_on_meta(model) and not any(map(_wants_values, model.modules()))
        if isinstance(keep_closed, str) or not isinstance(keep_closed, Iterable):
            raise InputError(
                f'keep_closed={keep_closed!r} is not a list of names; write ["layer1"]'
            )
        for path in keep_closed:
            if path not in aliases:
                known = ", ".join(list(self.modules)[1:6])
                raise CaptureError(
                    f"keep_closed names {path!r}, but the model has no such module; "
                    f"its modules are {known}, …"
                )
            self.closed[aliases[path]] = "kept closed as asked"
        for path, module in self.modules.items():
            if isinstance(module, torch.jit.ScriptModule):
                self.closed[path] = "it is compiled by torch.jit"
            elif is_compiled(module):
                self.closed[path] = "it, or a function that it calls, is compiled by torch.compile"
                self.saves = True  # it would be compiled anew
            elif _has_forward_hooks(module):
                self.closed[path] = "it has forward hooks, which must run around it"
            elif module._backward_hooks or module._backward_pre_hooks:
                self.closed[path] = "it has backward hooks, which must run around it"
        self._ahead = self._sharing()  # which saves a recording, if both are called
        self.forced |= self._ahead

    def _sharing(self) -> set[str]:
        """Those of torch's layers that share a parameter with another one, as tied weights are."""
        users: dict[int, list[str]] = {}
        for path, module in self.modules.items():
            if type(module) in _TIED and path and path not in self.closed:
                for parameter in module.parameters(recurse=False):
                    users.setdefault(id(parameter), []).append(path)
        return {path for paths in users.values() if len(paths) > 1 for path in paths}

    def is_open(self, path: str) -> bool:
        """Whether the program looks inside this module, and inside all that it is in.

        Modules that the model has got since are closed: nothing is known of them.
        """
        if path not in self.modules or any(outer in self.closed for outer in with_owners(path)):
            return False
        module = self.modules[path]
        composite = any(True for _ in module.children()) and not isinstance(module, _FUSED)
        # as one call, replicas take turns at it alone; opened, they would at the whole forward
        composite = composite and not is_small_norm(module)
        return path == "" or composite or path in self.forced

    def close(self, path: str, why: str) -> None:
        """Close a module, and every other of its class: what one does, the others do."""
        self.closed[path] = why
        kind = type(self.modules[path])
        if path and not issubclass(kind, _CONTAINERS):
            for other, module in self.modules.items():
                if other and type(module) is kind:
                    self.closed.setdefault(other, why)

    def note_sizes(self, found: Collection[str | int]) -> bool:
        """Note calls that give results whose sizes depend on values.

        If one is a closed module, all modules of its class are noted.

        Args:
            found: qualified names of closed modules, and identities of other calls.

        Returns:
            whether any of these are new.
        """
        kinds = {type(self.modules[path]) for path in found if isinstance(path, str)}
        before = len(self.sized)
        self.sized.update(path for path, module in self.modules.items() if type(module) in kinds)
        self.sized.update(identity for identity in found if isinstance(identity, int))
        return len(self.sized) > before

    def force(self, trace: Trace) -> bool:
        """Open the closed modules that share a parameter or buffer with another call.

        Then the parameter is read by the program itself, and can cross a cut like any value.
        Modules that were opened ahead of the recording, and share nothing after all, are no longer
        forced open.

        Returns:
            whether other modules are open now than before.
        """
        users: dict[str, set[int]] = {}
        paths: dict[str, set[str]] = {}
        for number, call in enumerate(trace.calls):
            read = (v.name for v in call.reads() if isinstance(v, Attribute))
            path = call.target if isinstance(call.target, str) else call.path
            for name in {*call.hidden, *read}:
                users.setdefault(name, set()).add(number)
                paths.setdefault(name, set()).add(path)
        sharing = {path for among in paths.values() if len(among) > 1 for path in among}
        wrong, self._ahead = self._ahead - sharing, set()
        self.forced -= wrong
        shared = {
            call.target
            for call in trace.calls
            if isinstance(call.target, str) and any(len(users[n]) > 1 for n in call.hidden)
        }
        # Modules inside a closed one stay closed all the same, and so do some of torch's; no cut
        # comes between the calls that share a parameter with it.
        able = (
            p
            for p in shared - self.forced
            if p not in self.closed and not isinstance(self.modules[p], _FUSED_IN_PYTHON)
        )
        new = {p for p in able if not self.is_open(p)}
        self.forced |= new
        return bool(new or wrong)


def why_closed_for(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Why a module cannot be open if it is called with these arguments; empty if it can.

    An `nn.TransformerEncoder` that is given padding, and made for it, leaves the padded places out
    in evaluation, but not while a mode for torch functions is active.
    """
    if not isinstance(module, nn.TransformerEncoder) or module.layers[0].training:
        return ""
    given = dict(zip(("src", "mask", "src_key_padding_mask"), args, strict=False)) | dict(kwargs)
    leaves_out = given.get("src_key_padding_mask") is not None and given.get("mask") is None
    if not (leaves_out and getattr(module, "use_nested_tensor", False)):
        return ""
    return "it may leave out padding by a fast path of its own"


def _wants_values(module: nn.Module) -> bool:
    is_made = isinstance(module, torch.jit.ScriptModule) or is_compiled(module)
    return is_made or _has_forward_hooks(module)


def check_example(model: object, args: object, kwargs: object, dynamic: object) -> None:
    """Raise unless these are a model and an example of its arguments that can be recorded.

    Raises:
        InputError: an argument is of another type, or there is no example; the model has parameters
            without sizes (lazy modules); or there are global module hooks.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is a {type(model).__name__}, not an nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            f"the model is a {type(model).__name__}: torch.jit has compiled it, and does not show "
            "what its forward calls. Give the module that it was made from; or "
            "nn.Sequential(model), in which it is one call, so that several workers can only be "
            "replicas"
        )
    if not isinstance(args, (tuple, list)):
        raise InputError(
            f"args is a {type(args).__name__}, not the tuple of the model's positional arguments; "
            "write args=(x,)"
        )
    if not isinstance(kwargs, (Mapping, type(None))):
        raise InputError(
            f"kwargs is a {type(kwargs).__name__}, not the dict of the model's keyword arguments; "
            'write kwargs={"x": x}'
        )
    if not isinstance(dynamic, (Mapping, type(None))):
        raise InputError(
            f"dynamic={dynamic!r} is not a dict of inputs and their varying dimensions; write "
            'dynamic={"input_ids": {1: "length"}}'
        )
    if not args and not kwargs:
        raise InputError(
            f"{type(model).__name__} is recorded on an example, which is missing: give its "
            'arguments for a usual batch, Pipeline(model, (x,), ...) or kwargs={"x": x}'
        )
    held = (*model.named_parameters(), *model.named_buffers())
    lazy = [name for name, tensor in held if nn.parameter.is_lazy(tensor)]
    if lazy:
        raise InputError(
            f"{', '.join(lazy)} of the model have no sizes yet: it has lazy modules. Call it once "
            "with the example before it is captured, to initialise them"
        )
    check_no_global_hooks()
