"""Where a script calls the model, hands it on, or clips its gradients."""

from __future__ import annotations

import ast
import re

from penstock.porting import ranks
from penstock.porting.building import Built
from penstock.porting.changes import Changes
from penstock.porting.source import Script, dotted
from penstock.porting.variables import Passed, Variables

SUPPORTED = frozenset(
    "train eval training parameters named_parameters state_dict load_state_dict zero_grad".split()
)
"""Attributes of a model that a pipeline has as well, for functions of the script to use."""

_CLIPS = ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_")
_MOVES = ("to", "cuda", "cpu")


def change_uses(built: Built, changes: Changes) -> None:
    """Let the pipeline take the model's place where it is called and handed on."""
    model, source = built.model, changes.source
    for name in model.variables.uses(model.variable):
        if changes.is_gone(name):
            continue
        scope = source.scope(name)
        if model.variables.variable(name).scope is model.owner:
            if scope is not model.owner or name.lineno >= built.anchor.lineno:
                _use_in_owner(name, built, changes)
        elif scope in model.leading:
            _use_in_training(name, built, changes)


def _use_in_owner(name: ast.Name, built: Built, changes: Changes) -> None:
    """Change a use of the model where the pipeline is built and has a name of its own."""
    model, source = built.model, changes.source
    above = source.parent(name)
    passed = model.variables.passing(name)
    if isinstance(above, ast.Call) and above.func is name:
        if _is_scalar(source, above) and all(above is not step.call for step in model.steps):
            changes.note(
                name,
                "left",
                "the model itself is evaluated here, in this process; on several GPUs or "
                f"ranks use {built.pipe}.eval_step(..., loss_fn=...)",
            )
        else:
            changes.replace(name, built.pipe)
    elif isinstance(above, ast.Attribute) and model.is_ranked:
        ranks.fetch_state_dict(name, built, changes)
    elif passed is not None and _takes(passed, built):
        changes.replace(name, built.pipe)
        changes.note(name, "changed", f"{passed.function.name}() gets the pipeline")
    elif passed is not None:
        changes.note(
            name,
            "left",
            f"{passed.function.name}() gets the model itself, which it uses as a pipeline "
            "cannot be used; it runs in this process, unsplit",
        )
    elif (
        isinstance(above, ast.Call) and name in above.args and not model.variables.is_wrapper(above)
    ):
        function = source.of(above.func)
        changes.note(name, "left", f"{function}() gets the model itself, unsplit")


def _use_in_training(name: ast.Name, built: Built, changes: Changes) -> None:
    """Change a use of the model in a function that trains, where its name is the pipeline's."""
    source = changes.source
    statement, above = source.statement(name), source.parent(name)
    if isinstance(above, ast.Call) and above.func is name:
        return
    if isinstance(above, ast.Attribute):
        if above.attr in SUPPORTED or (above.attr == "module" and built.model.wrappers):
            return
        call = source.parent(above)
        is_whole = isinstance(call, ast.Call) and call is getattr(statement, "value", None)
        if above.attr in _MOVES and is_whole:
            changes.remove(statement)
            changes.note(statement, "changed", "the pipeline has its devices already")
            return
    passed = built.model.variables.passing(name)
    if passed is None or not _takes(passed, built):
        changes.replace(name, f"{name.id}.model")


def _takes(passed: Passed, built: Built) -> bool:
    """Whether a function takes a pipeline for an argument that is the model."""
    return passed.function in built.model.leading or _accepts(built.model.variables, passed)


def _accepts(variables: Variables, passed: Passed, depth: int = 0) -> bool:
    """Whether a function uses a parameter only as a pipeline can be used."""
    for node in ast.walk(passed.function):
        if not isinstance(node, ast.Name):
            continue
        if variables.variable(node) != (passed.function, passed.parameter):
            continue
        above = variables.source.parent(node)
        if isinstance(above, ast.Call) and above.func is node:
            if _is_scalar(variables.source, above):
                return False
        elif isinstance(above, ast.Attribute):
            if above.attr not in SUPPORTED:
                return False
        else:
            inner = variables.passing(node)
            if inner is None or depth > 8 or not _accepts(variables, inner, depth + 1):
                return False
    return True


def _is_scalar(source: Script, call: ast.Call) -> bool:
    """Whether the result of a call may hold a loss.

    So it is if `.loss` or an item of it is used, or if it is unpacked.
    """
    above = source.parent(call)
    if isinstance(above, ast.Attribute):
        return above.attr == "loss"
    if isinstance(above, ast.Subscript):
        return True
    if not isinstance(above, ast.Assign):
        return False
    if not isinstance(above.targets[0], ast.Name):
        return True
    name = above.targets[0].id
    return any(
        isinstance(node, ast.Attribute) and node.attr == "loss" and dotted(node.value) == name
        for node in source.walk(source.scope(call))
    )


def change_clips(built: Built, changes: Changes) -> None:
    """Let the pipeline clip the gradients of its model."""
    model, source = built.model, changes.source
    for node in source.calls():
        function = model.variables.full(node.func)
        scope = source.scope(node)
        if function not in _CLIPS or (scope not in model.leading and scope is not model.owner):
            continue
        named = next((k.value for k in node.keywords if k.arg == "parameters"), None)
        inner = node.args[0] if node.args else named
        name = model.parameters_of(inner) if inner is not None else None
        if inner is None or name is None:
            continue
        changes.replace(node.func, f"{built.name_for(name)}.{function.split('.')[-1]}")
        changes.note(node, "changed", "the pipeline clips the gradients of all its stages")
        if named is None:
            start, end = source.span(inner)
            rest = re.compile(r"\s*,\s*").match(source.text, end)
            changes.edits.replace(start, rest.end() if rest else end, "")
