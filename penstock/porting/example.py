"""The batch that a pipeline is built with: the statements of the training loop that make it."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.porting.source import Scope, dotted, loaded, parameters, stored
from penstock.porting.variables import Variable, Variables

_BARS = ("tqdm", "trange", "track", "ProgressBar", "notebook_tqdm")  # show progress, and hand on


class Unknown(Exception):  # noqa: N818
    """Why there is no example before the loop."""


@dataclass(frozen=True)
class Example:
    """How to have a batch before the training begins.

    Attributes:
        lines: statements, in order; none if all names are there already.
        args: the arguments of a pipeline, `(x,), kwargs={"mask": mask}`.
        needs: the names that must be there before.
        loader: what the first batch is taken of; empty if that is nothing.
    """

    lines: tuple[str, ...]
    args: str
    needs: frozenset[str]
    loader: str = ""


class Examples:
    """Finds the example of a step.

    Args:
        variables: of the script.
        owner: where the pipeline is built.
    """

    def __init__(self, variables: Variables, owner: Scope) -> None:
        self.variables, self.source, self.owner = variables, variables.source, owner

    def in_loop(self, call: ast.Call) -> str:
        """The arguments of a pipeline that is built right before a call of the model."""
        return self._arguments(call, {}, None)

    def before(self, call: ast.Call, used: Mapping[str, object]) -> Example:
        """The example before the training.

        Args:
            call: of the model, in a step.
            used: the names that mean something where the pipeline is built.

        Raises:
            Unknown: there is none.
        """
        scope = self.source.scope(call)
        needed = set().union(*(loaded(each) for each in (*call.args, *call.keywords)))
        lines: list[ast.stmt | tuple[ast.expr, ast.expr]] = []
        loader = ""
        at = self.source.statement(call)
        while not isinstance(at, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef)):
            above = self.source.parent(at)
            in_loop = any(True for _ in self.source.loops(at))
            if isinstance(at, ast.stmt) and (in_loop or scope is not self.owner):
                needed, own = self._made_before(at, needed)
                lines = own + lines
            if isinstance(above, (ast.For, ast.AsyncFor)) and stored(above.target) & needed:
                taken, iterable = _without_counting(above.target, above.iter, needed)
                self._check_can_be_read_twice(iterable)
                loader = loader or self.source.of(iterable)
                needed = (needed - stored(above.target)) | loaded(iterable)
                lines = [(taken, iterable), *lines]
            at = above  # type: ignore[assignment]
        names = self._substitution(scope, 0) if scope is not self.owner else {}
        fresh = {n for line in lines for n in _stored_by(line)}
        if scope is not self.owner:
            local = {
                name
                for name in needed - fresh - names.keys()
                if self.variables.lookup(scope, name).scope is scope
            }
            if local:
                raise Unknown(f"{', '.join(sorted(local))} is known in {scope_name(scope)} only")
        renamed = {name: f"example_{name}" for name in fresh if name in used}
        written = {**names, **renamed}
        made = [self._line(line, written) for line in lines]
        extra: list[str] = []
        args = self._arguments(call, written, extra)
        needs = {
            each
            for name in needed - fresh
            for each in (loaded(ast.parse(names[name], mode="eval")) if name in names else {name})
        }
        return Example((*made, *extra), args, frozenset(needs), loader)

    def _made_before(
        self, at: ast.stmt, needed: set[str]
    ) -> tuple[set[str], list[ast.stmt | tuple[ast.expr, ast.expr]]]:
        """The statements before one in its block that make the names, and what they need."""
        block = self.source.block(at)
        found: list[ast.stmt | tuple[ast.expr, ast.expr]] = []
        for statement in reversed(block[: block.index(at)]):
            if not stored(statement) & needed or isinstance(statement, (ast.FunctionDef)):
                continue
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                continue
            if not _only_assigns(statement):
                raise Unknown(f"line {statement.lineno} makes the batch in its own way")
            needed = (needed - stored(statement)) | loaded(statement)
            found.insert(0, statement)
        return needed, found

    def _line(self, line: ast.stmt | tuple[ast.expr, ast.expr], names: Mapping[str, str]) -> str:
        if isinstance(line, tuple):
            target, iterable = (self.source.replaced(each, names, {}) for each in line)
            if target.startswith("(") and target.endswith(")"):
                target = target[1:-1]
            return f"{target} = next(iter({iterable}))"
        text = self.source.replaced(line, names, {})
        indent = self.source.indent(line)
        return text.replace(f"\n{indent}", "\n")

    def _arguments(self, call: ast.Call, names: Mapping[str, str], extra: list[str] | None) -> str:
        """The arguments of a call as those of a pipeline; `extra` gets lines that they need."""

        def written(node: ast.expr) -> str:
            text = self.source.replaced(node, names, {})
            if extra is None or not _draws(node):
                return text
            name = f"example_{len(extra)}" if extra else "example"
            extra.append(f"{name} = {text}")
            return name

        args = [
            f"*{written(each.value)}" if isinstance(each, ast.Starred) else written(each)
            for each in call.args
        ]
        parts = []
        if args:
            parts.append(f"({args[0]},)" if len(args) == 1 else f"({', '.join(args)})")
        keywords = [(each.arg, written(each.value)) for each in call.keywords]
        if len(keywords) == 1 and keywords[0][0] is None:
            parts.append(f"kwargs={keywords[0][1]}")
        elif keywords:
            inside = [f"**{text}" if arg is None else f'"{arg}": {text}' for arg, text in keywords]
            parts.append(f"kwargs={{{', '.join(inside)}}}")
        return ", ".join(parts)

    def _substitution(self, scope: Scope, depth: int) -> dict[str, str]:
        """What the parameters of a function are where the pipeline is built.

        Raises:
            Unknown: it is not called from there.
        """
        if isinstance(scope, ast.Module) or depth > 8:
            raise Unknown("the training is not called from where the model is made")
        calls = [each for each in self.variables.passed if each.function is scope]
        if not calls:
            if not parameters(scope):
                return {}
            raise Unknown(f"{scope_name(scope)} is not called in this script")
        first = calls[0].call
        caller = self.source.scope(first)
        outer = {} if caller is self.owner else self._substitution(caller, depth + 1)
        found = {}
        for each in calls:
            if each.call is first:
                text = self.source.replaced(each.argument, outer, {})
                is_simple = isinstance(each.argument, (ast.Name, ast.Attribute, ast.Constant))
                found[each.parameter] = text if is_simple else f"({text})"
        given = scope.args
        plain = [*given.posonlyargs, *given.args]
        for arg, default in zip(plain[::-1], given.defaults[::-1], strict=False):
            found.setdefault(arg.arg, self.source.of(default))
        return found

    def _check_can_be_read_twice(self, iterable: ast.expr) -> None:
        """Raise if a first batch that is taken of an iterable would be missing later.

        Raises:
            Unknown: it is an iterator, or has a random generator of its own.
        """
        if isinstance(iterable, ast.GeneratorExp):
            raise Unknown("a generator can be read only once")
        if not isinstance(iterable, ast.Name):
            return
        variable = self.variables.variable(iterable)
        for node in ast.walk(self.source.tree):
            if not (isinstance(node, ast.Assign) and len(node.targets) == 1):
                continue
            target = node.targets[0]
            if not isinstance(target, ast.Name) or not self._may_be(target, variable):
                continue
            self._check_value(iterable.id, node.value)

    def _check_value(self, name: str, value: ast.expr) -> None:
        if isinstance(value, ast.GeneratorExp):
            raise Unknown(f"{name} is a generator, which can be read only once")
        if not isinstance(value, ast.Call):
            return
        called = dotted(value.func)
        if called in ("iter", "map", "filter", "zip", "enumerate") or called.endswith("cycle"):
            raise Unknown(f"{name} is an iterator, which can be read only once")
        function = self.variables.functions.get(called)
        if function is not None and any(
            isinstance(each, (ast.Yield, ast.YieldFrom)) for each in self.source.walk(function)
        ):
            raise Unknown(f"{name} is a generator, which can be read only once")
        if any(each.arg == "generator" for each in value.keywords):
            raise Unknown(f"{name} has a random generator of its own, which would advance")

    def _may_be(self, target: ast.Name, variable: Variable) -> bool:
        return self.variables.are_same(self.variables.variable(target), variable)


def scope_name(scope: Scope) -> str:
    """A scope, in words."""
    return "the script" if isinstance(scope, ast.Module) else f"{scope.name}()"


def _stored_by(line: ast.stmt | tuple[ast.expr, ast.expr]) -> set[str]:
    return stored(line[0] if isinstance(line, tuple) else line)


def _only_assigns(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.If):
        return all(map(_only_assigns, (*statement.body, *statement.orelse)))
    return isinstance(statement, (ast.Assign, ast.AnnAssign))


def _without_counting(
    target: ast.expr, iterable: ast.expr, needed: set[str]
) -> tuple[ast.expr, ast.expr]:
    """The target and the loader of a loop without `enumerate` and progress bars."""
    while isinstance(iterable, ast.Call) and iterable.args:
        name = dotted(iterable.func).split(".")[-1]
        if name in _BARS:
            iterable = iterable.args[0]
        elif (
            name == "enumerate"
            and isinstance(target, (ast.Tuple, ast.List))
            and len(target.elts) == 2
            and not stored(target.elts[0]) & needed
        ):
            target, iterable = target.elts[1], iterable.args[0]
        else:
            break
    return target, iterable


def _draws(node: ast.expr) -> bool:
    """Whether an argument may draw random numbers: a call of something else than a method."""
    return any(
        isinstance(each, ast.Call)
        and (isinstance(each.func, ast.Name) or dotted(each.func).startswith("torch."))
        for each in ast.walk(node)
    )
