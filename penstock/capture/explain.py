"""A program as a table, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from penstock.capture.calls import Attribute, Call, TensorInfo
from penstock.capture.sizes import num_rows

if TYPE_CHECKING:
    from penstock.capture.program import Program


@dataclass(frozen=True)
class CallRow:
    """One call of the program.

    Attributes:
        number: its place, from 0.
        label: the module's path, or the function and the module that called it.
        weight_bytes: of the parameters that it is the first to use.
        outputs: dtype and sizes of the tensors it returns; `B` is the number of rows.
        random: whether it draws random numbers.
        in_place: whether it changes a value in place.
        cut_bytes: what would cross a cut before it, for the example batch.
        forbidden: why there can be no cut before it, if so.
    """

    number: int
    label: str
    weight_bytes: int
    outputs: tuple[str, ...]
    random: bool
    in_place: bool
    cut_bytes: int
    forbidden: str | None


@dataclass(frozen=True)
class Explanation:
    """What `program.explain()` returns; `str` of it is a table.

    Attributes:
        model: the class of the model.
        batch_size: the rows of the example.
        parameters: how many numbers the model learns.
        same_in_eval: whether evaluation runs the same program as training.
        rows: the calls, in order.
        closed: why the program does not look into these modules.
    """

    model: str
    batch_size: int
    parameters: int
    same_in_eval: bool
    rows: tuple[CallRow, ...]
    closed: dict[str, str]

    @property
    def summary(self) -> str:
        """One sentence."""
        modes = "the same" if self.same_in_eval else "another one"
        cuts = sum(row.forbidden is None for row in self.rows[1:])
        return (
            f"{self.model}: {len(self.rows)} calls, {self.parameters / 1e6:.2f}M parameters, "
            f"{cuts} possible cuts; evaluation runs {modes}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return asdict(self)

    def cells(self) -> list[tuple[str, ...]]:
        """The table's cells, the heading first."""
        heading = ("call", "what", "weights", "cut before", "marks", "returns")
        return [heading, *(_cells(row) for row in self.rows)]

    def __str__(self) -> str:
        cells = self.cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in cells]
        return "\n".join([*(line.rstrip() for line in lines), *self.notes()])

    def notes(self) -> list[str]:
        """The summary, and the modules that stayed closed."""
        reasons = [f"closed: {path or 'the model'}: {why}" for path, why in self.closed.items()]
        return [self.summary, *reasons]


def explain(program: Program) -> Explanation:
    """What the program does, call by call.

    Args:
        program: a captured program.
    """
    rows = num_rows(program.example, program.batch_dims)
    weights = weight_bytes(program)
    calls = enumerate(program.train.calls)
    return Explanation(
        model=type(program.model).__name__,
        batch_size=rows,
        parameters=sum(p.numel() for p in program.model.parameters()),
        same_in_eval=program.eval is program.train,
        rows=tuple(_row(program, n, call, weights[n], rows) for n, call in calls),
        closed=program.closed,
    )


def weight_bytes(program: Program) -> tuple[int, ...]:
    """For every call, the bytes of the parameters that it is the first to use."""
    parameters = dict(program.model.named_parameters(remove_duplicate=False))
    seen: set[int] = set()
    sizes = []
    for call in program.train.calls:
        names = [*call.hidden, *(v.name for v in call.reads() if isinstance(v, Attribute))]
        used = {id(parameters[n]): parameters[n] for n in names if n in parameters}
        sizes.append(sum(p.nbytes for k, p in used.items() if k not in seen))
        seen.update(used)
    return tuple(sizes)


def _row(program: Program, number: int, call: Call, weight: int, rows: int) -> CallRow:
    return CallRow(
        number=number,
        label=call.label,
        weight_bytes=weight,
        outputs=tuple(str(o) for o in call.outputs if isinstance(o, TensorInfo)),
        random=call.random,
        in_place=bool(call.mutates),
        cut_bytes=program.cuts.num_bytes(number, rows),
        forbidden=program.cuts.forbidden(number),
    )


def _cells(row: CallRow) -> tuple[str, ...]:
    marks: Sequence[str] = [
        *(["random"] if row.random else []),
        *(["in place"] if row.in_place else []),
        *([f"no cut: {row.forbidden}"] if row.forbidden else []),
    ]
    return (
        str(row.number),
        row.label,
        _bytes(row.weight_bytes),
        _bytes(row.cut_bytes),
        ", ".join(marks),
        ", ".join(row.outputs),
    )


def _bytes(count: int) -> str:
    if count == 0:
        return ""
    return f"{count / 1e6:.2f} MB" if count >= 1e4 else f"{count} B"
