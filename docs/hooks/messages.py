"""Every message of an error or a warning in Penstock's source, for the page on troubleshooting.

`python docs/hooks/messages.py` prints them.
"""

from __future__ import annotations

import ast
import html
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HOME = Path(__file__).parents[2]
ERRORS = (
    *("InputError", "DeviceError", "RequestError", "PlanError", "NothingFitsError"),
    *("CapacityError", "CaptureError", "CheckpointError", "AuditError", "ScheduleError"),
    *("ClosedError", "WorkerError", "WorkerDied", "WorkerTimeout", "PenstockError"),
    "StatesLost",
)
OTHERS = ("AttributeError", "ImportError", "KeyError", "RuntimeError", "TypeError", "ValueError")
SUBJECTS = {
    "capture": "Recording a model",
    "weights": "Models without weights",
    "profile": "Measuring",
    "plan": "Planning",
    "planning": "Planning",
    "schedule": "Schedules",
    "simulate": "Simulating",
    "board": "Watching a run",
    "account": "Watching a run",
    "observe": "Watching a run",
    "storage": "Checkpoints",
    "checkpoint": "Checkpoints",
    "links": "Between workers",
    "engine": "Batches, losses and results",
    "passes": "Batches, losses and results",
    "sessions": "Generation and sessions",
    "generation": "Generation and sessions",
    "runner": "Batches, losses and results",
    "autograd": "Batches, losses and results",
    "workers": "Workers",
    "training": "Optimizers and scaling",
    "pipeline": "The pipeline",
    "running": "The pipeline",
    "changing": "The pipeline",
    "steps": "The pipeline",
    "audit": "The pipeline",
    "integrations": "Frameworks",
    "verification": "Verifying",
    "comparison": "Verifying",
    "devices": "Devices",
    "cli": "The command line",
}
_MOST = 12  # forms of one message that are listed, if parts of it depend on something
_FEW = 2  # forms of a value in a message
_LEAST = 5  # letters that a message must have, not to be only what another one has said


@dataclass(frozen=True)
class Message:
    """A message of an error or a warning.

    Attributes:
        error: the name of its class; `"warning"` for a warning.
        subject: what part of Penstock it is about.
        text: its words, with `…` for every value.
        place: its file and line.
    """

    error: str
    subject: str
    text: str
    place: str


_Locals = dict[str, list[ast.expr]]  # what was assigned to the names of a function


class _Module:
    """What the names in a module may stand for."""

    def __init__(self, tree: ast.Module) -> None:
        self.functions: dict[str, list[ast.expr]] = {}
        self.constants: dict[str, ast.expr] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                inner = ast.walk(node)
                returned = [n.value for n in inner if isinstance(n, ast.Return) and n.value]
                self.functions[node.name] = returned
        for statement in tree.body:
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                self.constants[statement.targets[0].id] = statement.value
        self.imported = [
            (
                statement.module or "",
                {alias.asname or alias.name: alias.name for alias in statement.names},
            )
            for statement in tree.body
            if isinstance(statement, ast.ImportFrom)
        ]

    def take(self, others: Mapping[str, _Module]) -> None:
        """Know the constants that come from other modules."""
        for source, names in self.imported:
            constants = others[source].constants if source in others else {}
            for name, there in names.items():
                if there in constants:
                    self.constants.setdefault(name, constants[there])

    def texts(self, node: ast.expr, local: _Locals, depth: int = 0) -> list[str]:
        """All forms of an expression that is a text, with `…` for what is not known."""
        if depth > 6:
            return ["…"]

        def inner(part: ast.expr) -> list[str]:
            return self.texts(part, local, depth + 1)

        found = ["…"]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = [node.value]
        elif isinstance(node, ast.JoinedStr):
            found = _joined([self._piece(value, inner) for value in node.values])
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            found = _joined([inner(node.left), inner(node.right)])
        elif isinstance(node, ast.IfExp):
            found = inner(node.body) + inner(node.orelse)
        elif isinstance(node, ast.BoolOp):
            found = [text for value in node.values for text in inner(value)]
        elif isinstance(node, ast.Name):
            constant = self.constants.get(node.id)
            values = local.get(node.id, [] if constant is None else [constant])
            found = [text for value in values for text in inner(value)] or ["…"]
        elif isinstance(node, ast.Call | ast.Attribute):  # of a function, or a property
            named = node.func if isinstance(node, ast.Call) else node
            name = ast.unparse(named).rpartition(".")[2]
            values = self.functions.get(name, [])
            found = [text for value in values for text in inner(value)] or ["…"]
        return found[:_MOST]

    def _piece(self, value: ast.expr, inner: Callable[[ast.expr], list[str]]) -> list[str]:
        if isinstance(value, ast.FormattedValue):
            simple = isinstance(value.value, ast.Name | ast.IfExp | ast.Constant)
            forms = inner(value.value) if simple else ["…"]
            return forms if len(forms) <= _FEW else ["…"]
        return inner(value)


def _joined(parts: Sequence[list[str]]) -> list[str]:
    forms = itertools.islice(itertools.product(*parts), _MOST)
    return list(dict.fromkeys("".join(form) for form in forms))


