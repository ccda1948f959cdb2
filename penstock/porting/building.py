"""Where and how the pipeline is built in a script."""

from __future__ import annotations

import ast
import re
from collections.abc import Set
from dataclasses import dataclass

from penstock.errors import InputError
from penstock.porting import optimizers
from penstock.porting.changes import Changes
from penstock.porting.example import Example, Examples, Unknown
from penstock.porting.model import Model
from penstock.porting.source import Script, loaded, stored
from penstock.porting.training import OneCall, Step


@dataclass(frozen=True)
class Options:
    """What the pipeline is to be built with.

    Attributes:
        devices: a Python expression; empty to leave it to the pipeline.
        microbatches: the number of micro-batches; `None` to leave it to the pipeline.
    """

    devices: str = ""
    microbatches: int | None = None


@dataclass(frozen=True)
class Built:
    """The pipeline in a script.

    Attributes:
        model: the model that it trains.
        anchor: the statement before which it is built.
        pipe: the name of the pipeline there.
        package: the script's name for Penstock.
        scalers: the names there of the gradient scalers that it creates.
        needs_torch: whether the script has to import torch for it.
    """

    model: Model
    anchor: ast.stmt
    pipe: str
    package: str
    scalers: Set[str] = frozenset()
    needs_torch: bool = False

    def name_for(self, node: ast.expr) -> str:
        """The name to use in place of an expression that is the model.

        It is the pipeline's in the scope where this is built. Other functions are given the
        pipeline under the model's name, which stays.
        """
        variables = self.model.variables
        if isinstance(node, ast.Name) and variables.variable(node).scope is self.model.owner:
            return self.pipe
        return self.model.source.of(node)

    def one_call(self, step: Step) -> OneCall | None:
        """How `train_step` does a step; `None` if it must not.

        If the step has a gradient scaler, the pipeline has to have created it.
        """
        if not step.scaler or step.scaler in self.scalers:
            return step.one_call
        lookup, are_same = self.model.variables.lookup, self.model.variables.are_same
        scaler = lookup(self.model.source.scope(step.backward), step.scaler)
        if any(are_same(scaler, lookup(self.model.owner, name)) for name in self.scalers):
            return step.one_call
        return None


def build(model: Model, options: Options, changes: Changes) -> Built:
    """Build the pipeline where its example can be made, and let it create the optimizers it can.

    Raises:
        InputError: there is no such place.
    """
    return _Builder(model, options, changes).build()


