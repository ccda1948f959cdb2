"""The optimizers and gradient scalers of a script, which the pipeline creates where it can."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from penstock.porting.changes import Changes
from penstock.porting.model import Model
from penstock.porting.source import loaded, stored

_SCALERS = ("torch.amp.GradScaler", "torch.cuda.amp.GradScaler", "torch.GradScaler")
_PARAMETERS = ("parameters", "named_parameters")


@dataclass(frozen=True)
class Creation:
    """A call that creates an optimizer of torch for the model alone, or a scaler.

    Attributes:
        at: the index of the statement that contains it, in the block where the training begins.
        call: the call.
        statement: the innermost statement that contains it.
        is_scaler: whether it creates a scaler.
    """

    at: int
    call: ast.Call
    statement: ast.stmt
    is_scaler: bool


def creations(model: Model) -> list[Creation]:
    """What creates the optimizers and scalers before the training, in the order of the text."""
    found = []
    for at, top in enumerate(model.place.before):
        for node in _inside(top):
            if not isinstance(node, ast.Call):
                continue
            is_optimizer = _is_optimizer(model, node)
            if is_optimizer or model.variables.full(node.func) in _SCALERS:
                statement = model.source.statement(node)
                found.append(Creation(at, node, statement, not is_optimizer))
    return found


def _inside(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement, without those of functions and classes in it."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop(0)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node
            waiting += ast.iter_child_nodes(node)


def _is_optimizer(model: Model, call: ast.Call) -> bool:
    """Whether a call creates an optimizer of the model's parameters alone."""
    return _optimizes(model, call) and not any(
        isinstance(each, ast.Attribute) and each.attr in _PARAMETERS and not model.is_in(each.value)
        for each in ast.walk(call)
    )


def _optimizes(model: Model, call: ast.Call) -> bool:
    """Whether a call creates an optimizer that the pipeline could create, of the model too."""
    name = model.variables.full(call.func)
    is_known = re.fullmatch(r"torch\.optim\.[A-Z]\w*", name) and not name.endswith("LBFGS")
    return bool(is_known) and model.is_in(call)


def may_move(model: Model, creation: Creation, end: int) -> bool:
    """Whether a creation may be moved behind the statements up to index `end` of the block."""
    block = model.place.block
    statement, call = creation.statement, creation.call
    if statement is not block[creation.at] or not isinstance(statement, ast.Assign):
        return False
    if statement.value is not call or not isinstance(statement.targets[0], ast.Name):
        return False
    between = block[creation.at + 1 : end]
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    used = loaded(*(each for each in between if not isinstance(each, functions)))
    changed = stored(*between) & loaded(call)
    lookup, are_same = model.variables.lookup, model.variables.are_same
    return not used & stored(statement) and all(
        are_same(lookup(model.owner, name), model.variable) for name in changed
    )


def created(model: Model, creation: Creation, pipe: str, changes: Changes) -> str:
    """The call by which the pipeline of this name creates an optimizer or a scaler."""
    call, of = creation.call, model.source.of
    indent = model.source.indent(creation.statement)
    options = [
        model.source.keyword(each) for each in call.keywords if each.arg not in ("device", "params")
    ]
    if creation.is_scaler:
        changes.note(
            call, "changed", "the pipeline creates the scaler, with one scale for all stages"
        )
        return changes.call(f"{pipe}.scaler", options, indent)
    given = [each.value for each in call.keywords if each.arg == "params"]
    first, *others = [*call.args[:1], *given, *call.args[1:]]
    parts = [of(call.func)]
    if model.parameters_of(first) is None:
        parts.append(of(first))
    elif others:
        parts.append("None")
    parts += [*map(of, others), *options]
    changes.note(call, "changed", "the pipeline creates the optimizer, whose steps all workers do")
    return changes.call(f"{pipe}.optimizer", parts, indent)


def note_left(model: Model, pipe: str, converted: Collection[ast.Call], changes: Changes) -> None:
    """Say which optimizers the pipeline does not create."""
    for call in model.source.calls():
        if call not in converted and _optimizes(model, call):
            changes.note(
                call,
                "left",
                "the optimizer is created before the pipeline, or has other parameters too; it "
                f"steps in the script's process, and {pipe}.optimizer(...) would be "
                "divided among the workers",
            )