def _scopes(tree: ast.AST, local: _Locals) -> Iterator[tuple[ast.Call, _Locals]]:
    """Every call of a tree, with what was assigned to names in its function."""
    for node in ast.iter_child_nodes(tree):
        inner = local
        if isinstance(node, ast.FunctionDef):
            inner = {}
            for each in ast.walk(node):
                if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
                    inner.setdefault(each.targets[0].id, []).append(each.value)
        if isinstance(node, ast.Call):
            yield node, inner
        yield from _scopes(node, inner)


def messages(root: Path = HOME / "penstock") -> Iterator[Message]:
    """The messages in the files below a folder; those that pass on another's words are left out."""
    seen = set()
    for message in _all(root):
        if (message.error, message.text) not in seen and _says(message):
            seen.add((message.error, message.text))
            yield message


def passed_on(root: Path = HOME / "penstock") -> Iterator[Message]:
    """The errors whose words are made elsewhere."""
    yield from (message for message in _all(root) if not _says(message))


def _says(message: Message) -> bool:
    return sum(letter.isalpha() for letter in message.text) >= _LEAST


@cache
def _all(root: Path) -> tuple[Message, ...]:
    return tuple(_read(root))


def _read(root: Path) -> Iterator[Message]:
    trees = {path: ast.parse(path.read_text()) for path in sorted(root.rglob("*.py"))}
    modules = {path: _Module(tree) for path, tree in trees.items()}
    named = {
        ".".join(path.relative_to(root.parent).with_suffix("").parts): module
        for path, module in modules.items()
    }
    narrower = dict(pair for tree in trees.values() for pair in _narrower(tree))
    for path, tree in trees.items():
        part = path.relative_to(root).parts[0].removesuffix(".py")
        if part == "bench":
            continue
        module = modules[path]
        module.take(named)
        raised = {id(n.exc) for n in ast.walk(tree) if isinstance(n, ast.Raise)}
        for call, local in _scopes(tree, {}):
            name = ast.unparse(call.func).rpartition(".")[2]
            name = narrower.get(name, name)
            wanted = name in ERRORS or (name in OTHERS and id(call) in raised)
            error = "warning" if name == "warn" else name if wanted else ""
            argument = _message_of(name, call)
            if not error or argument is None:
                continue
            for form in module.texts(argument, local):
                text = " ".join(form.split())
                place = f"{path.relative_to(root.parent)}:{call.lineno}"
                yield Message(error, SUBJECTS.get(part, "Other"), text, place)


def _narrower(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The classes of a module that are kinds of one of our errors, and that error."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name not in ERRORS and node.bases:
            base = ast.unparse(node.bases[0]).rpartition(".")[2]
            if base in ERRORS:
                yield node.name, base


def _message_of(name: str, call: ast.Call) -> ast.expr | None:
    if name in ("WorkerError", "WorkerDied", "AuditError") or not call.args:
        return None  # these make their own, see `WORDED`
    return call.args[0]


WORDED = (
    Message("WorkerError", "Workers", "stage … failed in the … of micro-batch …: …", "errors.py"),
    Message("WorkerError", "Workers", "worker … failed in the …: …", "errors.py"),
    Message(
        *("WorkerDied", "Workers"),
        "worker … in the … of micro-batch … in stage …; the pipeline is closed",
        "errors.py",
    ),
    Message("WorkerDied", "Workers", "worker … during …; the pipeline is closed", "errors.py"),
    Message(
        *("WorkerDied", "Workers"),
        "worker … between two passes; the pipeline is closed",
        "errors.py",
    ),
    Message(
        *("WorkerDied", "Workers"),
        "worker … …; the pipeline is closed. No remaining worker has a copy of what worker … had: "
        "… died as well. So what was trained since the last checkpoint is lost. …",
        "workers/ray/copying.py",
    ),
    Message(
        *("AuditError", "The pipeline"),
        "micro-batch … of pass … …. It arises …. The pipeline runs the forward as it was recorded.",
        "errors.py",
    ),
    Message(
        *("WorkerTimeout", "Workers"),
        "worker … did not finish within … s; give Pipeline a larger timeout= if its work takes "
        "longer than that",
        "workers/pool.py",
    ),
    Message("WorkerTimeout", "Workers", "worker … is stopped by a signal", "workers/pool.py"),
)


def markdown(root: Path = HOME / "penstock") -> str:
    """All messages, by class and subject."""
    found = [*WORDED, *messages(root)]
    lines = []
    kinds = dict.fromkeys([*ERRORS, "warning", *OTHERS])
    for error in kinds:
        of_error = [message for message in found if message.error == error]
        if not of_error:
            continue
        heading = "Warnings" if error == "warning" else error
        lines += [f"### {heading}", ""]
        for subject in sorted({message.subject for message in of_error}):
            items = sorted({m.text for m in of_error if m.subject == subject}, key=str.lower)
            lines += [f"#### {heading}: {subject}", "", '<ul class="messages">']
            lines += [f"<li>{html.escape(item)}</li>" for item in items]
            lines += ["</ul>", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    for message in [*WORDED, *messages(), *passed_on()]:
        print(f"{message.place}  {message.error}: {message.text}")