class _Builder:
    def __init__(self, model: Model, options: Options, changes: Changes) -> None:
        self.model, self.options, self.changes = model, options, changes
        self.source = source = model.source
        names = {node.id for node in ast.walk(source.tree) if isinstance(node, ast.Name)}
        names |= stored(*ast.walk(source.tree))
        self.package = "ps" if "ps" not in names else "penstock"
        self.pipe = next(n for n in ("pipe", "pipeline", "penstock_pipe") if n not in names)

    def build(self) -> Built:
        call, place = self.model.steps[0].call, self.model.place
        examples = Examples(self.model.variables, self.model.owner)
        try:
            example = examples.before(call, self._names_in_use(call))
        except Unknown as why:
            return self._build_in_loop(examples, str(why))
        creations = optimizers.creations(self.model)
        first = min((c.at for c in creations if c.at > place.created), default=place.begin)
        for at in (first, place.begin):
            if not example.needs & (stored(*place.block[at:]) - stored(*place.block[:at])):
                return self._build_before(at, example, creations)
        return self._build_in_loop(examples, "what the batch is made of comes later")

    def _names_in_use(self, call: ast.Call) -> set[str]:
        """The names of the owner, without those of the loop where the model is called."""
        owner, variables = self.model.owner, self.model.variables
        loop = [self.model.place.first] if self.source.scope(call) is owner else []
        return {
            node.id
            for node in ast.walk(self.source.tree)
            if isinstance(node, ast.Name)
            and variables.variable(node).scope is owner
            and self.source.among(loop, node) is None
        }

    def _build_before(
        self, at: int, example: Example, creations: list[optimizers.Creation]
    ) -> Built:
        """Build the pipeline before a statement of the block.

        Args:
            at: the index of the statement in the block.
            example: the batch that the pipeline is built with.
            creations: what creates optimizers and scalers before the training.
        """
        anchor, changes = self.model.place.block[at], self.changes
        scalers: set[str] = set()
        converted, moved = [], []
        for each in creations:
            is_before = each.at < at
            if is_before and not optimizers.may_move(self.model, each, at):
                continue
            text = optimizers.created(self.model, each, self.pipe, changes)
            converted.append(each.call)
            if each.is_scaler:
                scalers |= stored(each.statement)
            if is_before:
                moved.append(f"{self.source.of(each.statement.targets[0])} = {text}")  # type: ignore[attr-defined]
                changes.remove(each.statement)
            else:
                changes.replace(each.call, text)
        torch = _torch(self.source)
        lines = []
        if example.lines:
            fork = f"{torch or 'torch'}.random.fork_rng(devices=[])"
            lines.append(f"with {fork}:  # the batch is only an example")
            lines += [f"    {part}" for line in example.lines for part in line.splitlines()]
        built = self._pipeline(anchor, example.args, self.source.indent(anchor))
        changes.insert(anchor, [*lines, built, *moved])
        changes.note(anchor, "changed", "the pipeline is built before this line")
        if example.loader and _draws_elsewhere(self.source):
            changes.note(
                anchor,
                "check",
                f"the example takes one batch of {example.loader}; torch's random numbers are as "
                "they were afterwards, those of random and numpy are not, if loading uses them",
            )
        optimizers.note_left(self.model, self.pipe, converted, changes)
        needs_torch = bool(example.lines) and torch is None
        return Built(self.model, anchor, self.pipe, self.package, scalers, needs_torch)

    def _build_in_loop(self, examples: Examples, why: str) -> Built:
        """Build the pipeline at the first batch, which is the example.

        Raises:
            InputError: the loop is in another function than the model.
        """
        step, changes = self.model.steps[0], self.changes
        call = step.call
        loops = self.source.loops(call)
        if self.source.scope(call) is not self.model.owner or not loops:
            raise InputError(
                f"{self.source.name}:{call.lineno} calls the model, but how to have a batch before "
                f"the training cannot be seen: {why}. Build the pipeline by hand, with any batch "
                "of the usual size, where the model is created"
            )
        statement = self.source.statement(call)
        if step.one_call is not None and not step.scaler:
            statement = step.one_call.replaced
        above = statement
        while self.source.parent(above) is not loops[0]:
            above = self.source.statement(self.source.parent(above))
        names = loaded(*call.args, *call.keywords)
        anchor = statement if stored(above) & names else above
        changes.insert(self.model.place.first, [f"{self.pipe} = None"])
        inside = f"{self.source.indent(anchor)}    "
        built = self._pipeline(anchor, examples.in_loop(call), inside)
        changes.insert(anchor, [f"if {self.pipe} is None:", f"    {built}"])
        changes.note(anchor, "changed", f"the pipeline is built with the first batch: {why}")
        optimizers.note_left(self.model, self.pipe, (), changes)
        return Built(self.model, anchor, self.pipe, self.package)

    def _pipeline(self, anchor: ast.stmt, args: str, indent: str) -> str:
        """The statement that builds the pipeline, before another one."""
        parts = [self.model.name_before(anchor.lineno), *([args] if args else [])]
        if self.options.devices:
            parts.append(f"devices={self.options.devices}")
        if self.options.microbatches is not None:
            parts.append(f"num_microbatches={self.options.microbatches}")
        if self.model.is_ranked:
            parts.append('workers="torchrun"')
        return self.changes.call(f"{self.pipe} = {self.package}.Pipeline", parts, indent)


def _draws_elsewhere(source: Script) -> bool:
    """Whether a script may draw random numbers that are not torch's."""
    pattern = r"\bnp\.random\b|\bnumpy\.random\b|\bimport random\b"
    return re.search(pattern, source.text) is not None


def _torch(source: Script) -> str | None:
    """The script's name for torch, if it imports that."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "torch":
                    return alias.asname or "torch"
    return None
