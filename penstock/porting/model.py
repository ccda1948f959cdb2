"""The model that a script trains: where it is created, and what trains it."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

from penstock.errors import InputError
from penstock.porting.example import scope_name
from penstock.porting.source import Scope, dotted, receiver
from penstock.porting.training import Step
from penstock.porting.variables import Variable, Variables


@dataclass(frozen=True)
class Beginning:
    """Where the training begins.

    Attributes:
        block: the statements among which it begins.
        begin: the index of the statement that has the first step, or calls a function that trains.
        created: the index of the last statement before that one that creates or moves the model; -1
            if there is none.
    """

    block: list[ast.stmt]
    begin: int
    created: int

    @property
    def first(self) -> ast.stmt:
        """The statement with which the training begins."""
        return self.block[self.begin]

    @property
    def before(self) -> list[ast.stmt]:
        """The statements of the block before the training."""
        return self.block[: self.begin]


class Model:
    """A model that a script trains.

    Args:
        variables: the variables of the script.
        variable: one of the variables that are the model.
        steps: the steps that train it, in the order of the text.

    Attributes:
        source: the script.
        created: the assignments that create it.
        leading: the functions in which it is trained, and those that call them or hand them on.
        owner: the scope where it is created, and the pipeline is built.
        place: where the training begins in the owner.

    Raises:
        InputError: it cannot be seen where the model is created, or where the training begins.
    """

    def __init__(self, variables: Variables, variable: Variable, steps: list[Step]) -> None:
        self.variables, self.variable, self.steps = variables, variable, steps
        self.source = source = variables.source
        assigned = self.assignments(ast.walk(source.tree))
        self.created = [each for each in assigned if variables.root(each.value) is None]
        self.leading = {source.scope(step.backward) for step in steps}
        while more := self._callers(self.leading):
            self.leading |= more
        self.owner = self._owner()
        self.place = self._place()

    def _callers(self, functions: Collection[Scope]) -> set[Scope]:
        """The other functions that name one of those."""
        nodes = ast.walk(self.source.tree)
        naming = {self.source.scope(each) for each in nodes if self._names(each, functions)}
        return naming.difference(functions)

    def _names(self, node: ast.AST, functions: Collection[Scope]) -> bool:
        return (
            isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Load)
            and self.variables.functions.get(node.id) in functions
        )

    def _owner(self) -> Scope:
        scopes = list(dict.fromkeys(map(self.source.scope, self.created)))
        if not scopes:
            step = self.steps[0]
            where = self.source.scope(step.backward)
            if not isinstance(where, ast.Module):
                raise InputError(
                    f"{self.source.name}:{step.backward.lineno} trains {dotted(step.call.func)}, "
                    f"which is given to {scope_name(where)} by code that is not in this script: "
                    "build the pipeline where the model is created, and hand it on in its place"
                )
        if len(scopes) != 1:
            lines = ", ".join(str(node.lineno) for node in self.created) or "none"
            raise InputError(
                f"{self.source.name} creates the model that it trains in {len(scopes)} places "
                f"(lines: {lines}), so where to build the pipeline cannot be seen; run penstock "
                "init on a script with one, or build the pipeline by hand after each"
            )
        return scopes[0]

    def _place(self) -> Beginning:
        source, owner = self.source, self.owner
        calls = [step.call for step in self.steps]
        uses = [node for node in source.walk(owner) if node in calls or self.is_training(node)]
        if not uses:
            raise InputError(
                f"{source.name}:{self.created[0].lineno} creates the model, but "
                f"{scope_name(owner)} does not call what trains it, as far as can be seen"
            )
        use = min(uses, key=lambda node: node.lineno)  # type: ignore[attr-defined]
        assigned = self.assignments(source.walk(owner))
        created = [node for node in assigned if node.lineno < use.lineno]  # type: ignore[attr-defined]
        at = source.statement(use)
        while True:
            block = source.block(at)
            begin = block.index(at)
            places = [source.among(block, node) for node in created]
            before = [place for place in places if place is not None and place < begin]
            if len(before) == len(places):
                return Beginning(block, begin, max(before, default=-1))
            above = source.parent(at)
            if not isinstance(above, ast.stmt) or above is owner:
                raise InputError(
                    f"{source.name}:{at.lineno} trains the model in a block that also "
                    "creates it, in an order that cannot be seen: build the pipeline by hand"
                )
            at = above

    def is_it(self, node: ast.AST) -> bool:
        """Whether a node is a name of the model."""
        return isinstance(node, ast.Name) and self.variables.are_same(
            self.variables.variable(node), self.variable
        )

    def is_in(self, node: ast.AST) -> bool:
        """Whether a node has a name of the model in it."""
        return any(map(self.is_it, ast.walk(node)))

    def assignments(self, nodes: Iterable[ast.AST]) -> list[ast.Assign]:
        """Those of the nodes that assign the model."""
        assigns = [node for node in nodes if isinstance(node, ast.Assign)]
        return [each for each in assigns if any(map(self.is_in, each.targets))]

    def is_training(self, node: ast.AST) -> bool:
        """Whether a node is the name of a function that trains, which is called or handed on."""
        return self._names(node, self.leading)

    def name_before(self, line: int) -> str:
        """The name of the model in the owner before a line: the one that it got last."""
        names = [
            ((node.lineno, node.col_offset), node.id)
            for node in self.source.walk(self.owner)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            if self.is_it(node) and node.lineno < line
        ]
        return max(names)[1] if names else self.variable.name

    def parameters_of(self, node: ast.expr) -> ast.expr | None:
        """`model` in `model.module.parameters()`; `None` for anything else."""
        of = receiver(node, "parameters")
        if of is None or (isinstance(node, ast.Call) and node.args):
            return None
        if isinstance(of, ast.Attribute) and of.attr == "module":
            of = of.value
        return of if self.is_it(of) else None

    @cached_property
    def wrappers(self) -> list[ast.Call]:
        """The calls that wrap the model for parallel training, or compile it."""
        return [each for each in self.source.calls() if self._is_wrapped_by(each)]

    def _is_wrapped_by(self, call: ast.Call) -> bool:
        if not self.variables.is_wrapper(call):
            return False
        root = self.variables.root(call)
        if root is not None:
            return self.is_it(root)
        statement = self.source.statement(call)
        return isinstance(statement, ast.Assign) and self.is_it(statement.targets[0])

    @cached_property
    def is_ranked(self) -> bool:
        """Whether several processes run the script, as ranks."""
        return any(
            self.variables.full(each).endswith("init_process_group")
            for each in ast.walk(self.source.tree)
            if isinstance(each, ast.Attribute | ast.Name)
        )
