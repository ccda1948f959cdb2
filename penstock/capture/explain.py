"""What a program is made of: its calls, and the tree of its modules, as text and as data."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from torch import nn

from penstock.capture.calls import (
    ROWS,
    Attribute,
    Call,
    Sizes,
    TensorInfo,
    Trace,
    function_name,
)
from penstock.capture.cuts import Cuts
from penstock.display.tables import aligned
from penstock.units import show_bytes

_NAMED = 3  # calls, modules or functions that a line names before it says "and 5 more"
_LINES = 48  # as many as fit a screen; deeper levels are left out
_BAR = 12
_EIGHTHS = " ▏▎▍▌▋▊▉"

_TableRow = tuple[str, ...]
_CALL_HEADING = ("call", "what", "parameters", "weights", "time", "cut after", "marks", "returns")
_CALL_TEXT = (1, 6, 7)  # the columns that are text
_MODULE_HEADING = ("module", "class", "calls", "weights", "share", "time", "", "enters", "")
_MODULE_TEXT = (0, 1, 6, 8)


@dataclass(frozen=True)
class CallRow:
    """One call of the program.

    Attributes:
        number: its place, from 0.
        label: the module's path, or the function and the module that called it.
        module: the module that it is, or whose forward makes it.
        function: the function's name; empty for a module.
        parameters: how many numbers are in the parameters that it is the first to use.
        weight_bytes: the bytes of these.
        outputs: dtype and sizes of the tensors it returns; `B` is the number of rows.
        random: whether it draws random numbers.
        in_place: whether it changes a value in place.
        cut_bytes: the bytes that would cross a cut after it, for the example batch; `None` after
            the last call.
        forbidden: why there can be no cut after it; `None` if there can.
        seconds: the seconds that its forward and backward take for a micro-batch; `None` where
            nothing was measured.
    """

    number: int
    label: str
    module: str
    function: str
    parameters: int
    weight_bytes: int
    outputs: tuple[str, ...]
    random: bool
    in_place: bool
    cut_bytes: int | None
    forbidden: str | None
    seconds: float | None = None


@dataclass(frozen=True)
class Explanation:
    """What `program.explain()` returns; `str` of it is the tree of modules.

    Attributes:
        model: the class of the model.
        batch_size: the rows of the example.
        parameters: how many numbers are in the model's parameters.
        rows: the calls in training, in order.
        differences: what evaluation does otherwise, in words; empty if it runs the same program.
        closed: why the program does not look into these modules, by qualified name.
        closed_functions: why plain functions are one call each, by names such as
            `module.function()`.
        kinds: the class of every module, by qualified name.
        capture_seconds: how long capturing took, where somebody measured it.
    """

    model: str
    batch_size: int
    parameters: int
    rows: tuple[CallRow, ...]
    differences: tuple[str, ...]
    closed: dict[str, str]
    closed_functions: dict[str, str]
    kinds: dict[str, str]
    capture_seconds: float | None = None

    @property
    def same_in_eval(self) -> bool:
        """Whether evaluation runs the same program as training."""
        return not self.differences

    @property
    def possible_cuts(self) -> int:
        """How many of the positions between two calls can be cut."""
        return sum(row.forbidden is None for row in self.rows[:-1])

    @property
    def summary(self) -> str:
        """One sentence: the calls, parameters and possible cuts, and whether evaluation differs."""
        took = "" if self.capture_seconds is None else f", captured in {self.capture_seconds:.1f} s"
        modes = "runs the same program" if self.same_in_eval else "differs as said above"
        return (
            f"{self.model}: {len(self.rows)} calls, {self.parameters:,} parameters, "
            f"{self.possible_cuts} possible cuts{took}; evaluation {modes}"
        )

    def to_dict(self) -> dict[str, Any]:
        """All fields and the derived figures, as plain data."""
        derived = {"possible_cuts": self.possible_cuts, "same_in_eval": self.same_in_eval}
        return {**asdict(self), **derived}

    def tree(self, depth: int | None = None, width: int | None = None) -> str:
        """The modules as a tree: weights, time where it was measured, and what enters each.

        `enters` are the bytes that would cross a cut before the module, for the example batch.
        Consecutive modules that are alike share a line; the submodules of the first one follow it.

        Args:
            depth: how many levels to show; as many as fit a screen by default.
            width: the most characters in a line of the tree; any number by default.
        """
        return "\n".join([*aligned(_tree_rows(self, depth), _MODULE_TEXT, width), *self.notes()])

    def table(self, width: int | None = None) -> str:
        """Every call, and what crosses a cut after it, in lines no longer than `width`."""
        rows = [_CALL_HEADING, *map(_call_row, self.rows)]
        return "\n".join([*aligned(rows, _CALL_TEXT, width), *self.notes()])

    def notes(self) -> list[str]:
        """The modules that stayed closed, what evaluation does otherwise, and the summary."""
        composite = {path: why for path, why in self.closed.items() if path in self.kinds}
        functions = [f"closed: {name}: {why}" for name, why in self.closed_functions.items()]
        modes = [f"evaluation: {difference}" for difference in self.differences]
        return ["", *_reasons(composite), *functions, *modes, self.summary]

    def __str__(self) -> str:
        return self.tree()


def explain(
    model: nn.Module,
    cuts: Cuts,
    evaluation: Trace,
    sizes: Sizes,
    closed: Mapping[str, str],
    functions: Mapping[str, str],
    seconds: Sequence[float] | None = None,
) -> Explanation:
    """What a program does, call by call, see `Program.explain`.

    Args:
        model: the recorded module.
        cuts: where its trace in training can be cut.
        evaluation: its trace in evaluation mode; the same object where nothing differs.
        sizes: the sizes of the example.
        closed: why the program does not look into these modules, by qualified name.
        functions: why it does not look into these plain functions, by name.
        seconds: the seconds that forward and backward of every call take, if they were measured.
    """
    train = cuts.trace
    return Explanation(
        model=type(model).__name__,
        batch_size=sizes[ROWS],
        parameters=sum(p.numel() for p in model.parameters()),
        rows=tuple(
            _explained(cuts, sizes, number, used, seconds[number] if seconds is not None else None)
            for number, used in enumerate(first_used(model, train))
        ),
        differences=_differences(train, evaluation),
        closed=dict(closed),
        closed_functions=dict(functions),
        kinds={path: type(module).__name__ for path, module in model.named_modules()},
    )


def first_used(model: nn.Module, trace: Trace) -> list[list[nn.Parameter]]:
    """For every call, the parameters that it is the first to use."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    seen: set[int] = set()
    result = []
    for call in trace.calls:
        names = [*call.hidden, *(v.name for v in call.reads() if isinstance(v, Attribute))]
        used = {id(parameters[n]): parameters[n] for n in names if n in parameters}
        result.append([p for k, p in used.items() if k not in seen])
        seen.update(used)
    return result


