"""Why a model cannot be run by several replicas at the same time, or gains nothing from it.

If a forward changes something that a later forward reads, micro-batches have to change it one after
the other, so replicas wait for one another at the modules that do so. If these are BatchNorms,
which take little of the time, everything else still runs at the same time. Other modules may take
nearly all of it. Changes of what is not in a buffer are not seen by replicas in other processes.
"""

from __future__ import annotations

from torch import nn

from penstock.capture.attributes import owner_of
from penstock.capture.norms import NORMS, is_patched
from penstock.capture.preserve import own_generators
from penstock.capture.program import Program
from penstock.capture.watching import is_compiled
from penstock.torch_internals import BatchNorm


def why_one_replica(program: Program) -> str:
    """Why a model should have one replica only: a sentence; empty if it can have several."""
    reason = _reason(program)
    return reason and f"There is one replica, as {reason}, so its forwards come one after another."


def why_in_turns(program: Program) -> str:
    """Why several replicas of a model wait for each other: a sentence; empty if they do not."""
    reason = _reason(program)
    return reason and (
        f"Replicas run one micro-batch after the other where {reason}. replicas=1 may be faster."
    )


def why_no_recomputing(program: Program) -> str:
    """Why replicas of a model cannot recompute; empty if they can."""
    modules = dict(program.model.named_modules(remove_duplicate=False))
    for name in program.train.changed:
        path, _ = owner_of(program.model, name)
        calls = [call for call in program.train.calls if call.target == path]
        plain = all(call.ambient is None and not call.is_seeded for call in calls)
        if not (calls and plain and may_have_a_twin(modules[path])):
            return f"a forward changes {name!r}, which others may be using"
    return ""


def may_have_a_twin(module: nn.Module) -> bool:
    """Whether a module is a norm that a copy can stand in for.

    Nothing that its call runs may know the module itself, so it has no hooks, no children, and is
    not compiled.
    """
    if getattr(type(module), "forward", None) not in NORMS:  # a scripted one has none
        return False
    return not (is_patched(module) or any(module.children()) or is_compiled(module))


def _reason(program: Program) -> str:
    modules = dict(program.model.named_modules(remove_duplicate=False))
    for name in sorted(program.remembering):
        return f"a forward changes attributes of {_named(name)}"
    for name, module in modules.items():
        for attribute, _ in own_generators(module):
            return f"{_named(name)} has a random generator of its own, {attribute!r}"
    for name, _ in program.train.shared:
        return f"a forward changes {name}, which several modules have"
    for name in sorted(program.written):
        return f"a forward changes the parameter {name!r}"
    called = {call.target for call in program.train.calls if call.is_module}
    alone = {id(modules[name]) for name in called if name in modules}
    for name in program.train.changed:
        path, _ = owner_of(program.model, name)
        owner = modules[path]
        if not (isinstance(owner, BatchNorm) and id(owner) in alone):
            return f"a forward changes {name!r}, a buffer of {type(owner).__name__}"
    return ""


def _named(path: str) -> str:
    return repr(path) if path else "the model"
