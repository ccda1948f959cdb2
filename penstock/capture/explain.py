"""What a program is made of, for people and for programs."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from penstock.capture.calls import ROWS, Attribute, Call, TensorInfo, function_name
from penstock.capture.outline import LEFT, lines, reasons
from penstock.display.tables import aligned
from penstock.units import show_bytes

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
        module: the module that it is, or whose forward makes it.
        function: the function's name; empty for a module.
        parameters: how many numbers are in the parameters that it is the first to use.
        weight_bytes: the bytes of these.
        outputs: dtype and sizes of the tensors it returns; `B` is the number of rows.
        random: whether it draws random numbers.
        in_place: whether it changes a value in place.
        cut_bytes: what would cross a cut after it, for the example batch; `None` after the last.
        forbidden: why there can be no cut after it, if so.
        seconds: forward and backward of a micro-batch; `None` where nothing was measured.
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
        parameters: how many numbers the model learns.
        rows: the calls in training, in order.
        differences: what evaluation does otherwise, in words; empty if it runs the same program.
        closed: why the program does not look into these modules, by qualified name.
        kinds: the class of every module, by qualified name.
        capture_seconds: how long capturing took, where somebody measured it.
    """

    model: str
    batch_size: int
    parameters: int
    rows: tuple[CallRow, ...]
    differences: tuple[str, ...]
    closed: dict[str, str]
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
        Modules that are alike share a line, and what is in the first of them stands below it.

        Args:
            depth: how many levels to show; as many as fit a screen by default.
            width: how long lines of the tree may be.
        """
        return "\n".join([*aligned(lines(self, depth), LEFT, width), *self.notes()])

    def table(self, width: int | None = None) -> str:
        """Every call, and what crosses a cut after it, in lines no longer than `width`."""
        rows = [_HEADING, *map(_cells, self.rows)]
        return "\n".join([*aligned(rows, _LEFT, width), *self.notes()])

    def notes(self) -> list[str]:
        """The modules that stayed closed, what evaluation does otherwise, and the summary."""
        composite = {path: why for path, why in self.closed.items() if path in self.kinds}
        modes = [f"evaluation: {difference}" for difference in self.differences]
        return ["", *reasons(composite), *modes, self.summary]

    def __str__(self) -> str:
        return self.tree()


_HEADING = ("call", "what", "parameters", "weights", "time", "cut after", "marks", "returns")
_LEFT = (1, 6, 7)


def explain(program: Program, seconds: Sequence[float] | None = None) -> Explanation:
    """What the program does, call by call.

    Args:
        program: a captured program.
        seconds: forward and backward of every call, if they were measured.
    """
    first_used = _first_used(program)
    return Explanation(
        model=type(program.model).__name__,
        batch_size=program.example_sizes[ROWS],
        parameters=sum(p.numel() for p in program.model.parameters()),
        rows=tuple(
            _row(program, n, used, seconds[n] if seconds is not None else None)
            for n, used in enumerate(first_used)
        ),
        differences=_differences(program),
        closed=dict(program.closed),
        kinds={path: type(module).__name__ for path, module in program.model.named_modules()},
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


def _row(
    program: Program, number: int, used: Sequence[nn.Parameter], seconds: float | None
) -> CallRow:
    call, after = program.train.calls[number], number + 1
    is_last = after == len(program)
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
        cut_bytes=None if is_last else program.cuts.num_bytes(after, program.example_sizes),
        forbidden=None if is_last else program.cuts.forbidden(after),
        seconds=seconds,
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
        show_bytes(row.weight_bytes) if row.weight_bytes else "",
        "" if row.seconds is None else f"{row.seconds * 1000:.2f} ms",
        "" if row.cut_bytes is None else show_bytes(row.cut_bytes),
        ", ".join(marks),
        ", ".join(row.outputs),
    )