def _explained(
    cuts: Cuts, sizes: Sizes, number: int, used: Sequence[nn.Parameter], seconds: float | None
) -> CallRow:
    call, after = cuts.trace.calls[number], number + 1
    is_last = after == len(cuts.trace.calls)
    crossing = cuts.num_bytes(after, sizes) + cuts.weight_bytes(after, sizes)
    return CallRow(
        number=number,
        label=call.label,
        module=call.target if isinstance(call.target, str) else call.path,
        function="" if isinstance(call.target, str) else f"{function_name(call.target)}()",
        parameters=sum(p.numel() for p in used),
        weight_bytes=sum(p.nbytes for p in used),
        outputs=tuple(str(o) for o in call.outputs if isinstance(o, TensorInfo)),
        random=call.random,
        in_place=bool(call.mutates),
        cut_bytes=None if is_last else crossing,
        forbidden=None if is_last else cuts.forbidden(after),
        seconds=seconds,
    )


def _differences(train: Trace, evaluation: Trace) -> tuple[str, ...]:
    """What evaluation does otherwise than training, in words."""
    if evaluation is train:
        return ()
    ours, theirs = train.calls, evaluation.calls
    blocks = difflib.SequenceMatcher(
        None, [c.label for c in ours], [c.label for c in theirs], autojunk=False
    ).get_matching_blocks()
    pairs = [(ours[b.a + k], theirs[b.b + k]) for b in blocks for k in range(b.size)]
    kept = {id(call) for pair in pairs for call in pair}
    found = {
        "does not make": [c for c in ours if id(c) not in kept],
        "makes in addition": [c for c in theirs if id(c) not in kept],
        "draws no random numbers in": [a for a, b in pairs if a.random and not b.random],
    }
    sentences = [f"{verb} {_listed(calls)}" for verb, calls in found.items() if calls]
    updated = set(train.changed) - set(evaluation.changed)
    if updated:
        sentences.append(f"leaves alone {len(updated)} buffers that training changes")
    return tuple(sentences or ["gives some calls other arguments"])


