"""A program as a table, for people and for programs."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from penstock.capture.calls import ROWS, Attribute, Call, TensorInfo

if TYPE_CHECKING:
    from torch import nn

    from penstock.capture.program import Program

_NAMED = 3  # calls that a sentence names before it says "and 5 more"


@dataclass(frozen=True)
class CallRow:
    """One call of the program.

    Attributes:
        number: its place, from 0.
        label: the module's path, or the function and the module that called it.
        parameters: how many numbers are in the parameters that it is the first to use.
        weight_bytes: the bytes of these.
        outputs: dtype and sizes of the tensors it returns; `B` is the number of rows.
        random: whether it draws random numbers.
        in_place: whether it changes a value in place.
        cut_bytes: what would cross a cut after it, for the example batch; `None` after the last.
        forbidden: why there can be no cut after it, if so.
    """

    number: int
    label: str
    parameters: int
    weight_bytes: int
    outputs: tuple[str, ...]
    random: bool
    in_place: bool
    cut_bytes: int | None
    forbidden: str | None


@dataclass(frozen=True)
class Explanation:
    """What `program.explain()` returns; `str` of it is a table.

    Attributes:
        model: the class of the model.
        batch_size: the rows of the example.
        parameters: how many numbers the model learns.
        rows: the calls in training, in order.
        differences: what evaluation does otherwise, in words; empty if it runs the same program.
        closed: why the program does not look into these modules, by qualified name.
        capture_seconds: how long capturing took, where somebody measured it.
    """

    model: str
    batch_size: int
    parameters: int
    rows: tuple[CallRow, ...]
    differences: tuple[str, ...]
    closed: dict[str, str]
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
        """One sentence."""
        took = "" if self.capture_seconds is None else f", captured in {self.capture_seconds:.1f} s"
        modes = "runs the same program" if self.same_in_eval else "differs as said above"
        return (
            f"{self.model}: {len(self.rows)} calls, {self.parameters:,} parameters, "
            f"{self.possible_cuts} possible cuts{took}; evaluation {modes}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        derived = {"possible_cuts": self.possible_cuts, "same_in_eval": self.same_in_eval}
        return {**asdict(self), **derived}

    def cells(self) -> list[tuple[str, ...]]:
        """The table's cells, the heading first; all but `what`, `marks` and `returns` are numbers.

        `cut after` is what would cross, with the example's number of rows.
        """
        heading = ("call", "what", "parameters", "weights", "cut after", "marks", "returns")
        return [heading, *(_cells(row) for row in self.rows)]

    def notes(self) -> list[str]:
        """The modules that stayed closed, what evaluation does otherwise, and the summary."""
        reasons = [f"closed: {path or 'the model'}: {why}" for path, why in self.closed.items()]
        modes = [f"evaluation: {difference}" for difference in self.differences]
        return [*reasons, *modes, self.summary]

    def __str__(self) -> str:
        cells = self.cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(_aligned, row, cells[0], widths)).rstrip() for row in cells]
        return "\n".join([*lines, *self.notes()])


TEXT_COLUMNS = ("what", "marks", "returns")
"""The columns of `Explanation.cells()` that are not numbers."""


def explain(program: Program) -> Explanation:
    """What the program does, call by call.

    Args:
        program: a captured program.
    """
    first_used = _first_used(program)
    return Explanation(
        model=type(program.model).__name__,
        batch_size=program.example_sizes[ROWS],
        parameters=sum(p.numel() for p in program.model.parameters()),
        rows=tuple(_row(program, n, used) for n, used in enumerate(first_used)),
        differences=_differences(program),
        closed=dict(program.closed),
    )


def weight_bytes(program: Program) -> tuple[int, ...]:
    """For every call, the bytes of the parameters that it is the first to use."""
    return tuple(sum(p.nbytes for p in used) for used in _first_used(program))


def _first_used(program: Program) -> list[list[nn.Parameter]]:
    """For every call, the parameters that it is the first to use."""
    parameters = dict(program.model.named_parameters(remove_duplicate=False))
    seen: set[int] = set()
    result = []
    for call in program.train.calls:
        names = [*call.hidden, *(v.name for v in call.reads() if isinstance(v, Attribute))]
        used = {id(parameters[n]): parameters[n] for n in names if n in parameters}
        result.append([p for k, p in used.items() if k not in seen])
        seen.update(used)
    return result


def _row(program: Program, number: int, used: Sequence[nn.Parameter]) -> CallRow:
    call, after = program.train.calls[number], number + 1
    is_last = after == len(program)
    return CallRow(
        number=number,
        label=call.label,
        parameters=sum(p.numel() for p in used),
        weight_bytes=sum(p.nbytes for p in used),
        outputs=tuple(str(o) for o in call.outputs if isinstance(o, TensorInfo)),
        random=call.random,
        in_place=bool(call.mutates),
        cut_bytes=None if is_last else program.cuts.num_bytes(after, program.example_sizes),
        forbidden=None if is_last else program.cuts.forbidden(after),
    )


def _differences(program: Program) -> tuple[str, ...]:
    """What evaluation does otherwise than training, in words."""
    if program.eval is program.train:
        return ()
    ours, theirs = program.train.calls, program.eval.calls
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
    updated = set(program.train.changed) - set(program.eval.changed)
    if updated:
        sentences.append(f"leaves alone {len(updated)} buffers that training changes")
    return tuple(sentences or ["gives some calls other arguments"])


def _listed(calls: Sequence[Call]) -> str:
    names = list(dict.fromkeys(call.label for call in calls))
    shown = ", ".join(names[:_NAMED])
    rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{len(calls)} call{'s' if len(calls) > 1 else ''}: {shown}{rest}"


def _cells(row: CallRow) -> tuple[str, ...]:
    marks = [
        *(["random"] if row.random else []),
        *(["in place"] if row.in_place else []),
        *([f"no cut: {row.forbidden}"] if row.forbidden else []),
    ]
    return (
        str(row.number),
        row.label,
        f"{row.parameters:,}" if row.parameters else "",
        _bytes(row.weight_bytes) if row.weight_bytes else "",
        "" if row.cut_bytes is None else _bytes(row.cut_bytes),
        ", ".join(marks),
        ", ".join(row.outputs),
    )


def _aligned(cell: str, heading: str, width: int) -> str:
    return cell.ljust(width) if heading in TEXT_COLUMNS else cell.rjust(width)


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
