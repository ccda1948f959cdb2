"""A program as the tree of its modules: what each weighs, takes, and what enters it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from penstock.units import show_bytes

if TYPE_CHECKING:
    from penstock.capture.explain import CallRow, Explanation

_LINES = 48  # as many as fit a screen; deeper levels are left out
_NAMED = 3  # functions that a line names
_BAR = 12
_EIGHTHS = " ▏▎▍▌▋▊▉"

Cells = tuple[str, ...]
HEADING = ("module", "class", "calls", "weights", "share", "time", "", "enters", "")
LEFT = (0, 1, 6, 8)  # the columns that are text


@dataclass
class Node:
    """A module, or the functions that a module's own forward calls.

    Attributes:
        name: within the module that it is in.
        kind: its class; empty for functions.
        rows: the calls that it makes, or is.
        children: what is in it, in the order of the calls.
        closed: what to say of one that the program does not look into.
    """

    name: str
    kind: str = ""
    rows: list[CallRow] = field(default_factory=list)
    children: dict[str, Node] = field(default_factory=dict)
    closed: str = ""

    @property
    def weight_bytes(self) -> int:
        """Of the parameters that it is the first to use."""
        return sum(row.weight_bytes for row in self.rows)

    @property
    def seconds(self) -> float:
        """Forward and backward of its calls; 0 where nothing was measured."""
        return sum(row.seconds or 0.0 for row in self.rows)

    def is_like(self, other: Node) -> bool:
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

    def groups(self) -> list[list[Node]]:
        """Its children, those that are alike and follow each other together."""
        groups: list[list[Node]] = []
        for child in self.children.values():
            if groups and groups[-1][0].is_like(child):
                groups[-1].append(child)
            else:
                groups.append([child])
        return groups


def tree(explanation: Explanation) -> Node:
    """The modules of the program as a tree; its root is the model."""
    root = Node(explanation.model, explanation.model, closed=_why_closed(explanation, ""))
    for row in explanation.rows:
        path = row.module.split(".") if row.module else []
        node = root
        node.rows.append(row)
        for depth, name in enumerate(path, start=1):
            full = ".".join(path[:depth])
            if name not in node.children:
                kind = explanation.kinds.get(full, "")
                node.children[name] = Node(name, kind, closed=_why_closed(explanation, full))
            node = node.children[name]
            node.rows.append(row)
        if row.function:
            node.children.setdefault("()", Node("")).rows.append(row)
    return root


def _why_closed(explanation: Explanation, path: str) -> str:
    """A note for a module that has others inside, but is one call."""
    if path in explanation.closed:
        return "one call, see below"
    is_call = any(row.module == path and not row.function for row in explanation.rows)
    inside = any(other.startswith(f"{path}.") for other in explanation.kinds)
    return "one call: it has fused kernels" if is_call and inside else ""


def lines(explanation: Explanation, depth: int | None = None) -> list[Cells]:
    """The cells of the tree's lines, the heading first.

    Args:
        explanation: of the program.
        depth: how many levels of modules to show; as many as fit a screen by default.
    """
    root = tree(explanation)
    total = Totals(root, explanation)
    if depth is None:
        depth = 1
        while depth < 12:
            deeper = list(_lines(root, depth + 1, "", total))
            if len(deeper) > _LINES or len(deeper) == len(list(_lines(root, depth, "", total))):
                break
            depth += 1
    first = _cells([root], root.name, total)
    return [HEADING, first, *_lines(root, depth, "", total)]


class Totals:
    """What shares are shares of, and what enters every call."""

    def __init__(self, root: Node, explanation: Explanation) -> None:
        self.weight_bytes = root.weight_bytes or 1
        self.seconds = root.seconds
        before = [None, *explanation.rows[:-1]]
        self.before = {row.number: b for row, b in zip(explanation.rows, before, strict=True)}


def _lines(node: Node, depth: int, indent: str, total: Totals) -> Iterator[Cells]:
    groups = node.groups()
    if depth == 0 or (len(groups) == 1 and not groups[0][0].kind):
        return
    for place, group in enumerate(groups):
        last = place == len(groups) - 1
        yield _cells(group, indent + ("└ " if last else "├ ") + _name(group), total)
        yield from _lines(group[0], depth - 1, indent + ("  " if last else "│ "), total)


def _name(group: Sequence[Node]) -> str:
    if not group[0].kind and group[0].name == "":
        counts = Counter(row.function for row in group[0].rows)
        names = [f"{name}{f' ×{n}' if n > 1 else ''}" for name, n in counts.most_common(_NAMED)]
        return ", ".join(names) + (", …" if len(counts) > _NAMED else "")
    return group[0].name if len(group) == 1 else f"{group[0].name} … {group[-1].name}"


def _cells(group: Sequence[Node], name: str, total: Totals) -> Cells:
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


def reasons(closed: dict[str, str]) -> list[str]:
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
    ("reads a tensor's value", "compute with it (torch.where), or decide outside of the model"),
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
