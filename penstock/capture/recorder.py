"""Records one run of a model's forward: every torch call, every call of a closed module.

The model's own Python runs on real tensors, so control flow, keyword arguments and containers
resolve themselves. What cannot be recorded inside an open module raises `Unrecordable`, and
`penstock.capture.capturing` then closes that module and starts again.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial, wraps
from types import CodeType, FrameType, FunctionType
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from penstock.capture.attributes import named_tensors
from penstock.capture.calls import (
    GRADIENT,
    INPUTS,
    OPAQUE,
    Attribute,
    Call,
    Changed,
    GivenArray,
    Origin,
    OutsideTorch,
    Ref,
    Submodule,
    TensorInfo,
    Trace,
    Unrecordable,
    Value,
    ambient,
    function_name,
)
from penstock.capture.casts import Casts
from penstock.capture.closed_functions import (
    ClosedFunction,
    ClosedFunctions,
    Unclosable,
    UnseenArray,
    why_not_given,
    why_nothing_made,
)
from penstock.capture.code import asks_which, codes_of, codes_running, hooks_nodes
from penstock.capture.functions import Applied, Whole, why_not, why_not_made
from penstock.capture.given import generators_given, not_passed_on
from penstock.capture.interception import (
    CLOSING,
    GRADIENTS,
    LAYOUT,
    METADATA,
    ORIGINAL,
    PARTS,
    SIZES,
    STATE,
    VALUES,
    Patch,
    intercepted,
    is_plain,
)
from penstock.capture.known import Known
from penstock.capture.looking import apart, holds_still, same_as
from penstock.capture.meta import Weightless, is_on_meta, reads_values
from penstock.capture.numbers import Followed, Numeric, Where, plain, put
from penstock.capture.opening import why_closed_for
from penstock.capture.outside import UsedOutside, common_owner, leads_outside
from penstock.capture.randomness import (
    Draws,
    Key,
    generators,
    python_kept,
    type_checks_apart,
)
from penstock.capture.reads import NotedReads
from penstock.capture.returned import MadeHere, tensors_in
from penstock.capture.sizing import Sizing, Sizings, dims_inspected
from penstock.capture.surroundings import Surroundings
from penstock.capture.trees import (
    Structure,
    flatten,
    flatten_result,
    handed_back,
    leaves_of,
    map_leaves,
    tree_leaves,
    unflatten,
)
from penstock.capture.watching import (
    KNOWN_OPERATORS,
    Contents,
    OpenAttributes,
    OperatorWatch,
    changed,
    check_decision,
    compiled,
)
from penstock.devices.kinds import kind_of
from penstock.torch_internals import (
    OpOverload,
    OpOverloadPacket,
    current_function_mode,
    without_function_mode,
)

P = ParamSpec("P")
T = TypeVar("T")


def record(
    model: nn.Module,
    is_open: Callable[[str], bool],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    key: Key | None = None,
    *,
    strict: bool = True,
    numbers: Mapping[Where, Numeric] | None = None,
    like: Structure | None = None,
    sized: Collection[str | int] = (),
    functions: ClosedFunctions | None = None,
) -> tuple[Trace, Any]:
    """Run `model(*args, **kwargs)` and record it.

    Args:
        model: the module; run inside `untouched(model)` if it must stay as it is.
        is_open: whether the program looks inside the module of this qualified name.
        args: positional arguments.
        kwargs: keyword arguments.
        key: seeds every call, as a replay with this key does those that draw random numbers.
        strict: whether open modules must leave their attributes alone.
        numbers: the numbers in attributes and arguments that are passed in as values.
        like: a structure of `(args, kwargs)` to flatten them by, if it opens objects among them.
        sized: the closed modules, by qualified name, and the other calls, by identity, that give
            results whose sizes depend on values.
        functions: the plain functions that are closed.

    Returns:
        the trace, and what the model returned.

    Raises:
        Unrecordable: something in an open module cannot be recorded.
    """
    recorder = Recorder(model, is_open, key, numbers or {}, sized, functions)
    known, reading = recorder.known, recorder.reading
    leaves, structure = flatten((tuple(args), kwargs))
    if like is not None:
        leaves, structure = leaves_of((tuple(args), kwargs), like), like
    apart = type_checks_apart(model)
    with put(model, leaves, reading.followed()), intercepted(recorder), python_kept(), apart:
        args, kwargs = unflatten(structure, leaves)
        trace = recorder.begin(leaves_of((args, kwargs), structure), structure)
        attributes = OpenAttributes(model, is_open)
        held = [
            (name, tensor, Contents(tensor))
            for name, tensor in named_tensors(model)
            if not isinstance(tensor, nn.Parameter)
        ]
        with generators_given(leaves, structure), recorder, reading.active():
            result = recorder.run(args, kwargs)
        if strict:
            attributes.check_unchanged()
            if (place := reading.changed()) is not None:
                reads = reading.reads
                raise Changed(reads.readers[place], place, reads.seen[place], place.find(model))
        recorder.end(result)
        trace.handed_back = handed_back(result, (args, kwargs))
        trace.changed = changed(held)
        shared = ((n, t) for n, t, _ in held if n in trace.changed and known.has_storage(t))
        trace.rewritten = {known.storage(tensor): name for name, tensor in shared}
    return trace, result


def _remembering(method: Callable[Concatenate[Recorder, P], T]) -> Callable[..., T]:
    """A method of a recorder that remembers what it raises, as the model's Python may catch it."""

    @wraps(method)
    def remembering(self: Recorder, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        except Unrecordable as problem:
            if self._refused is None:
                self._refused = problem
                if problem.path == self._open[-1]:
                    frame = sys._getframe(1)
                    problem.within = self.functions.running(frame, _CALLERS)
                    if problem.within is None and isinstance(problem, OutsideTorch):
                        problem.within = self.functions.called(frame, _CALLERS)
            raise

    return remembering


class Recorder(TorchFunctionMode):
    """The torch-function mode behind `record`."""

    def __init__(
        self,
        model: nn.Module,
        is_open: Callable[[str], bool],
        key: Key | None,
        numbers: Mapping[Where, Numeric] | None = None,
        sized: Collection[str | int] = (),
        functions: ClosedFunctions | None = None,
    ) -> None:
        super().__init__()
        self.functions = functions or ClosedFunctions()
        self.model = model
        self.is_open = is_open
        self.sized = sized
        self.key = key
        self.thread = threading.get_ident()
        self.paths = {id(module): name for name, module in model.named_modules()}
        self.compiled = compiled(model)
        self.weightless = Weightless(model) if is_on_meta(model) else None
        devices = {p.device for p in model.parameters()}
        self.generators = generators(devices)
        kinds = (kind_of(device) for device in devices)
        self._kind = next((kind for kind in kinds if kind.has_streams), None)
        self.patches: list[Patch] = []
        self.known = Known()
        self._registered = {id(module): _registered(module) for module in model.modules()}
        self._mixed: dict[int, Origin] = {}  # what is written into storages
        self._outside: dict[str, bool] = {}  # whether closed modules lead to others
        self._open: list[str] = [""]
        self._inside = 0
        self._gave_values = False  # whether Python in a call got values
        self._keeps_states = False  # whether it asked for the state of a generator of torch
        self._sets_states = False  # whether it set that
        self.casts = Casts()
        self._by_code: dict[Callable[[CodeType], bool], bool] = {}  # what the model's code does
        self._arrays_of: FunctionType | None = None  # the closed function that gave the last
        self._refused: Unrecordable | None = None  # the first, which the model's Python may catch
        self._seen: Counter[str] = Counter()
        self.reading = NotedReads(
            model,
            self.paths,
            lambda: self.is_outside,
            lambda: self._open[-1],
            self.known.get,
            numbers or {},
        )
        for name, tensor in named_tensors(model):
            if self.known.get(tensor) is None:
                self.known.put(tensor, Attribute(name))

    @property
    def is_outside(self) -> bool:
        """Whether the recorded thread is in an open module's own code, and not within a call."""
        return not self._inside and threading.get_ident() == self.thread

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the model, and return its result.

        Raises:
            Unrecordable: something cannot be recorded, even if the model's own Python has caught
                that.
        """
        try:
            result = self.model(*args, **kwargs)
        except Exception as error:
            self._check_refused()
            if self._arrays_of is not None:  # which may be why
                raise Unclosable("", self._arrays_of, f"and then raises {error!r}") from error
            raise
        self._check_refused()
        return result

    def _check_refused(self) -> None:
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused

    # -- the two things that can happen ---------------------------------------------------

    @_remembering
    def call_module(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """What `module(*args, **kwargs)` does while recording; `call` is the real thing."""
        path = self.paths.get(id(module))
        if path is None or not self.is_outside:
            return call(module, *args, **kwargs)
        with self.reading.paused():
            is_open = self.is_open(path)
        if is_open:
            if why := why_closed_for(module, args, kwargs):
                raise Unrecordable(path, why)
            self._open.append(path)
            try:
                return call(module, *args, **kwargs)
            finally:
                self._open.pop()
        with self.reading.paused():
            self._check_registered(path, module)
            hidden = self._hidden(module, args, kwargs)
            self.reading.note_call(path, module)
            leads_outside = path not in self.compiled and self._leads_outside(path, module)
        if leads_outside:
            call = partial(self._inside_alone, path, call)
        function = self._undisturbed if path in self.compiled else self._without_mode
        result = self._record(path, partial(function, call, module), args, kwargs, hidden)
        with self.reading.paused():  # what it has replaced itself it replaces in the replay, too
            self._registered |= {id(inner): _registered(inner) for inner in module.modules()}
        return result

    def _check_registered(self, path: str, module: nn.Module) -> None:
        """Raise if Python has lent a closed module tensors, as functional_call does."""
        for name, inner in module.named_modules(prefix=path):
            own = self._registered.get(id(inner), {})
            for key, tensor in _registered(inner).items():
                if tensor is not own.get(key):
                    what = f"{name}.{key}".removeprefix(".")
                    raise Unrecordable(
                        self._open[-1],
                        f"its forward puts another tensor in the place of {what} for a call, as "
                        "torch.func.functional_call does",
                    )

    def _leads_outside(self, path: str, module: nn.Module) -> bool:
        if path not in self._outside:
            self._outside[path] = leads_outside(module, self.paths)
        return self._outside[path]

    def _inside_alone(
        self, path: str, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a closed module, which must use tensors of its own only, and those it is given.

        Otherwise the innermost module that contains all that it uses is closed in its place.
        """
        with UsedOutside(self.model, module, tree_leaves((args, kwargs))) as used:
            result = call(module, *args, **kwargs)
        if used.names:
            owners = (name.rpartition(".")[0] for name in used.names)
            first = next(iter(used.names))
            raise Unrecordable(
                common_owner([path.rpartition(".")[0], *owners]),
                f"{path} uses {first}, which it does not contain",
            )
        return result

    def _hidden(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[str, ...]:
        """The names of the tensors in a closed module, and in those that it is given."""
        given = (m for m in tree_leaves((args, kwargs)) if id(m) in self.paths)
        return tuple(  # a tensor that an earlier call has put there is known by its place
            str(self.known.get(tensor) or f"{self.paths[id(held)]}.{name}")
            for held in (module, *given)
            for name, tensor in named_tensors(held)
        )

    def _without_mode(
        self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a closed module: what is inside is not looked at."""
        with self._unseen():
            return call(module, *args, **kwargs)

    def _unseen(self) -> AbstractContextManager[None]:
        """While open, functions are not looked at."""
        return nullcontext() if current_function_mode() is not self else without_function_mode()

    def _undisturbed(self, *args: Any, **kwargs: Any) -> Any:
        """Run a closed module as if nothing was recorded: torch.compile looks at everything."""
        with ExitStack() as stack:
            for patch in self.patches:
                patch.undo()
                stack.callback(patch.apply)
            return self._without_mode(*args, **kwargs)

    @_remembering
    def apply_function(
        self,
        function: type[torch.autograd.Function],
        apply: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """What applying a function does while recording; `apply` is the real thing.

        It is a call like that of a closed module: its Python runs in the replay as well.
        """
        if not self.is_outside:
            return apply(*args, **kwargs)
        with self.reading.paused():
            self._check_function(function, (*args, *kwargs.values()))
        return self._record(
            Applied(function), partial(self._given_alone, function, apply), args, kwargs
        )

    @_remembering
    def call_function(
        self,
        function: FunctionType,
        plain: FunctionType,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """What a closed function does while recording: it is a call, too; `plain` has its code."""
        if not self.is_outside:
            return plain(*args, **kwargs)
        with self.reading.paused():
            self._check_given(function, args, kwargs)
        whole = partial(self._by_itself, function, plain)
        result = self._record(ClosedFunction(function), whole, args, kwargs)
        return map_leaves(partial(self._unlooked_into, function), result)

    def _check_given(
        self, function: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Raise if a closed function must not be called with these."""
        if why := why_not_given(args, kwargs):
            raise Unclosable(self._open[-1], function, why)

    def _by_itself(
        self, function: FunctionType, plain: FunctionType, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a function that must use nothing of the model but what it is given."""
        before = ambient()
        try:
            with (
                self._unseen(),
                UsedOutside(self.model, None, tree_leaves((args, kwargs))) as used,
            ):
                result = plain(*args, **kwargs)
        except Exception as error:
            why = f"which raises {type(error).__name__}"
            raise Unclosable(self._open[-1], function, why) from error
        why = why_nothing_made(result)
        if ambient() != before:
            why = "which leaves gradients or autocast otherwise than they were"
        if used.names:
            why = f"which uses {next(iter(used.names))} and is not given it"
        if why:
            raise Unclosable(self._open[-1], function, why)
        return result

    def _unlooked_into(self, function: FunctionType, leaf: Any) -> Any:
        """What stands for an array that a closed function has given; anything else as it is."""
        known = self.known.get(leaf) if isinstance(leaf, np.ndarray) else None
        if known is None:
            return leaf
        running = codes_running(sys._getframe(1), _CALLERS[1])
        if any("ndarray" in code.co_names for code in running):
            raise Unclosable(self._open[-1], function, "and may ask for the class of what it gives")

        def refuse() -> Unclosable:
            problem = Unclosable(self._open[-1], function, "and looks into the array that it gives")
            self._refused = self._refused or problem
            return problem

        unseen = UnseenArray(leaf, refuse)
        self.known.put(unseen, known)
        self._arrays_of = function
        return unseen

    def _check_function(
        self, function: type[torch.autograd.Function], args: tuple[Any, ...]
    ) -> None:
        """Raise if an open module must not apply a custom `autograd.Function` to these."""
        if function is CheckpointFunction:
            raise Unrecordable(
                self._open[-1],
                "it calls torch.utils.checkpoint with use_reentrant=True, which computes gradients "
                "in a backward of its own; with use_reentrant=False it would be opened",
            )
        if why := why_not(function, args):
            raise self._closing(function, why)

    def note_values(self) -> None:
        """Note that Python gets values of a tensor indirectly, such as by `numpy()`."""
        self._gave_values = True

    def note_state(self, sets: bool) -> None:
        """Note that the Python of a call sets the state of a generator, or asks for it."""
        self._keeps_states |= not sets
        self._sets_states |= sets

    @_remembering
    def check_unseen_application(self, function: type[torch.autograd.Function]) -> None:
        """Raise if an open module applies a function by a name under which it is not replaced."""
        if self.is_outside:
            raise self._closing(function, "by a method that was stored where nobody sees it called")

    def _closing(self, function: type, why: str) -> Unrecordable:
        what = f"it applies {function.__name__}, an autograd.Function of its own"
        return Unrecordable(self._open[-1], f"{what}, {why}")

    def _given_alone(
        self, function: type, apply: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Apply a function that must use none of the model's tensors but those it is given."""
        with self._unseen(), UsedOutside(self.model, None, tree_leaves((args, kwargs))) as used:
            result = apply(*args, **kwargs)
        if used.names:
            raise self._closing(
                function, f"which uses {next(iter(used.names))} and is not given it"
            )
        if why := why_not_made(result):
            raise self._closing(function, why)
        return result

    @_remembering
    def check_assignment(self, owner: nn.Module | type, name: str) -> None:
        """Raise if an open module assigns to an attribute of a closed one, or of a `Function`."""
        if isinstance(owner, type):
            if self.is_outside:
                why = f"its forward assigns to {owner.__name__}.{name}, an autograd.Function's"
                raise Unrecordable(self._open[-1], why)
            return
        path = self.paths.get(id(owner))
        if path is not None and self.is_outside and not self.is_open(path):
            raise Unrecordable(self._open[-1], f"its forward assigns to {path}.{name}")

    @_remembering
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, func = kwargs or {}, ORIGINAL.get(func, func)
        name = function_name(func)
        if self._inside:
            return func(*args, **kwargs)
        if (plain := getattr(func, "__name__", "")) in CLOSING:  # `x.grad` is another matter
            raise Unrecordable(self._open[-1], f"its Python {CLOSING[plain]}")
        leaves = tree_leaves((args, kwargs))
        if name in VALUES:
            self._check_values(name, leaves)
        if name in SIZES or name in PARTS:
            self._check_sizes(name, args, kwargs)
        if name in GRADIENTS:
            self._check_hooks(name)
            self.reading.note_requires_grad(leaves)
            self._note_gradients(leaves)
        if name in LAYOUT or name == "storage_offset":
            self._check_strides(leaves)
        if name in LAYOUT:
            self._check_layout(name, leaves)
        if name in STATE:
            self.reading.note_state(name, leaves)
        if name in METADATA or (name == "type" and len(leaves) == 1):
            return func(*args, **kwargs)
        if name == "type":
            args, kwargs = (args[0], _dtype(*args, **kwargs)), {}
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return self._without_tensors(func, args, kwargs)
        return self._record(func, func, args, kwargs)

    def _check_values(self, name: str, leaves: Sequence[Any]) -> None:
        """Raise if Python gets values that are not the same for all inputs and weights."""
        tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        for known in map(self.known.get, tensors):
            info = self.trace.info(known) if isinstance(known, Ref) else None
            is_made = isinstance(info, TensorInfo) and info.origin is Origin.NOTHING
            if known is not None and not is_made:
                raise Unrecordable(self._open[-1], f"its Python reads a tensor's values ({name}())")

    def _check_hooks(self, name: str) -> None:
        """Raise if Python that gets a node of autograd's graph may hang hooks on it."""
        if name == "grad_fn" and self._may_run(hooks_nodes, sys._getframe(2)):
            why = "its Python hangs hooks on nodes of autograd's graph (grad_fn.register_hook)"
            raise Unrecordable(self._open[-1], why)

    def _check_layout(self, name: str, leaves: Sequence[Any]) -> None:
        """Note that Python asks how tensors lie in memory."""
        try:
            self.reading.note_layout(name, leaves, self._inputs)
        except ValueError as error:
            raise Unrecordable(self._open[-1], f"its Python {error}") from None

    def _check_sizes(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise if Python asks for sizes that depend on values; note it where they may."""
        for leaf in tree_leaves((tuple(args), dict(kwargs))):
            known = self.known.get(leaf) if isinstance(leaf, torch.Tensor) else None
            if isinstance(known, Ref) and self.sizings.depends(known):
                dims = dims_inspected(name, leaf.ndim, args, kwargs, sys._getframe(3))
                self.sizings.check_inspected(known, self._open[-1], dims)

    def _note_gradients(self, leaves: Sequence[Any]) -> None:
        """Note that Python reads whether tensors require gradients, if values may decide that."""
        for known in map(self.known.get, leaves):
            if isinstance(known, Ref) and self.sizings.may_depend(known):
                self.sizings.note_inspected(known, self._open[-1], (GRADIENT,))

    def _check_strides(self, leaves: Sequence[Any]) -> None:
        """Raise if Python asks how tensors lie in memory where values may decide it."""
        for known in map(self.known.get, leaves):
            if isinstance(known, Ref) and self.sizings.may_depend(known):
                why = "its Python asks how a tensor lies in memory that depends on values"
                raise Unrecordable(self._open[-1], why)

    def _without_tensors(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a function that is given no tensors, and record it if it makes any.

        It is a factory such as `torch.arange`, or reads or changes a setting.
        """
        versions = [g.get_state() for g in self.generators]
        plainly = map_leaves(plain, tuple(args)), map_leaves(plain, dict(kwargs))
        if self._arrays_of is not None:
            plainly = map_leaves(UnseenArray.array_of, plainly)
        result = func(*plainly[0], **plainly[1])
        if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
            return result
        for generator, state in zip(self.generators, versions, strict=True):
            generator.set_state(state)
        return self._record(func, func, args, kwargs)

    # -- recording ------------------------------------------------------------------------

    def begin(self, leaves: list[Any], structure: Structure | None) -> Trace:
        """Start a trace whose inputs are these leaves of `(args, kwargs)`."""
        self._inputs = leaves
        if self.weightless is not None:
            self.weightless.begin(leaves)
        self._surroundings = Surroundings(self.generators, self._kind, seeded=self.key is not None)
        self.trace = Trace(
            inputs=tuple(
                leaf.number
                if isinstance(leaf, Followed)
                else self._bind(leaf, Ref(INPUTS, k), Origin.INPUTS)
                for k, leaf in enumerate(leaves)
            ),
            input_structure=structure,
            reads=self.reading.reads,
        )
        self.sizings = Sizings(self.trace, self.sized)
        return self.trace

    def __exit__(self, *raised: Any) -> None:
        """Drop the inputs when the forward ends, as reference cycles keep the recorder alive."""
        super().__exit__(*raised)
        if any(raised):
            self._surroundings.put_settings_back()
        self._inputs = []
        if self.weightless is not None:
            self.weightless.begin(())

    def end(self, result: object) -> None:
        """Finish the trace with what the model returned."""
        self._surroundings.check_draws("")
        made_here = MadeHere(self.model, self.trace, self.known)
        leaves = flatten_result(result, made_here.opens)[0]
        opened = [leaf for leaf in leaves if made_here.is_only_returned(leaf, leaves)]
        for made in opened:
            held = flatten_result(made)[0]
            others = [leaf for leaf in held if not isinstance(leaf, torch.Tensor)]
            args = self._encode(made), tuple(map(self._encode, others))
            call = Call(tensors_in, args, {}, "")
            call.identity = self._identify(call)
            self._append(call, tensors_in(made, others))
        leaves, structure = flatten_result(
            result, lambda value: any(value is made for made in opened) or made_here.opens(value)
        )
        self.trace.outputs = tuple(self._encode(leaf) for leaf in leaves)
        self.trace.output_structure = structure

    def _record(
        self,
        target: str | Callable[..., Any],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        hidden: tuple[str, ...] = (),
    ) -> Any:
        self._inside += 1
        self.reading.quiet += 1
        try:
            named_args, named_kwargs = map_leaves(self._encode, (tuple(args), dict(kwargs)))
            call = Call(target, named_args, named_kwargs, self._open[-1], hidden=hidden)
            call.identity = self._identify(call)
            call.ambient = self._surroundings.other_ambient()
            self._surroundings.check_settings(self._open[-1])
            if self.reading.reads.numbers or self.reading.reads.given:
                args, kwargs = map_leaves(plain, tuple(args)), map_leaves(plain, dict(kwargs))
            if self._arrays_of is not None:
                args, kwargs = map_leaves(UnseenArray.array_of, (tuple(args), dict(kwargs)))
            result, sizing = self._observe(call, function, args, kwargs)
            self._append(call, result, sizing)
        finally:
            self._inside -= 1
            self.reading.quiet -= 1
        return result

    def _identify(self, call: Call) -> int:
        """A number for the call, made of its label and how often that has occurred before."""
        label = call.label
        self._seen[label] += 1
        digest = hashlib.blake2b(f"{label} {self._seen[label]}".encode(), digest_size=8)
        return int.from_bytes(digest.digest(), "little")

    def _append(self, call: Call, result: object, sizing: Sizing = Sizing.SHAPES) -> None:
        """Add the call to the trace, unless it only read something harmless."""
        leaves, call.result = flatten(result)
        origin = self._origin(call)
        number = len(self.trace.calls)
        if not any(self._is_value(leaf) for leaf in leaves) and not call.mutates:
            if origin is Origin.NOTHING or self._only_passes_on(call, leaves):
                return
            check_decision(call, origin, leaves)
            self.trace.decisions += (Ref(number, 0),)
        for value in call.mutates:
            info = self.trace.info(value)
            if isinstance(info, TensorInfo):
                before = self._mixed.get(info.storage, Origin.NOTHING)
                self._mixed[info.storage] = max(before, origin)
        sizings = [self.sizings.of_leaf(leaf, call, sizing, origin) for leaf in leaves]
        call.outputs = tuple(
            self._bind(leaf, Ref(number, k), origin, sizings[k] is Sizing.VALUES)
            for k, leaf in enumerate(leaves)
        )
        self.sizings.note(call, number, sizings)
        self.trace.calls.append(call)

    def _only_passes_on(self, call: Call, leaves: Sequence[Any]) -> bool:
        """Whether a call is given no value, and returns arguments only: `Identity()(None)`."""
        given = tree_leaves((call.args, call.kwargs))
        return not call.reads() and all(any(x is y for y in given) for x in leaves)

    def _observe(
        self,
        call: Call,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, Sizing]:
        """Run the call, noting whether it draws random numbers and what it changes in place.

        Returns:
            its result, and what the sizes of that depend on.
        """
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        contents = [Contents(t) for t in tensors]
        known = None if self.weightless is None else self.weightless.known
        seed = None if self.key is None else self.key.for_call(call.identity)
        module = self.model.get_submodule(call.target) if isinstance(call.target, str) else None
        casts = self._noted_casts(call, module)
        watch = OperatorWatch(known, casts)
        is_watched = self.weightless or module is None or self._may_do_anything(module)
        watches = watch if is_watched else OperatorWatch(casts=casts) if casts else nullcontext()
        uncached = nullcontext() if casts is None else casts.watched()
        self._surroundings.check_draws(call.path)
        self._gave_values = self._keeps_states = self._sets_states = False
        has_python = call.is_module or isinstance(call.target, Whole)
        given = flatten((args, kwargs)) if has_python else ([], None)
        try:
            with Draws(self.generators, seed) as draws, uncached, watches:
                if self.weightless is not None:
                    args = tuple(map(self._with_values, args)) if reads_values(call) else args
                    result = self.weightless.run(call, function, args, kwargs)
                else:
                    result = function(*args, **kwargs)
        finally:  # the model's Python may catch what a call raises, and go on
            self._surroundings.seed()
        self._surroundings.check_began(draws, call.path)
        call.random = watch.draws if self.weightless else draws.happened
        call.draws_in_python = draws.in_python
        call.keeps_states, call.sets_states = self._keeps_states, self._sets_states
        call.casts = self.casts.found()
        if isinstance(call.target, str) and module is not None and not call.random:
            self.reading.note_switches(call.target, module)
        call.mutates = tuple(
            value
            for t, before in zip(tensors, contents, strict=True)
            if before.differs_from(t) and (value := self.known.get(t)) is not None
        )
        if has_python and not holds_still(*given, (args, kwargs)):
            raise Unrecordable(call.path, f"{call.label} changes a container that it is given")
        unwatched = module is not None and not is_watched and self._has_own_python(module)
        call.looks = unwatched or _is_custom(call.target)
        call.looks |= has_python and (watch.looks or self._gave_values)
        may_size = watch.may_size or (has_python and self._gave_values)
        sizing = self.sizings.of_call(call, result, may_size, self.weightless is not None)
        if call.looks:
            result = self._as_its_own(call, args, kwargs, result)
        return result, sizing

    def _noted_casts(self, call: Call, module: nn.Module | None) -> Casts | None:
        """What notes the weights that autocast casts in a call; `None` if nothing needs to.

        Under the script's own autocast all casts are kept for the whole forward. What is compiled
        may cast a weight any number of times unseen.
        """
        if self._surroundings.casting:
            return None
        is_in_region = call.ambient is not None and bool(call.ambient.casting)
        if module is not None and self._has_own_python(module):
            if is_in_region:
                self.casts.note_unseen()
            return None
        needs_none = module is not None and not self._may_do_anything(module) and not is_in_region
        return None if needs_none else self.casts

    def _as_its_own(self, call: Call, args: Any, kwargs: Any, result: Any) -> Any:
        """The result of a call that looks at values, with tensors that are objects of their own.

        If the Python around the call may ask which object a tensor is, the result is left as it is,
        and compared with `call.same` when the program runs. A closed function must not return one
        of its arguments then.
        """
        given, leaves = tree_leaves((args, kwargs)), tree_leaves(result)
        call.classes = tuple(type(x) if isinstance(x, torch.Tensor) else None for x in leaves)
        if not self._asks_which(sys._getframe(1)):
            written = {id(x) for x in given if self.known.get(x) in call.mutates}
            return apart(result, given, written)
        call.same = same_as(result, given)
        is_old = any(place is not None for place, _ in call.same)
        if isinstance(call.target, ClosedFunction) and is_old:
            why = "which gives one of its arguments, or a tensor twice"
            raise Unclosable(call.path, call.target.function, why)
        return result

    def _asks_which(self, frame: FrameType) -> bool:
        """Whether the model's Python may ask which object a tensor is."""
        return self._may_run(asks_which, frame)

    def _may_run(self, does: Callable[[CodeType], bool], frame: FrameType) -> bool:
        """Whether code of the model, or what runs in this frame and its callers, does something."""
        if does not in self._by_code:
            self._by_code[does] = any(map(does, codes_of(self.model)))
        return self._by_code[does] or any(map(does, codes_running(frame, _CALLERS[1])))

    def _has_own_python(self, module: nn.Module) -> bool:
        """Whether a module that is not watched may look at values nevertheless."""
        return isinstance(module, torch.jit.ScriptModule) or self.paths[id(module)] in self.compiled

    def _may_do_anything(self, module: nn.Module) -> bool:
        """Whether a closed module has code that is not torch's, and is not compiled."""
        if self._has_own_python(module):
            return False
        return any(not type(m).__module__.startswith("torch.nn.") for m in module.modules())

    def _with_values(self, leaf: Any) -> Any:
        """A tensor on `meta` with its values, if it is made of nothing but the inputs."""
        known = self.known.get(leaf) if isinstance(leaf, torch.Tensor) else None
        if self.weightless is None or not isinstance(known, Ref) or not leaf.is_meta:
            return leaf
        if self._origin_of(known) > Origin.INPUTS:
            return leaf
        return self.weightless.values(self.trace, known)

    def _origin(self, call: Call) -> Origin:
        """What the results of a call are made of."""
        if call.is_module or call.random:
            return Origin.MODEL
        return max((self._origin_of(value) for value in call.reads()), default=Origin.NOTHING)

    def _origin_of(self, value: Value) -> Origin:
        info = self.trace.info(value)
        if isinstance(value, Attribute) or not isinstance(info, TensorInfo):
            return Origin.MODEL
        return max(info.origin, self._mixed.get(info.storage, Origin.NOTHING))

    # -- values ---------------------------------------------------------------------------

    def _is_value(self, leaf: object) -> bool:
        return isinstance(leaf, torch.Tensor) or not is_plain(leaf)

    def _bind(self, leaf: object, value: Ref, origin: Origin, dynamic: bool = False) -> Any:
        """Give a result leaf its name from here on, and say what is known of it."""
        if not self._is_value(leaf):
            return leaf
        before = self.known.get(leaf)
        twice = isinstance(before, Ref) and before.call == value.call
        if before is not None and not twice:  # changed in place: as large as it was
            dynamic = self.sizings.is_dynamic(before)
        self.known.put(leaf, value)
        if isinstance(leaf, torch.Tensor):
            return self._info(leaf, origin, dynamic and leaf.ndim > 0)
        return OPAQUE

    def _encode(self, leaf: Any) -> Any:
        """The name of an argument: a value if it is one, else the constant itself."""
        if isinstance(leaf, Followed):
            return leaf.number
        known = self.known.get(leaf) if self._is_value(leaf) else None
        if isinstance(leaf, np.ndarray | np.generic) and _is_input(known):
            return GivenArray(leaf.copy())  # another array means other inputs
        if isinstance(known, Ref) and _is_input(known) and not isinstance(leaf, torch.Tensor):
            raise not_passed_on(leaf, known.leaf, self.trace.input_structure)
        if known is not None:
            if isinstance(known, Attribute) and known not in self.trace.attributes:
                self.trace.attributes[known] = self._info(leaf, Origin.MODEL)
            return known
        if isinstance(leaf, torch.Tensor):
            shape = "x".join(map(str, leaf.shape)) or "scalar"
            raise Unrecordable(
                self._open[-1],
                f"it uses a tensor ({leaf.dtype}, {shape}) that no recorded call made",
            )
        if is_plain(leaf):
            return leaf
        if isinstance(leaf, nn.Module) and id(leaf) in self.paths:
            return Submodule(self.paths[id(leaf)])
        kind = OutsideTorch if isinstance(leaf, np.ndarray) else Unrecordable
        hint = "; do without it (use_cache=False)" if "Cache" in type(leaf).__name__ else ""
        raise kind(
            self._open[-1], f"it passes a {type(leaf).__name__}, which is not plain data{hint}"
        )

    def _info(self, tensor: torch.Tensor, origin: Origin, dynamic: bool = False) -> TensorInfo:
        storage = self.known.storage(tensor)
        shape = tuple(tensor.shape)
        known = tensor.dtype, tensor.requires_grad, storage, origin, dynamic, tensor.layout
        return TensorInfo(shape, *known)


def _registered(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """A module's own parameters and buffers; torch.jit makes new objects of them every time."""
    is_scripted = isinstance(module, torch.jit.ScriptModule)
    return {} if is_scripted else {**module._parameters, **module._buffers}


def _is_input(value: Value | None) -> bool:
    return isinstance(value, Ref) and value.call == INPUTS


def _is_custom(target: object) -> bool:
    """Whether it is an operator that is not torch's own, whose tags need not say what it does."""
    is_operator = isinstance(target, OpOverload | OpOverloadPacket)
    return is_operator and str(target).partition(".")[0] not in KNOWN_OPERATORS


def _dtype(tensor: torch.Tensor, dtype: object, non_blocking: bool = False) -> Any:
    """The dtype of a kind of tensors such as `"torch.FloatTensor"`, if it has the same device.

    So the program runs on whatever device it is placed.
    """
    name = f"{dtype.__module__}.{dtype.__name__}" if isinstance(dtype, type) else dtype
    if not isinstance(name, str):
        return dtype
    device, _, kind = name.rpartition(".")
    same = device == tensor.type().rpartition(".")[0] and hasattr(torch, kind)
    return getattr(torch, kind).dtype if same else dtype


_CALLERS = (inspect.unwrap(Recorder.call_module).__code__, Recorder.run.__code__)
"""The code of the methods that call modules, and of the one that calls the model."""
