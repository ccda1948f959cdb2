"""A script's text and its syntax tree, and edits of the text that leave all else as it is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence

from penstock.errors import InputError

Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
"""The module or a function, in which names are looked up."""

_SCOPES = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef)
_BLOCKS = ("body", "orelse", "finalbody")
_LINE = re.compile(r"\r\n|\r|\n")  # as Python counts lines; str.splitlines knows others, too
LOOPS = (ast.For, ast.AsyncFor, ast.While)


class Script:
    """The text of a script, with its syntax tree.

    Args:
        text: of the script.
        name: of its file, for messages.

    Raises:
        InputError: it is not Python.
    """

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name = text, name
        try:
            self.tree: ast.Module = _Unannotated().visit(ast.parse(text, name))
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None)
            where = name if line is None else f"{name}:{line}"
            raise InputError(
                f"{where} is not a script that Python {_version()} can read: "
                f"{getattr(error, 'msg', error)}"
            ) from error
        self.newline = "\r\n" if "\r\n" in text else "\n"
        self._starts = [0, *(match.end() for match in _LINE.finditer(text))]
        self._parents = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }

    # -- places in the text -------------------------------------------------------------------

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Where the text of a node begins and ends, in characters."""
        end = (node.end_lineno or node.lineno, node.end_col_offset or node.col_offset)
        return self._offset(node.lineno, node.col_offset), self._offset(*end)

    def _offset(self, line: int, column: int) -> int:
        start = self._starts[line - 1]
        end = self._starts[line] if line < len(self._starts) else len(self.text)
        content = self.text[start:end]
        if content.isascii():
            return start + column
        return start + len(content.encode()[:column].decode())  # columns count bytes

    def of(self, node: ast.expr | ast.stmt) -> str:
        """The text of a node."""
        start, end = self.span(node)
        return self.text[start:end]

    def keyword(self, node: ast.keyword) -> str:
        """The text of a keyword argument."""
        value = self.of(node.value)
        return f"**{value}" if node.arg is None else f"{node.arg}={value}"

    def replaced(
        self, node: ast.expr | ast.stmt, names: Mapping[str, str], nodes: Mapping[ast.AST, str]
    ) -> str:
        """The text of a node with other text for some names and for some nodes in it."""
        start, _ = self.span(node)
        edits = Edits()
        waiting: list[ast.AST] = [node]
        while waiting:
            each = waiting.pop()
            new = nodes.get(each)
            if new is None and isinstance(each, ast.Name):
                new = names.get(each.id)
            if new is not None and isinstance(each, (ast.expr, ast.stmt)):
                first, last = self.span(each)
                edits.replace(first - start, last - start, new)
            else:
                waiting += ast.iter_child_nodes(each)
        return edits.apply(self.of(node))

    def with_nodes(self, nodes: Sequence[ast.expr], new: str) -> str:
        """The whole text with other text for some nodes, whose places are those of this text."""
        edits = Edits()
        for each in nodes:
            edits.replace(*self.span(each), new)
        return edits.apply(self.text)

    def indent(self, statement: ast.stmt) -> str:
        """The text before a statement on its first line: white space, unless it shares the line."""
        start = self._starts[statement.lineno - 1]
        return self.text[start : self.span(statement)[0]]

    def is_alone(self, statement: ast.stmt) -> bool:
        """Whether no other statement begins or ends on the lines of this one."""
        _, end = self.span(statement)
        rest = self.text[end : self._line_end(end)].strip()
        return not self.indent(statement).strip() and (not rest or rest.startswith("#"))

    def lines_of(self, statement: ast.stmt) -> tuple[int, int]:
        """Where the lines of a statement begin and end, with the last line feed."""
        return self._starts[statement.lineno - 1], self._line_end(self.span(statement)[1])

    def _line_end(self, offset: int) -> int:
        found = _LINE.search(self.text, offset)
        return len(self.text) if found is None else found.end()

    # -- places in the tree -------------------------------------------------------------------

    def parents(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes that contain a node, from the innermost to the module."""
        while node in self._parents:
            node = self._parents[node]
            yield node

    def parent(self, node: ast.AST) -> ast.AST:
        """What a node is directly in."""
        return self._parents[node]

    def scope(self, node: ast.AST) -> Scope:
        """The function, or the module, that a node is in."""
        return next(each for each in self.parents(node) if isinstance(each, _SCOPES))

    def is_in_class(self, node: ast.AST) -> bool:
        """Whether a node is in a class, in one of its methods for instance."""
        return any(isinstance(each, ast.ClassDef) for each in self.parents(node))

    def statement(self, node: ast.AST) -> ast.stmt:
        """The innermost statement that a node is, or is in."""
        if isinstance(node, ast.stmt):
            return node
        return next(each for each in self.parents(node) if isinstance(each, ast.stmt))

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """The list of statements that a statement is in."""
        above = self._parents[statement]
        for name in _BLOCKS:
            block = getattr(above, name, [])
            if isinstance(block, list) and statement in block:
                return block
        for handler in getattr(above, "handlers", []) or getattr(above, "cases", []):
            if statement in handler.body:
                return list(handler.body)
        return [statement]

    def among(self, block: list[ast.stmt], node: ast.AST) -> int | None:
        """Which statement of a block a node is, or is in; `None` if it is elsewhere."""
        chain = {id(node), *map(id, self.parents(node))}
        return next((k for k, each in enumerate(block) if id(each) in chain), None)

    def loops(self, node: ast.AST) -> list[ast.For | ast.While]:
        """The loops of its function that a node is in, from the innermost."""
        found: list[ast.For | ast.While] = []
        for each in self.parents(node):
            if isinstance(each, _SCOPES):
                break
            if isinstance(each, (ast.For, ast.While)):
                found.append(each)
        return found

    def calls(self) -> list[ast.Call]:
        """All calls in the script, of functions and classes alike."""
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]

    def walk(self, scope: Scope) -> Iterator[ast.AST]:
        """The nodes of a scope, without those of functions and classes in it."""
        waiting: list[ast.AST] = list(scope.body)
        while waiting:
            node = waiting.pop(0)
            yield node
            if not isinstance(node, (*_SCOPES, ast.ClassDef)):
                waiting += ast.iter_child_nodes(node)


class _Unannotated(ast.NodeTransformer):
    """Takes `x: int = 1` for `x = 1`, in the same place."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        if node.value is None:
            return node
        return ast.copy_location(ast.Assign([node.target], node.value), node)


class Edits:
    """Changes of a text, by positions in the text before any of them."""

    def __init__(self) -> None:
        self._edits: list[tuple[int, int, str]] = []

    def replace(self, start: int, end: int, text: str) -> None:
        """Put `text` where now `start:end` is."""
        self._edits.append((start, end, text))

    def insert(self, at: int, text: str) -> None:
        """Put `text` before what is at a place now."""
        self.replace(at, at, text)

    def apply(self, text: str) -> str:
        """The text with all changes; one that lies in another is left out."""
        parts, at = [], 0
        for start, end, new in sorted(self._edits, key=lambda edit: (edit[0], edit[1])):
            if start >= at:
                parts += [text[at:start], new]
                at = end
        return "".join([*parts, text[at:]])


def dotted(node: ast.AST) -> str:
    """`"torch.nn.functional"` for such a name; an empty text for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])


def receiver(node: ast.AST | None, *methods: str) -> ast.expr | None:
    """`model` in `model.eval()`, if a node calls one of these methods; `None` otherwise."""
    function = node.func if isinstance(node, ast.Call) else None
    is_method = isinstance(function, ast.Attribute) and function.attr in methods
    return function.value if is_method and isinstance(function, ast.Attribute) else None


def stored(*nodes: ast.AST) -> set[str]:
    """The names that are assigned in nodes, by whatever means, without those in functions."""
    found: set[str] = set()
    waiting = list(nodes)
    while waiting:
        each = waiting.pop()
        if isinstance(each, ast.Name) and isinstance(each.ctx, (ast.Store, ast.Del)):
            found.add(each.id)
        elif isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(each.name)
            continue
        elif isinstance(each, (ast.Import, ast.ImportFrom)):
            found |= {(a.asname or a.name).split(".")[0] for a in each.names}
        elif isinstance(each, ast.ExceptHandler) and each.name:
            found.add(each.name)
        elif isinstance(each, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            continue
        waiting += ast.iter_child_nodes(each)
    return found


def loaded(*nodes: ast.AST) -> set[str]:
    """The names that are read in nodes, without those that these bind in comprehensions."""
    return set().union(*map(_loaded, nodes))


def _loaded(node: ast.AST) -> set[str]:
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        targets = [each for generator in node.generators for each in ast.walk(generator.target)]
        own = {each.id for each in targets if isinstance(each, ast.Name)}
        return loaded(*ast.iter_child_nodes(node)) - own
    if isinstance(node, ast.Lambda):
        own = {a.arg for a in (*node.args.args, *node.args.kwonlyargs)}
        return loaded(node.body) - own
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Load) else set()
    return loaded(*ast.iter_child_nodes(node))


def parameters(scope: Scope) -> list[str]:
    """A function's parameters by name, in order, but not `*args`, `**kwargs`; none of a module."""
    if isinstance(scope, ast.Module):
        return []
    given = scope.args
    plain = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return [each.arg for each in plain]


def _version() -> str:
    import platform

    return platform.python_version()
