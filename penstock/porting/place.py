"""Where the training begins in the function that creates the model."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from penstock.errors import InputError
from penstock.porting.example import scope_name
from penstock.porting.model import Model


@dataclass(frozen=True)
class Place:
    """Where the training begins.

    Attributes:
        block: the statements among which it begins.
        begin: the number of the statement that has the first step, or calls what trains.
        created: the number of the last one before that creates or moves the model; -1 if none.
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


def place_of(model: Model) -> Place:
    """Where the training of a model begins, after all that creates it.

    Raises:
        InputError: that was not found.
    """
    source, owner = model.source, model.owner
    calls = [step.call for step in model.steps]
    uses = [node for node in source.walk(owner) if node in calls or model.is_training(node)]
    if not uses:
        raise InputError(
            f"{source.name}:{model.created[0].lineno} creates the model, but "
            f"{scope_name(owner)} does not call what trains it, as far as can be seen"
        )
    use = min(uses, key=lambda node: node.lineno)  # type: ignore[attr-defined]
    assigned = model.assignments(source.walk(owner))
    created = [node for node in assigned if node.lineno < use.lineno]  # type: ignore[attr-defined]
    at = source.statement(use)
    while True:
        block = source.block(at)
        begin = block.index(at)
        places = [source.among(block, node) for node in created]
        before = [place for place in places if place is not None and place < begin]
        if len(before) == len(places):
            return Place(block, begin, max(before, default=-1))
        above = source.parent(at)
        if not isinstance(above, ast.stmt) or above is owner:
            raise InputError(
                f"{source.name}:{at.lineno} trains the model in a block that also "
                "creates it, in an order that cannot be seen: build the pipeline by hand"
            )
        at = above
