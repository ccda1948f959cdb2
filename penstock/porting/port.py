"""Changes a training script so that a pipeline trains its model."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Literal

from penstock.errors import InputError
from penstock.porting.building import Built, Options, build
from penstock.porting.changes import Changes, Note
from penstock.porting.model import Model
from penstock.porting.ranks import change_samplers, note_ranks, unwrap
from penstock.porting.source import Script
from penstock.porting.train_step import change_step
from penstock.porting.training import Step, steps
from penstock.porting.uses import change_clips, change_uses
from penstock.porting.variables import Variable, Variables

_OTHERS = {
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "pytorch_lightning": "Lightning",
    "deepspeed": "DeepSpeed",
    "fabric": "Lightning Fabric",
}


@dataclass(frozen=True)
class Ported:
    """A script that uses a pipeline.

    Attributes:
        text: the text of the script.
        notes: what is to be known of its lines, sorted by line.
        style: how its steps train: by `"train_step"`, as a `"call"` with `loss.backward()`, or
            `"mixed"`.
    """

    text: str
    notes: tuple[Note, ...]
    style: Literal["train_step", "call", "mixed"]


def port(text: str, name: str = "the script", options: Options | None = None) -> Ported:
    """Change a training script so that a pipeline trains its model.

    Args:
        text: of the script.
        name: of its file, for messages.
        options: what the pipeline is built with.

    Raises:
        InputError: it is not Python, uses Penstock already, or has no training that is recognised.
    """
    source = Script(text, name)
    variables = Variables(source)
    _check_is_new(source)
    (variable, own), *others = _trained(variables)
    model = Model(variables, variable, own)
    changes = Changes(source)
    for other, other_steps in others:
        changes.note(
            other_steps[0].backward,
            "left",
            f"{other.name} is another model that is trained: give it a pipeline of its own "
            "(docs/recipes.md, Two models)",
        )
    unwrap(model, changes)
    built = build(model, options or Options(), changes)
    for step in own:
        change_step(step, built, changes)
    change_uses(built, changes)
    change_clips(built, changes)
    change_samplers(model, changes)
    _import(built, changes)
    note_ranks(built, changes)
    _note_dropout(changes)
    return _result(built, changes)


def _trained(variables: Variables) -> list[tuple[Variable, list[Step]]]:
    """The models that a script trains, with their steps: the one with the most comes first.

    Raises:
        InputError: there is none.
    """
    found = [(model, steps(variables, model)) for model in variables.models()]
    trained = [(model, own) for model, own in found if own]
    if not trained:
        raise InputError(_nothing(variables.source, variables))
    return sorted(trained, key=lambda each: (-len(each[1]), each[1][0].backward.lineno))


def _check_is_new(source: Script) -> None:
    for node in ast.walk(source.tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [str(node.module)]
        if any(name.split(".")[0] == "penstock" for name in names):
            raise InputError(
                f"{source.name}:{node.lineno} imports penstock already: there is nothing to change"  # type: ignore[attr-defined]
            )


def _nothing(source: Script, variables: Variables) -> str:
    """What to say where no training was found."""
    seen: list[str] = []
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            if (first := str(module).split(".")[0]) in _OTHERS:
                seen.append(f"line {node.lineno} imports {_OTHERS[first]}: see docs/frameworks.md")
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr == "backward":
            what = source.of(node)
            where = "in a class" if source.is_in_class(node) else "its model was not found"
            seen.append(f"line {node.lineno} has {' '.join(what.split())}, {where}")
        elif variables.full(node.func).split(".")[-1].endswith("Trainer"):
            seen.append(f"line {node.lineno} uses a Trainer: see docs/frameworks.md")
    known = "; ".join(dict.fromkeys(seen)) or "there is no call of backward()"
    return (
        f"{source.name} has no training loop that is recognised: {known}. A loop is recognised if "
        "a variable holds the model (not an attribute such as self.model), the loop calls it, and "
        "backward() is called on a loss of the result. Otherwise, change the script by hand: "
        "pipe = penstock.Pipeline(model, (x,)), and pipe(x) in place of model(x)"
    )


def _import(built: Built, changes: Changes) -> None:
    """Import Penstock after the imports at the top."""
    source = changes.source
    new, body = source.newline, source.tree.body
    lines = f"import torch{new}" if built.needs_torch else ""
    lines += "import penstock as ps" if built.package == "ps" else "import penstock"
    last = None
    for statement in body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            last = statement
        elif last is not None or not (
            isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        ):
            break
    if last is not None:
        _, end = source.lines_of(last)
        before = "" if source.text[:end].endswith(("\n", "\r")) else new
        changes.edits.insert(end, f"{before}{lines}{new}")
        return
    start = next((s for s in body if not isinstance(s, ast.Expr)), body[0])
    changes.edits.insert(source.lines_of(start)[0], f"{lines}{new}")


def _note_dropout(changes: Changes) -> None:
    text = changes.source.text
    dropout = re.search(r"[Dd]ropout", text)
    if dropout:
        line = text.count("\n", 0, dropout.start()) + 1
        what = (
            "dropout draws other masks than without a pipeline, which depend on seed, "
            "step and micro-batch only"
        )
        changes.notes.append(Note(line, "check", what))


def _result(built: Built, changes: Changes) -> Ported:
    """The changed script.

    Raises:
        InputError: it is not Python, as the pipeline is built in the middle of a line.
    """
    source = changes.source
    text = changes.edits.apply(source.text)
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise InputError(
            f"{source.name}:{built.anchor.lineno}: the pipeline has to be built here, but "
            "other statements, or the loop's head, are on this line: give it a line of its own"
        ) from error
    are_one_call = {built.one_call(step) is not None for step in built.model.steps}
    style: Literal["train_step", "call", "mixed"] = (
        "mixed" if len(are_one_call) > 1 else "train_step" if True in are_one_call else "call"
    )
    unique = sorted(dict.fromkeys(changes.notes), key=lambda note: note.line)
    return Ported(text, tuple(unique), style)
