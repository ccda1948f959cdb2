"""The batch that a pipeline is built with: the statements of the training loop that make it."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Mapping, Set
from dataclasses import dataclass

from penstock.porting.source import Scope, Script, dotted, loaded, parameters, stored
from penstock.porting.variables import Variable, Variables

_BARS = ("tqdm", "trange", "track", "ProgressBar", "notebook_tqdm")  # show progress, yield items


class Unknown(Exception):  # noqa: N818
    """Why there is no example before the loop."""


@dataclass(frozen=True)
class Example:
    """How to have a batch before the training begins.

    Attributes:
        lines: the statements that make it, in order; none if all names are there already.
        args: the arguments of a pipeline, `(x,), kwargs={"mask": mask}`.
        needs: the names that must be assigned before.
        loader: the expression from which the first batch is taken; empty if there is none.
    """

    lines: tuple[str, ...]
    args: str
    needs: frozenset[str]
    loader: str = ""


_Line = ast.stmt | tuple[ast.expr, ast.expr]
"""A statement, or the target and the iterable of a loop."""


@dataclass(frozen=True)
class _Given:
    """A call of a function, and the arguments that it gives the function's parameters.

    Attributes:
        call: the call; for a closure without parameters a call in it, or a function in it.
        arguments: the arguments, by parameter.
    """

    call: ast.AST
    arguments: Mapping[str, ast.expr]

    def texts(self, source: Script, names: Mapping[str, str]) -> dict[str, str]:
        """The arguments as text, with other names where the caller's have changed."""
        found = {}
        for name, argument in self.arguments.items():
            text = source.replaced(argument, names, {})
            is_simple = isinstance(argument, (ast.Name, ast.Attribute, ast.Constant))
            found[name] = text if is_simple else f"({text})"
        return found


