"""What changes in a script, and what its user must know of it, as it is collected."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.porting.source import Edits, Script

_WIDTH = 100
Kind = Literal["changed", "left", "check"]


@dataclass(frozen=True)
class Note:
    """What is to be known of a line of the script.

    Attributes:
        line: of the script as it was, from 1.
        kind: `"changed"`; `"left"` for what is as it was, where that matters; `"check"` for what
            the user must judge.
        text: in words.
    """

    line: int
    kind: Kind
    text: str


class Changes:
    """The edits of a script and the notes about them.

    Args:
        source: the script.

    Attributes:
        edits: of its text.
        notes: in the order in which they were made.
    """

    def __init__(self, source: Script) -> None:
        self.source = source
        self.edits = Edits()
        self.notes: list[Note] = []
        self._gone: set[ast.AST] = set()
        self._removed: set[ast.stmt] = set()

    def note(self, node: ast.expr | ast.stmt, kind: Kind, text: str) -> None:
        """Say something of the line where a node begins."""
        self.notes.append(Note(node.lineno, kind, text))

    def replace(self, node: ast.expr | ast.stmt, text: str) -> None:
        """Put `text` where a node is."""
        self.edits.replace(*self.source.span(node), text)

    def insert(self, node: ast.stmt, lines: Sequence[str]) -> None:
        """Put lines before a statement, indented as it is."""
        new = f"{self.source.newline}{self.source.indent(node)}"
        self.edits.insert(self.source.span(node)[0], "".join(f"{line}{new}" for line in lines))

    def rewrite(self, statement: ast.stmt, text: str) -> None:
        """Put `text` where a statement is, in which nothing else is then changed."""
        self._gone.add(statement)
        self.replace(statement, text)

    def remove(self, statement: ast.stmt) -> None:
        """Take a statement out, with its lines."""
        self._gone.add(statement)
        self._removed.add(statement)
        block = self.source.block(statement)
        if self._removed.issuperset(block) or not self.source.is_alone(statement):
            self.replace(statement, "pass")
        else:
            self.edits.replace(*self.source.lines_of(statement), "")

    def is_gone(self, node: ast.AST) -> bool:
        """Whether a node is in a statement that was taken out or rewritten."""
        return not self._gone.isdisjoint(self.source.parents(node))

    def call(self, function: str, arguments: list[str], indent: str) -> str:
        """A call on one line, or with one argument a line if that is too long."""
        line = f"{function}({', '.join(arguments)})"
        if len(indent) + len(line) <= _WIDTH:
            return line
        new = self.source.newline
        inside = "".join(f"{new}{indent}    {each}," for each in arguments)
        return f"{function}({inside}{new}{indent})"
