"""Which names of a script mean the same model, across its functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from penstock.porting.source import Scope, Script, dotted, parameters, receiver, stored

_MOVES = {"to", "cuda", "cpu", "train", "eval", "float", "requires_grad_"}  # return the model
_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")
_OF_A_MODULE = {"parameters", "named_parameters", "train", "eval", "state_dict", "module"}


class Variable(NamedTuple):
    """A name in the scope that it belongs to."""

    scope: Scope
    name: str


class Passed(NamedTuple):
    """An argument of a call of one of the script's own functions.

    Attributes:
        call: the call.
        function: the function that is called.
        parameter: the name of the parameter.
        argument: the expression that is passed for it.
    """

    call: ast.Call
    function: ast.FunctionDef
    parameter: str
    argument: ast.expr


class Variables:
    """The variables of a script, of which some are the same object.

    Args:
        source: the script.
    """

    def __init__(self, source: Script) -> None:
        self.source = source
        self._same: dict[Variable, Variable] = {}
        self.passed = list(self._all_passed())
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                root = self.root(node.value)
                if root is not None:
                    self._join(self.variable(node.targets[0]), self.variable(root))
        for each in self.passed:
            if isinstance(each.argument, ast.Name):
                own = Variable(each.function, each.parameter)
                self._join(own, self.variable(each.argument))

    @cached_property
    def functions(self) -> dict[str, ast.FunctionDef]:
        """The functions of the script that are not methods, by name."""
        nodes = [node for node in ast.walk(self.source.tree) if isinstance(node, ast.FunctionDef)]
        return {node.name: node for node in nodes if not self.source.is_in_class(node)}

    @cached_property
    def _imported(self) -> dict[str, str]:
        """The whole name of what is imported, by the script's name for it."""
        found = {}
        for node in ast.walk(self.source.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.asname:
                        found[alias.asname] = alias.name
            elif isinstance(node, ast.ImportFrom) and not node.level:
                for alias in node.names:
                    found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        return found

    def full(self, node: ast.AST) -> str:
        """`"torch.nn.functional.relu"` for `F.relu`; an empty text for what has no name."""
        first, dot, rest = dotted(node).partition(".")
        return f"{self._imported.get(first, first)}{dot}{rest}"

    def is_imported(self, name: str) -> bool:
        """Whether a name comes from a `from … import …`, or from an `import … as …`."""
        return name in self._imported

    def is_wrapper(self, node: ast.AST) -> bool:
        """Whether a node wraps a model for parallel training, or compiles it."""
        if not isinstance(node, ast.Call) or not node.args:
            return False
        name = self.full(node.func)
        return name == "torch.compile" or name.split(".")[-1] in _WRAPPERS

    def root(self, node: ast.expr) -> ast.Name | None:
        """`model` in `DDP(model.to(rank))`; `None` where it is a new object."""
        while True:
            if isinstance(node, ast.Name):
                return node
            if self.is_wrapper(node) and isinstance(node, ast.Call):
                node = node.args[0]
            elif (moved := receiver(node, *_MOVES)) is not None:
                node = moved
            else:
                return None

    def variable(self, name: ast.Name) -> Variable:
        """The variable that a name means where it stands."""
        return self.lookup(self.source.scope(name), name.id)

    def lookup(self, scope: Scope, name: str) -> Variable:
        """The variable that a name means in a scope."""
        while not isinstance(scope, ast.Module):
            if name in self._owned(scope):
                return Variable(scope, name)
            scope = self.source.scope(scope)
        return Variable(scope, name)

    def _owned(self, scope: Scope) -> set[str]:
        """The names that are local to a function."""
        if scope not in self._kept:
            elsewhere: set[str] = set()
            own = set(parameters(scope))
            for node in self.source.walk(scope):
                if isinstance(node, (ast.Global, ast.Nonlocal)):
                    elsewhere |= set(node.names)
                elif isinstance(node, ast.stmt):
                    own |= stored(node)
            self._kept[scope] = own - elsewhere
        return self._kept[scope]

    @cached_property
    def _kept(self) -> dict[Scope, set[str]]:
        return {}

    def _find(self, variable: Variable) -> Variable:
        while variable in self._same:
            variable = self._same[variable]
        return variable

    def _join(self, one: Variable, other: Variable) -> None:
        one, other = self._find(one), self._find(other)
        if one != other:
            self._same[one] = other

    def are_same(self, one: Variable, other: Variable) -> bool:
        """Whether both are the same object."""
        return self._find(one) == self._find(other)

    def _all_passed(self) -> Iterator[Passed]:
        for node in ast.walk(self.source.tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            function = self.functions.get(node.func.id)
            if function is None:
                continue
            names = parameters(function)
            for name, argument in zip(names, node.args, strict=False):
                if isinstance(argument, ast.Starred):
                    break
                yield Passed(node, function, name, argument)
            for keyword in node.keywords:
                if keyword.arg in names:
                    yield Passed(node, function, str(keyword.arg), keyword.value)

    def passing(self, argument: ast.expr) -> Passed | None:
        """The call of one of the script's functions that has this argument."""
        return next((each for each in self.passed if each.argument is argument), None)

    def uses(self, of: Variable) -> Iterator[ast.Name]:
        """Every place where the object of a variable is read, in no particular order."""
        for node in ast.walk(self.source.tree):
            if (
                isinstance(node, ast.Name)
                and isinstance(node.ctx, ast.Load)
                and self.are_same(self.variable(node), of)
            ):
                yield node

    def models(self) -> list[Variable]:
        """One variable of every object that is used as a module with parameters, and called."""
        found: list[Variable] = []
        called: list[Variable] = []
        for node in ast.walk(self.source.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.attr in _OF_A_MODULE:
                    found.append(self._find(self.variable(node.value)))
            elif isinstance(node, ast.Call):
                if isinstance(node.func, ast.Name):
                    called.append(self._find(self.variable(node.func)))
                if self.is_wrapper(node) and (root := self.root(node)) is not None:
                    found.append(self._find(self.variable(root)))
        return [each for each in dict.fromkeys(found) if each in called]
