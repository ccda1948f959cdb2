"""What a script has for several ranks, or to compile the model: a pipeline needs none of it."""

from __future__ import annotations

import ast
from typing import TypeGuard

from penstock.porting.building import Built
from penstock.porting.changes import Changes
from penstock.porting.model import Model
from penstock.porting.source import dotted


def unwrap(model: Model, changes: Changes) -> None:
    """Take the wrappers of the model away."""
    source = model.source
    for call in model.wrappers:
        statement, inner = source.statement(call), call.args[0]
        name = model.variables.full(call.func).split(".")[-1]
        changes.note(call, "changed", f"{name} is taken away; the pipeline does its work")
        if (
            isinstance(statement, ast.Assign)
            and statement.value is call
            and isinstance(inner, ast.Name)
            and dotted(statement.targets[0]) == inner.id
        ):
            above = source.parent(statement)
            changes.remove(above if _only_prints_besides(above, statement) else statement)
        else:
            changes.replace(call, source.of(inner))
    for node in ast.walk(source.tree) if model.wrappers else ():
        if isinstance(node, ast.Attribute) and node.attr == "module" and model.is_it(node.value):
            changes.edits.replace(source.span(node.value)[1], source.span(node)[1], "")


def _only_prints_besides(above: ast.AST, statement: ast.stmt) -> TypeGuard[ast.If]:
    """Whether an `if` without an `else` has only calls of `print` besides a statement."""
    return (
        isinstance(above, ast.If)
        and not above.orelse
        and all(
            isinstance(each, ast.Expr)
            and isinstance(each.value, ast.Call)
            and dotted(each.value.func) == "print"
            for each in above.body
            if each is not statement
        )
    )


def fetch_state_dict(name: ast.Name, built: Built, changes: Changes) -> None:
    """Let all ranks bring the model up to date before one of them takes its state dict."""
    source = changes.source
    node = source.parent(name)
    if isinstance(node, ast.Attribute) and node.attr == "module":
        node = source.parent(node)
    if not isinstance(node, ast.Attribute) or node.attr != "state_dict":
        return
    condition: ast.If | None = None
    for each in source.parents(node):
        if isinstance(each, (ast.For, ast.While, ast.FunctionDef, ast.Module)):
            break
        if isinstance(each, ast.If):
            condition = each
    if condition is None or source.among(built.model.place.before, condition) is not None:
        changes.replace(name, built.pipe)
        changes.note(name, "changed", "the state dict is gathered from all ranks")
        return
    changes.insert(condition, [f"{built.pipe}.fetch()  # all ranks bring their models up to date"])
    changes.note(condition, "changed", "all ranks fetch the weights before one saves them")


def change_samplers(model: Model, changes: Changes) -> None:
    """Let every rank have the whole batch."""
    source = model.source
    for node in source.calls():
        if model.variables.full(node.func).split(".")[-1] != "DistributedSampler":
            continue
        if {"num_replicas", "rank"} & {k.arg for k in node.keywords} or len(node.args) > 1:
            changes.note(node, "check", "every rank needs the same batches: num_replicas=1, rank=0")
            continue
        end = source.span(node)[1] - 1
        comma = "" if source.text[:end].rstrip().endswith((",", "(")) else ", "
        changes.edits.insert(end, f"{comma}num_replicas=1, rank=0")
        changes.note(
            node,
            "check",
            "every rank gets the same, whole batch now, so a step has as many rows as "
            "batch_size says, where it had so many for each rank: multiply batch_size by the "
            "number of ranks to train with as many",
        )


def note_ranks(built: Built, changes: Changes) -> None:
    """Say what the ranks of a pipeline have to do alike."""
    for node in changes.source.calls():
        last = built.model.variables.full(node.func).split(".")[-1]
        if last in ("no_sync", "require_backward_grad_sync"):
            changes.note(node, "check", "a pipeline has no no_sync(): gradients add up without it")
        elif last == "init_process_group":
            changes.note(
                node,
                "check",
                "every rank is a worker of one pipeline: all must build the same model (call "
                "torch.manual_seed before) and have the same batches. What one of them does "
                f"alone must not call the pipeline; all call {built.pipe}.fetch() before it "
                "uses the model",
            )