def _listed(calls: Sequence[Call]) -> str:
    names = list(dict.fromkeys(call.label for call in calls))
    shown = ", ".join(names[:_NAMED])
    rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{len(calls)} call{'s' if len(calls) > 1 else ''}: {shown}{rest}"


def _call_row(row: CallRow) -> _TableRow:
    marks = [
        *(["random"] if row.random else []),
        *(["in place"] if row.in_place else []),
        *([f"no cut: {row.forbidden}"] if row.forbidden else []),
    ]
    return (
        str(row.number),
        row.label,
        f"{row.parameters:,}" if row.parameters else "",
        show_bytes(row.weight_bytes) if row.weight_bytes else "",
        "" if row.seconds is None else f"{row.seconds * 1000:.2f} ms",
        "" if row.cut_bytes is None else show_bytes(row.cut_bytes),
        ", ".join(marks),
        ", ".join(row.outputs),
    )


# -- the tree of modules ---------------------------------------------------------------------


@dataclass
class _Node:
    """A module, or the functions that a module's own forward calls.

    Attributes:
        name: its name in the module around it.
        kind: the name of its class; empty for functions.
        rows: the calls that it makes, or is.
        children: its submodules and functions by name, in the order of the calls.
        closed: a note on a module that is one call; empty for others.
    """

    name: str
    kind: str = ""
    rows: list[CallRow] = field(default_factory=list)
    children: dict[str, _Node] = field(default_factory=dict)
    closed: str = ""

    @property
    def weight_bytes(self) -> int:
        """The bytes of the parameters that it is the first to use."""
        return sum(row.weight_bytes for row in self.rows)

    @property
    def seconds(self) -> float:
        """The seconds that its calls take, forward and backward; 0 where nothing was measured."""
        return sum(row.seconds or 0.0 for row in self.rows)

    def is_like(self, other: _Node) -> bool:
        """Whether both are the same but for their names."""
        return self is other or (
            bool(self.kind)
            and (self.kind, self.weight_bytes, len(self.rows), self.closed)
            == (other.kind, other.weight_bytes, len(other.rows), other.closed)
            and len(self.children) == len(other.children)
            and all(
                a.name == b.name and (a.is_like(b) or not a.kind)
                for a, b in zip(self.children.values(), other.children.values(), strict=True)
            )
        )

    def groups(self) -> list[list[_Node]]:
        """Its children, those that are alike and follow each other together."""
        groups: list[list[_Node]] = []
        for child in self.children.values():
            if groups and groups[-1][0].is_like(child):
                groups[-1].append(child)
            else:
                groups.append([child])
        return groups


def _tree(explanation: Explanation) -> _Node:
    """The modules of the program as a tree; its root is the model."""
    root = _Node(explanation.model, explanation.model, closed=_why_closed(explanation, ""))
    for row in explanation.rows:
        path = row.module.split(".") if row.module else []
        node = root
        node.rows.append(row)
        for depth, name in enumerate(path, start=1):
            full = ".".join(path[:depth])
            if name not in node.children:
                kind = explanation.kinds.get(full, "")
                node.children[name] = _Node(name, kind, closed=_why_closed(explanation, full))
            node = node.children[name]
            node.rows.append(row)
        if row.function:
            node.children.setdefault("()", _Node("")).rows.append(row)
    return root


def _why_closed(explanation: Explanation, path: str) -> str:
    """A note for a module that has others inside, but is one call."""
    if path in explanation.closed:
        return "one call, see below"
    is_call = any(row.module == path and not row.function for row in explanation.rows)
    inside = any(other.startswith(f"{path}.") for other in explanation.kinds)
    return "one call: it has fused kernels" if is_call and inside else ""