class Examples:
    """Finds the example of a step.

    Args:
        variables: the variables of the script.
        owner: the scope where the pipeline is built.
    """

    def __init__(self, variables: Variables, owner: Scope) -> None:
        self.variables, self.source, self.owner = variables, variables.source, owner

    def in_loop(self, call: ast.Call) -> str:
        """The arguments of a pipeline that is built right before a call of the model."""
        return self._arguments(call, {}, None)

    def before(self, call: ast.Call, used: Set[str]) -> Example:
        """The example before the training.

        Args:
            call: the call of the model, in a step.
            used: the names that are in use where the pipeline is built, and must not be assigned.

        Raises:
            Unknown: there is none.
        """
        needed = loaded(*call.args, *call.keywords)
        levels: list[tuple[list[_Line], _Given]] = []
        at: ast.AST = call
        loader = ""
        while True:
            scope = self.source.scope(at)
            lines, needed, own_loader = self._made_in(scope, at, needed)
            loader = loader or own_loader
            if scope is self.owner:
                break
            if self._is_closure(scope):
                levels.append((lines, _Given(at, {})))
                at = scope
                continue
            self._check_local(scope, needed)
            given = self._given(scope)
            levels.append((lines, given))
            at, needed = given.call, self._needed_by_caller(scope, needed, given)
        fresh = {name for line in lines for name in _stored_by(line)}
        self._check_known(needed)
        names = {name: f"example_{name}" for name in fresh if name in used}
        made = [self._line(line, names) for line in lines]
        for inner, given in reversed(levels):
            fresh = {name for line in inner for name in _stored_by(line)}
            names = {
                **({} if given.arguments else names),
                **given.texts(self.source, names),
                **{name: f"example_{name}" for name in fresh if name in used},
                **{name: name for name in fresh if name not in used},
            }
            made += [self._line(line, names) for line in inner]
        extra: list[str] = []
        args = self._arguments(call, names, extra)
        return Example((*made, *extra), args, frozenset(needed), loader)

    def _made_in(
        self, scope: Scope, call: ast.AST, needed: set[str]
    ) -> tuple[list[_Line], set[str], str]:
        """The statements of a function that make the names that a call in it needs.

        In the scope where the pipeline is built, those outside of loops are left out: they come
        before.

        Args:
            scope: the function, or the module.
            call: the call, or another node.
            needed: the names that it needs.

        Returns:
            the statements, the names that these need, and the expression from which a loop takes
            batches.
        """
        lines: list[_Line] = []
        loader = ""
        at: ast.AST = self.source.statement(call)
        while at is not scope:
            above = self.source.parent(at)
            if isinstance(at, ast.stmt) and (scope is not self.owner or self.source.loops(at)):
                needed, own = self._made_before(at, needed)
                lines = own + lines
            if isinstance(above, (ast.For, ast.AsyncFor)) and stored(above.target) & needed:
                taken, iterable = _without_counting(above.target, above.iter, needed)
                self._check_can_be_read_twice(iterable)
                loader = loader or self.source.of(iterable)
                needed = (needed - stored(above.target)) | loaded(iterable)
                lines = [(taken, iterable), *lines]
            at = above
        return lines, needed, loader

    def _is_closure(self, scope: Scope) -> bool:
        """Whether a scope is a function without parameters, defined where the pipeline is built.

        It sees the names there.
        """
        is_function = isinstance(scope, ast.FunctionDef) and not parameters(scope)
        return is_function and self.source.scope(scope) is self.owner

    def _check_local(self, scope: Scope, needed: set[str]) -> None:
        own = set(parameters(scope))
        local = {name for name in needed - own if self.variables.lookup(scope, name).scope is scope}
        if local:
            raise Unknown(f"{', '.join(sorted(local))} is known in {scope_name(scope)} only")

    def _check_known(self, needed: set[str]) -> None:
        """Raise if a name is nowhere assigned that the owner can see."""
        for name in sorted(needed - set(dir(builtins))):
            scope = self.variables.lookup(self.owner, name).scope
            known = set(parameters(scope))
            for node in self.source.walk(scope):
                if isinstance(node, ast.stmt):
                    known |= stored(node)
            if not known & {name, "*"}:
                raise Unknown(f"where {name} comes from is not known")

    def _needed_by_caller(self, scope: Scope, needed: set[str], given: _Given) -> set[str]:
        own = set(parameters(scope))
        found = needed - own
        for name in needed & own:
            if name not in given.arguments:
                raise Unknown(f"what {name} of {scope_name(scope)} is cannot be seen")
            found |= loaded(given.arguments[name])
        return found

    def _made_before(self, at: ast.stmt, needed: set[str]) -> tuple[set[str], list[_Line]]:
        """The statements before one in its block that make the names, and what they need."""
        block = self.source.block(at)
        found: list[_Line] = []
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

    def _given(self, scope: Scope) -> _Given:
        """The call of a function that is found first, with the arguments that it gives.

        Raises:
            Unknown: it is not called in this script.
        """
        if isinstance(scope, ast.Module):
            raise Unknown("the training is not called from where the model is made")
        calls = [
            node
            for node in ast.walk(self.source.tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and self.variables.functions.get(node.func.id) is scope
            and self.source.scope(node) is not scope
        ]
        if not calls:
            raise Unknown(f"{scope_name(scope)} is not called in this script")
        first = calls[0]
        arguments = {
            each.parameter: each.argument for each in self.variables.passed if each.call is first
        }
        plain = [*scope.args.posonlyargs, *scope.args.args]
        for arg, default in zip(plain[::-1], scope.args.defaults[::-1], strict=False):
            arguments.setdefault(arg.arg, default)
        for arg, given in zip(scope.args.kwonlyargs, scope.args.kw_defaults, strict=True):
            if given is not None:
                arguments.setdefault(arg.arg, given)
        return _Given(first, arguments)

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


def _stored_by(line: _Line) -> set[str]:
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
    """Whether an argument may draw random numbers: it calls a plain name, or `torch.<name>`."""
    return any(
        isinstance(each, ast.Call)
        and (isinstance(each.func, ast.Name) or dotted(each.func).startswith("torch."))
        for each in ast.walk(node)
    )