def _tree_rows(explanation: Explanation, depth: int | None = None) -> list[_TableRow]:
    """The cells of the tree's lines, the heading first.

    Args:
        explanation: of the program.
        depth: how many levels of modules to show; as many as fit a screen by default.
    """
    root = _tree(explanation)
    total = _Totals(root, explanation)
    if depth is None:
        depth = 1
        while depth < 12:
            deeper = list(_lines_of(root, depth + 1, "", total))
            if len(deeper) > _LINES or len(deeper) == len(list(_lines_of(root, depth, "", total))):
                break
            depth += 1
    first = _tree_row([root], root.name, total)
    return [_MODULE_HEADING, first, *_lines_of(root, depth, "", total)]


class _Totals:
    """The model's totals, of which shares are computed, and the call before every call."""

    def __init__(self, root: _Node, explanation: Explanation) -> None:
        self.weight_bytes = root.weight_bytes or 1
        self.seconds = root.seconds
        before = [None, *explanation.rows[:-1]]
        self.before = {row.number: b for row, b in zip(explanation.rows, before, strict=True)}


def _lines_of(node: _Node, depth: int, indent: str, total: _Totals) -> Iterator[_TableRow]:
    groups = node.groups()
    if depth == 0 or (len(groups) == 1 and not groups[0][0].kind):
        return
    for place, group in enumerate(groups):
        last = place == len(groups) - 1
        yield _tree_row(group, indent + ("└ " if last else "├ ") + _name(group), total)
        yield from _lines_of(group[0], depth - 1, indent + ("  " if last else "│ "), total)


def _name(group: Sequence[_Node]) -> str:
    if not group[0].kind and group[0].name == "":
        counts = Counter(row.function for row in group[0].rows)
        names = [f"{name}{f' ×{n}' if n > 1 else ''}" for name, n in counts.most_common(_NAMED)]
        return ", ".join(names) + (", …" if len(counts) > _NAMED else "")
    return group[0].name if len(group) == 1 else f"{group[0].name} … {group[-1].name}"


def _tree_row(group: Sequence[_Node], name: str, total: _Totals) -> _TableRow:
    first = group[0]
    weights = sum(node.weight_bytes for node in group)
    seconds = sum(node.seconds for node in group)
    share = seconds / total.seconds if total.seconds else 0.0
    before = total.before[first.rows[0].number]
    notes = []
    if first.closed:
        notes.append(first.closed)
    elif before is not None and before.forbidden:
        notes.append("no cut before it")
    return (
        name,
        first.kind + (f" ×{len(group)}" if len(group) > 1 else ""),
        str(sum(len(node.rows) for node in group)),
        show_bytes(weights) if weights else "",
        f"{weights / total.weight_bytes:.0%}" if weights else "",
        f"{share:.0%}" if total.seconds else "",
        _bar(share),
        show_bytes(before.cut_bytes or 0) if before is not None and first.kind else "",
        "; ".join(notes),
    )


def _bar(share: float) -> str:
    eighths = round(share * _BAR * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _reasons(closed: dict[str, str]) -> list[str]:
    """Why modules are closed, those with the same reason together, and what would open them."""
    found = []
    by_reason = sorted(closed.items(), key=lambda item: item[1])
    for why, group in groupby(by_reason, key=lambda item: item[1]):
        names = [path or "the model itself" for path, _ in group]
        shown = ", ".join(names[:_NAMED]) + (
            f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        )
        found.append(f"closed: {shown}: {why}{_advice(why)}")
    return found


_ADVICE = (
    (
        "reads a tensor's value",
        "compute with it (torch.where), do it in a plain function that takes and gives tensors, or "
        "decide outside of the model",
    ),
    ("asks for the size of a tensor", "a mask in place of x[condition] keeps sizes known"),
    ("an autograd.Function of its own", "called in a small module, only that one stays closed"),
    ("assigns to self.", "return it, or keep what changes in a small module or a buffer"),
    ("no recorded call made", "keep that tensor as a buffer or an attribute of a module"),
    ("depends on the size of the inputs", "or let the module that decides be a small one"),
    ("hooks", "hooks on a smaller module leave the others open"),
    ("compiled by torch.", "compile the stages instead, or smaller modules"),
)


def _advice(why: str) -> str:
    return next((f". To open it: {advice}" for part, advice in _ADVICE if part in why), "")
