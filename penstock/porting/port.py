"""Changes a training script so that a pipeline trains its model."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from penstock.errors import InputError
from penstock.porting.example import Example, Examples, Unknown, scope_name
from penstock.porting.source import Edits, Scope, Source, dotted, loaded, stored
from penstock.porting.training import Step, steps
from penstock.porting.variables import Variable, Variables

SUPPORTED = frozenset(
    "train eval training parameters named_parameters state_dict load_state_dict zero_grad".split()
)
"""What functions of a script may do with a pipeline as with a model, besides calling it."""

_SCALERS = ("torch.amp.GradScaler", "torch.cuda.amp.GradScaler", "torch.GradScaler")
_CLIPS = ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_")
_PARAMETERS = ("parameters", "named_parameters")
_MOVES = ("to", "cuda", "cpu")
_OTHERS = {
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "pytorch_lightning": "Lightning",
    "deepspeed": "DeepSpeed",
    "fabric": "Lightning Fabric",
}
_WIDTH = 100
_ROWS = re.compile(r"SequenceClassification|ImageClassification|MultipleChoice")
_SHIFTED = re.compile(r"CausalLM|LMHeadModel")
_COUNTED = re.compile(r"MaskedLM|TokenClassification|ConditionalGeneration|Seq2SeqLM")


@dataclass(frozen=True)
class Options:
    """What the pipeline is to be built with.

    Attributes:
        devices: a Python expression; empty to leave it to the pipeline.
        microbatches: of a batch; `None` to leave it to the pipeline.
    """

    devices: str = ""
    microbatches: int | None = None


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
    kind: Literal["changed", "left", "check"]
    text: str


@dataclass(frozen=True)
class Ported:
    """A script that uses a pipeline.

    Attributes:
        text: of the script.
        notes: by line.
        style: how its steps train: by `"train_step"`, as a `"call"` with `loss.backward()`, or
            `"mixed"`.
    """

    text: str
    notes: tuple[Note, ...]
    style: Literal["train_step", "call", "mixed"]


def port(text: str, name: str = "the script", options: Options | None = None) -> Ported:
    """Change a training script so that a pipeline trains its model.

    Args:
        text: of the script.
        name: of its file, for messages.
        options: what the pipeline is built with.

    Raises:
        InputError: it is not Python, uses Penstock already, or has no training that is recognised.
    """
    source = Source(text, name)
    variables = Variables(source)
    _check_is_new(source)
    found = [(model, steps(variables, model)) for model in variables.models()]
    trained = [(model, own) for model, own in found if own]
    if not trained:
        raise InputError(_nothing(source, variables))
    trained.sort(key=lambda each: (-len(each[1]), each[1][0].backward.lineno))
    model, own = trained[0]
    change = _Port(source, variables, model, own, options or Options())
    for other, others in trained[1:]:
        change.note(
            others[0].backward,
            "left",
            f"{other.name} is another model that is trained: give it a pipeline of its own "
            "(docs/recipes.md, Two models)",
        )
    return change.result()


def _check_is_new(source: Source) -> None:
    for node in ast.walk(source.tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [str(node.module)]
        if any(name.split(".")[0] == "penstock" for name in names):
            raise InputError(
                f"{source.name}:{node.lineno} imports penstock already: there is nothing to change"  # type: ignore[attr-defined]
            )


def _nothing(source: Source, variables: Variables) -> str:
    """What to say where no training was found."""
    seen: list[str] = []
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            if (first := str(module).split(".")[0]) in _OTHERS:
                seen.append(f"line {node.lineno} imports {_OTHERS[first]}: see docs/frameworks.md")
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr == "backward":
            what = source.of(node)
            where = "in a class" if source.is_in_class(node) else "its model was not found"
            seen.append(f"line {node.lineno} has {' '.join(what.split())}, {where}")
        elif variables.full(node.func).split(".")[-1].endswith("Trainer"):
            seen.append(f"line {node.lineno} uses a Trainer: see docs/frameworks.md")
    known = "; ".join(dict.fromkeys(seen)) or "there is no call of backward()"
    return (
        f"{source.name} has no training loop that is recognised: {known}. A loop is recognised if "
        "a variable holds the model (not an attribute such as self.model), the loop calls it, and "
        "backward() is called on a loss of the result. Otherwise, change the script by hand: "
        "pipe = penstock.Pipeline(model, (x,)), and pipe(x) in place of model(x)"
    )


class _Port:
    """One script, whose edits and notes are collected."""

    def __init__(
        self,
        source: Source,
        variables: Variables,
        model: Variable,
        own: list[Step],
        options: Options,
    ) -> None:
        self.source, self.variables, self.model, self.steps = source, variables, model, own
        self.options = options
        self.edits = Edits()
        self.notes: list[Note] = []
        self._gone: set[int] = set()  # statements that are removed or replaced
        self._removed: set[int] = set()
        self._converted: set[int] = set()  # calls that the pipeline makes instead
        names = {node.id for node in ast.walk(source.tree) if isinstance(node, ast.Name)}
        names |= set().union(*(stored(each) for each in ast.walk(source.tree)), set())
        self.package = "ps" if "ps" not in names else "penstock"
        self.pipe = next(n for n in ("pipe", "pipeline", "penstock_pipe") if n not in names)
        self.used_names = names
        self.leading = self._leading()
        self.owner = self._owner()
        self.wrappers = [n for n in ast.walk(source.tree) if self._wraps(n)]
        self.is_ranked = any(
            variables.full(each).endswith("init_process_group")
            for each in ast.walk(source.tree)
            if isinstance(each, ast.Attribute | ast.Name)
        )

    def note(
        self, node: ast.expr | ast.stmt, kind: Literal["changed", "left", "check"], text: str
    ) -> None:
        self.notes.append(Note(node.lineno, kind, text))

    def result(self) -> Ported:
        """The changed script."""
        self._place()
        self._unwrap()
        self._build()
        for step in self.steps:
            self._train(step)
        self._uses()
        self._clips()
        self._samplers()
        self._import()
        styles = {step.one_call is not None and self._may_use(step) for step in self.steps}
        style: Literal["train_step", "call", "mixed"] = (
            "mixed" if len(styles) > 1 else "train_step" if True in styles else "call"
        )
        self._general_notes()
        text = self.edits.apply(self.source.text)
        try:
            ast.parse(text)
        except SyntaxError as error:
            raise InputError(
                f"{self.source.name}:{self.anchor.lineno}: the pipeline has to be built here, but "
                "other statements, or the loop's head, are on this line: give it a line of its own"
            ) from error
        unique = sorted(dict.fromkeys(self.notes), key=lambda note: note.line)
        return Ported(text, tuple(unique), style)

    # -- who has the model --------------------------------------------------------------------

    def _is_model(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and self.variables.are_same(
            self.variables.variable(node), self.model
        )

    def _wraps(self, node: ast.AST) -> bool:
        if not self.variables.is_wrapper(node) or not isinstance(node, ast.Call):
            return False
        root = self.variables.root(node)
        if root is not None:
            return self._is_model(root)
        statement = self.source.statement(node)
        return isinstance(statement, ast.Assign) and self._is_model(statement.targets[0])

    def _leading(self) -> set[Scope]:
        """The functions in which the model is trained, or that call those."""
        found = {self.source.scope(step.backward) for step in self.steps}
        while True:
            more = set(found)
            for node in ast.walk(self.source.tree):
                if self._is_leading(node, found):
                    more.add(self.source.scope(node))
            if more == found:
                return found
            found = more

    def _is_leading(self, node: ast.AST, functions: set[Scope]) -> bool:
        """Whether a node is the name of a function that trains, which is called or handed on."""
        return (
            isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Load)
            and self.variables.functions.get(node.id) in functions
        )

    def _made(self) -> list[ast.Assign]:
        """Where the model is created."""
        return [
            node
            for node in ast.walk(self.source.tree)
            if isinstance(node, ast.Assign)
            and self.variables.root(node.value) is None
            and any(self._is_model(each) for t in node.targets for each in ast.walk(t))
        ]

    def _owner(self) -> Scope:
        """Where the pipeline is built: where the model is created.

        Raises:
            InputError: that was not found.
        """
        scopes = list(dict.fromkeys(self.source.scope(node) for node in self._made()))
        if not scopes:
            step = self.steps[0]
            where = self.source.scope(step.backward)
            if where in self.leading and not isinstance(where, ast.Module):
                raise InputError(
                    f"{self.source.name}:{step.backward.lineno} trains {dotted(step.call.func)}, "
                    f"which is given to {scope_name(where)} by code that is not in this script: "
                    "build the pipeline where the model is created, and hand it on in its place"
                )
        if len(scopes) != 1:
            lines = ", ".join(str(node.lineno) for node in self._made()) or "none"
            raise InputError(
                f"{self.source.name} creates the model that it trains in {len(scopes)} places "
                f"(lines: {lines}), so where to build the pipeline cannot be seen; run penstock "
                "init on a script with one, or build the pipeline by hand after each"
            )
        return scopes[0]

    # -- where the pipeline is built ----------------------------------------------------------

    def _place(self) -> None:
        """Find the block and the statement where the training begins."""
        uses = [
            node
            for node in self.source.walk(self.owner)
            if any(node is step.call for step in self.steps) or self._is_leading(node, self.leading)
        ]
        if not uses:
            first = self._made()[0]
            raise InputError(
                f"{self.source.name}:{first.lineno} creates the model, but "
                f"{scope_name(self.owner)} does not call what trains it, as far as can be seen"
            )
        use = min(uses, key=lambda node: node.lineno)  # type: ignore[attr-defined]
        stores = [
            node
            for node in self.source.walk(self.owner)
            if isinstance(node, ast.Assign)
            and any(self._is_model(each) for t in node.targets for each in ast.walk(t))
            and node.lineno < use.lineno  # type: ignore[attr-defined]
        ]
        at = self.source.statement(use)
        while True:
            block = self.source.block(at)
            places = [self.source.among(block, node) for node in stores]
            begin = block.index(at)
            if all(place is not None and place < begin for place in places):
                break
            above = self.source.parent(at)
            if not isinstance(above, ast.stmt) or above is self.owner:
                raise InputError(
                    f"{self.source.name}:{at.lineno} trains the model in a block that also "
                    "creates it, in an order that cannot be seen: build the pipeline by hand"
                )
            at = above
        self.block, self.begin = block, begin
        self.made_at = max((p for p in places if p is not None), default=-1)

    def _creations(self) -> list[tuple[int, ast.Call]]:
        """The calls before the training that create a scaler, or an optimizer of torch for it.

        Returns:
            each, with the number of its statement in the block.
        """
        return [
            (k, node)
            for k, statement in enumerate(self.block[: self.begin])
            for node in self._inside(statement)
            if isinstance(node, ast.Call)
            and (self._is_optimizer(node) or self.variables.full(node.func) in _SCALERS)
        ]

    def _inside(self, statement: ast.stmt) -> Iterator[ast.AST]:
        waiting: list[ast.AST] = [statement]
        while waiting:
            node = waiting.pop(0)
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield node
                waiting += ast.iter_child_nodes(node)

    def _is_optimizer(self, node: ast.Call) -> bool:
        """Whether a call creates an optimizer of the model's parameters alone."""
        return self._optimizes(node) and not any(self._has_others(each) for each in ast.walk(node))

    def _optimizes(self, node: ast.Call) -> bool:
        """Whether a call creates an optimizer that the pipeline could create, of the model too."""
        name = self.variables.full(node.func)
        return (
            re.fullmatch(r"torch\.optim\.[A-Z]\w*", name) is not None
            and not name.endswith("LBFGS")
            and any(self._is_model(each) for each in ast.walk(node))
        )

    def _has_others(self, node: ast.AST) -> bool:
        """Whether a node is `other.parameters()`, of something else than the model."""
        if not isinstance(node, ast.Attribute) or node.attr not in _PARAMETERS:
            return False
        return not any(self._is_model(each) for each in ast.walk(node.value))

    def _build(self) -> None:
        """Put the pipeline where it can be, and let it create the optimizer if it can."""
        self.scaler_names: set[str] = set()
        call = self.steps[0].call
        examples = Examples(self.variables, self.owner)
        try:
            example = examples.before(call, self._names_in_use(call))
        except Unknown as why:
            self._build_in_loop(examples, call, str(why))
            return
        creations = self._creations()
        at = min((k for k, _ in creations if k > self.made_at), default=self.begin)
        if not self._is_there(example, at):
            at = self.begin
            if not self._is_there(example, at):
                self._build_in_loop(examples, call, "what the batch is made of comes later")
                return
        self.anchor = self.block[at]
        moved = []
        for k, creation in creations:
            statement = self.source.statement(creation)
            if k >= at:
                self.edits.replace(*self.source.span(creation), self._created(creation, statement))
            elif self._may_move(statement, creation, k, at):
                indent = self.source.indent(self.anchor)
                name = self.source.of(statement.targets[0])  # type: ignore[attr-defined]
                moved.append(f"{indent}{name} = {self._created(creation, statement)}")
                self._remove(statement)
        self._insert_pipeline(example, moved)
        self._note_optimizer()

    def _may_move(self, statement: ast.stmt, creation: ast.Call, start: int, end: int) -> bool:
        """Whether a statement may as well come after those that follow it in the block."""
        if statement is not self.block[start] or not isinstance(statement, ast.Assign):
            return False
        if statement.value is not creation or not isinstance(statement.targets[0], ast.Name):
            return False
        between = self.block[start + 1 : end]
        functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        used = set().union(*(loaded(each) for each in between if not isinstance(each, functions)))
        changed = set().union(*(stored(each) for each in between)) & loaded(creation)
        others = {name for name in changed if not self._is_model_name(name)}
        return not used & stored(statement) and not others

    def _is_model_name(self, name: str) -> bool:
        return self.variables.are_same(self.variables.lookup(self.owner, name), self.model)

    def _is_there(self, example: Example, at: int) -> bool:
        """Whether the names that an example needs are assigned before a statement of the block."""
        later: set[str] = set()
        before: set[str] = set()
        for k, statement in enumerate(self.block):
            (before if k < at else later).update(stored(statement))
        return not example.needs & (later - before)

    def _names_in_use(self, call: ast.Call) -> dict[str, object]:
        """The names of the owner, without those of the loop where the model is called."""
        is_here = self.source.scope(call) is self.owner
        loop = self.block[self.begin]
        found: dict[str, object] = {}
        for node in ast.walk(self.source.tree):
            if not isinstance(node, ast.Name) or self.variables.variable(node).scope is not (
                self.owner
            ):
                continue
            if not (is_here and self.source.among([loop], node) is not None):
                found[node.id] = node
        return found

    def _pipeline(self, args: str, indent: str) -> str:
        """The call that builds the pipeline."""
        model = self._model_name()
        parts = [model, *([args] if args else [])]
        if self.options.devices:
            parts.append(f"devices={self.options.devices}")
        if self.options.microbatches is not None:
            parts.append(f"num_microbatches={self.options.microbatches}")
        if self.is_ranked:
            parts.append('workers="torchrun"')
        return self._called(f"{self.pipe} = {self.package}.Pipeline", parts, indent)

    def _model_name(self) -> str:
        """The name of the model where the pipeline is built: the one that it got last."""
        last = ""
        for node in self.source.walk(self.owner):
            if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Store):
                continue
            if self._is_model(node) and node.lineno < self.anchor.lineno:
                last = node.id
        return last or self.model.name

    def _called(self, function: str, parts: list[str], indent: str) -> str:
        """A call on one line, or with one argument a line if that is too long."""
        line = f"{function}({', '.join(parts)})"
        if len(indent) + len(line) <= _WIDTH:
            return line
        new = self.source.newline
        inside = "".join(f"{new}{indent}    {part}," for part in parts)
        return f"{function}({inside}{new}{indent})"

    def _insert_pipeline(self, example: Example, moved: list[str]) -> None:
        new, indent = self.source.newline, self.source.indent(self.anchor)
        text = ""
        if example.lines:
            torch = self._torch()
            text += f"with {torch}.random.fork_rng(devices=[]):  # the batch is only an example"
            for line in example.lines:
                text += "".join(f"{new}{indent}    {part}" for part in line.splitlines())
            text += f"{new}{indent}"
        text += self._pipeline(example.args, indent)
        text += "".join(f"{new}{line}" for line in moved)
        self.edits.insert(self.source.span(self.anchor)[0], f"{text}{new}{indent}")
        self.note(self.anchor, "changed", "the pipeline is built before this line")
        if example.loader and self._draws_elsewhere():
            self.note(
                self.anchor,
                "check",
                f"the example takes one batch of {example.loader}; torch's random numbers are as "
                "they were afterwards, those of random and numpy are not, if loading uses them",
            )

    def _build_in_loop(self, examples: Examples, call: ast.Call, why: str) -> None:
        """Build the pipeline at the first batch, which is the example.

        Raises:
            InputError: the loop is in another function than the model.
        """
        loops = self.source.loops(call)
        if self.source.scope(call) is not self.owner or not loops:
            raise InputError(
                f"{self.source.name}:{call.lineno} calls the model, but how to have a batch before "
                f"the training cannot be seen: {why}. Build the pipeline by hand, with any batch "
                "of the usual size, where the model is created"
            )
        first_step = self.steps[0]
        statement = self.source.statement(call)
        if first_step.one_call is not None and self._may_use(first_step):
            statement = first_step.one_call.replaced
        above = statement
        while self.source.parent(above) is not loops[0]:
            above = self.source.statement(self.source.parent(above))
        names = set().union(*(loaded(each) for each in (*call.args, *call.keywords)))
        where = statement if stored(above) & names else above
        self.anchor = where
        new, indent = self.source.newline, self.source.indent(where)
        first = self.block[self.begin]
        outer = self.source.indent(first)
        self.edits.insert(self.source.span(first)[0], f"{self.pipe} = None{new}{outer}")
        built = self._pipeline(examples.in_loop(call), f"{indent}    ")
        text = f"if {self.pipe} is None:{new}{indent}    {built}{new}{indent}"
        self.edits.insert(self.source.span(where)[0], text)
        self.note(where, "changed", f"the pipeline is built with the first batch: {why}")
        self._note_optimizer()

    def _draws_elsewhere(self) -> bool:
        return (
            re.search(r"\bnp\.random\b|\bnumpy\.random\b|\bimport random\b", self.source.text)
            is not None
        )

    def _torch(self) -> str:
        """The script's name for torch."""
        for node in ast.walk(self.source.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name == "torch":
                        return alias.asname or "torch"
        self.needs_torch = True
        return "torch"

    needs_torch = False

    def _created(self, call: ast.Call, statement: ast.stmt) -> str:
        """The call by which the pipeline creates an optimizer or a scaler."""
        self._converted.add(id(call))
        indent = self.source.indent(statement)
        options = [
            f"**{self.source.of(each.value)}"
            if each.arg is None
            else f"{each.arg}={self.source.of(each.value)}"
            for each in call.keywords
            if each.arg not in ("device", "params")
        ]
        if not self._is_optimizer(call):
            self.scaler_names |= stored(statement)
            self.note(
                call, "changed", "the pipeline creates the scaler, with one scale for all stages"
            )
            return self._called(f"{self.pipe}.scaler", options, indent)
        given = [each.value for each in call.keywords if each.arg == "params"]
        first, *others = [*call.args[:1], *given, *call.args[1:]]
        parts = [self.source.of(call.func)]
        if not self._is_all(first):
            parts.append(self.source.of(first))
        elif others:
            parts.append("None")
        parts += [*map(self.source.of, others), *options]
        self.note(call, "changed", "the pipeline creates the optimizer, whose steps all workers do")
        return self._called(f"{self.pipe}.optimizer", parts, indent)

    def _is_all(self, node: ast.expr) -> bool:
        return (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "parameters"
            and not node.args
            and self._is_model(self._without_module(node.func.value))
        )

    def _without_module(self, node: ast.expr) -> ast.expr:
        is_module = isinstance(node, ast.Attribute) and node.attr == "module"
        return node.value if is_module and isinstance(node, ast.Attribute) else node

    def _note_optimizer(self) -> None:
        for node in ast.walk(self.source.tree):
            if not isinstance(node, ast.Call) or id(node) in self._converted:
                continue
            if self._optimizes(node):
                self.note(
                    node,
                    "left",
                    "the optimizer is created before the pipeline, or has other parameters too; it "
                    f"steps in the script's process, and {self.pipe}.optimizer(...) would be "
                    "divided among the workers",
                )

    # -- the steps ----------------------------------------------------------------------------

    def _may_use(self, step: Step) -> bool:
        """Whether a step may be a `train_step` here: with a scaler, the pipeline's is needed."""
        return (
            not step.scaler
            or step.scaler in self.scaler_names
            or any(
                self.variables.are_same(
                    self.variables.lookup(self.source.scope(step.backward), step.scaler),
                    self.variables.lookup(self.owner, name),
                )
                for name in self.scaler_names
            )
        )

    def _prefix(self, name: ast.expr) -> str:
        """The pipeline's name where the model is called."""
        if isinstance(name, ast.Name) and self.variables.variable(name).scope is self.owner:
            return self.pipe
        return self.source.of(name)

    def _train(self, step: Step) -> None:
        one = step.one_call
        name = self._prefix(step.call.func)
        if one is None or not self._may_use(step):
            why = step.why_not or "the gradient scaler is created before the pipeline"
            self.note(step.call, "changed", f"{name}(...) takes the place of the model")
            self.note(
                step.backward,
                "left",
                f"backward() stays, because {why}. {name}.train_step(..., loss_fn=...) would hold "
                "fewer activations, if the loss is a mean over rows",
            )
            if step.is_own_loss:
                self.note(
                    step.call,
                    "check",
                    "the model returns its own loss, of which micro-batches have one each: build "
                    "the pipeline with num_microbatches=1, or use train_step (docs/results.md)",
                )
            self._note_device(step)
            return
        target, loss_fn, weight = one.target, one.loss_fn, ""
        if one.reduction == "sum":
            weight = "None"
        elif step.is_own_loss:
            target, loss_fn, weight = self._own_loss(step, one.loss_fn)
        parts = [self.source.of(each) for each in step.call.args]
        parts += [
            f"**{self.source.of(k.value)}"
            if k.arg is None
            else f"{k.arg}={self.source.of(k.value)}"
            for k in step.call.keywords
        ]
        parts += [f"target={target}"] if target else []
        parts.append(f"loss_fn={loss_fn}")
        parts += [f"weight={weight}"] if weight else []
        parts += [f"scaler={step.scaler}"] if step.scaler else []
        assigned = f"{one.loss} = " if one.loss else ""
        indent = self.source.indent(one.replaced)
        text = self._called(f"{assigned}{name}.train_step", parts, indent)
        self.edits.replace(*self.source.span(one.replaced), text)
        self._gone.add(id(one.replaced))
        for statement in one.removed:
            self._remove(statement)
        self.note(one.replaced, "changed", "train_step runs forward, loss and backward")

    def _own_loss(self, step: Step, loss_fn: str) -> tuple[str, str, str]:
        """The target, loss and weight of a model that returns its own loss."""
        kinds = " ".join(self.source.of(each.value) for each in self._made())
        labels = next(
            (self.source.of(k.value) for k in step.call.keywords if k.arg == "labels"), ""
        )
        whole = [self.source.of(k.value) for k in step.call.keywords if k.arg is None]
        if not labels and len(whole) == 1 and not step.call.args:
            labels = f'{whole[0]}["labels"]'
        if _ROWS.search(kinds):
            return "", loss_fn, ""
        count = (
            "(labels[:, 1:] != -100).sum()"
            if _SHIFTED.search(kinds)
            else "(labels != -100).sum()"
            if _COUNTED.search(kinds)
            else ""
        )
        if count and labels:
            output, body = loss_fn.removeprefix("lambda ").split(": ", 1)
            self.note(
                step.call, "check", "the model's loss is weighted by the labels that are not -100"
            )
            return labels, f"lambda {output}, labels: {body}", f"lambda labels: {count}"
        self.note(
            step.call,
            "check",
            "the model's own loss is taken for a mean over rows; if it is one over fewer entries, "
            "such as labels that are not -100, add weight= (README, Losses and metrics)",
        )
        return "", loss_fn, ""

    def _note_device(self, step: Step) -> None:
        if re.search(r"\.cuda\(|cuda|\.to\(", self.source.text):
            self.note(
                step.call,
                "check",
                "on several GPUs the result is on the last stage's device: move the target there "
                "before the loss, y.to(out.device)",
            )

    def _remove(self, statement: ast.stmt) -> None:
        """Take a statement out, with its lines."""
        self._gone.add(id(statement))
        self._removed.add(id(statement))
        block = self.source.block(statement)
        if all(id(each) in self._removed for each in block) or not self.source.is_alone(statement):
            self.edits.replace(*self.source.span(statement), "pass")
        else:
            self.edits.replace(*self.source.lines_of(statement), "")

    # -- wrappers, and everything else that has the model --------------------------------------

    def _unwrap(self) -> None:
        for node in self.wrappers:
            assert isinstance(node, ast.Call)
            statement = self.source.statement(node)
            name = self.variables.full(node.func).split(".")[-1]
            self.note(node, "changed", f"{name} is taken away; the pipeline does its work")
            inner = node.args[0]
            if (
                isinstance(statement, ast.Assign)
                and statement.value is node
                and isinstance(inner, ast.Name)
                and dotted(statement.targets[0]) == inner.id
            ):
                self._remove_with_condition(statement)
            else:
                self.edits.replace(*self.source.span(node), self.source.of(inner))
        for node in ast.walk(self.source.tree) if self.wrappers else ():
            is_module = isinstance(node, ast.Attribute) and node.attr == "module"
            if is_module and isinstance(node, ast.Attribute) and self._is_model(node.value):
                start = self.source.span(node.value)[1]
                self.edits.replace(start, self.source.span(node)[1], "")

    def _remove_with_condition(self, statement: ast.stmt) -> None:
        """Take a statement out; with the `if` around it, if that only prints besides."""
        above = self.source.parent(statement)
        if isinstance(above, ast.If) and not above.orelse:
            others = [each for each in above.body if each is not statement]
            if all(
                isinstance(each, ast.Expr)
                and isinstance(each.value, ast.Call)
                and dotted(each.value.func) == "print"
                for each in others
            ):
                self._remove(above)
                self._gone |= {id(each) for each in ast.walk(above)}
                return
        self._remove(statement)

    def _uses(self) -> None:
        """Let the pipeline take the model's place where it is called and handed on."""
        for name in self.variables.uses(self.model):
            statement = self.source.statement(name)
            if any(id(each) in self._gone for each in (statement, *self.source.parents(name))):
                continue
            is_owner = self.variables.variable(name).scope is self.owner
            above = self.source.parent(name)
            scope = self.source.scope(name)
            if is_owner:
                if scope is self.owner and name.lineno < self.anchor.lineno:
                    continue
                self._use_in_owner(name, above)
            elif scope in self.leading:
                self._use_in_training(name, above)

    def _use_in_owner(self, name: ast.Name, above: ast.AST) -> None:
        if isinstance(above, ast.Call) and above.func is name:
            if self._is_scalar(above) and not any(above is s.call for s in self.steps):
                self.note(
                    name,
                    "left",
                    "the model itself is evaluated here, in this process; on several GPUs or "
                    f"ranks use {self.pipe}.eval_step(..., loss_fn=...)",
                )
                return
            self.edits.replace(*self.source.span(name), self.pipe)
            return
        if isinstance(above, ast.Attribute) and self.is_ranked:
            self._save_on_ranks(name, above)
            return
        passed = next((each for each in self.variables.passed if each.argument is name), None)
        if passed is not None:
            if passed.function in self.leading or self._accepts(passed.function, passed.parameter):
                self.edits.replace(*self.source.span(name), self.pipe)
                self.note(name, "changed", f"{passed.function.name}() gets the pipeline")
            else:
                self.note(
                    name,
                    "left",
                    f"{passed.function.name}() gets the model itself, which it uses as a pipeline "
                    "cannot be used; it runs in this process, unsplit",
                )
        elif (
            isinstance(above, ast.Call)
            and name in above.args
            and not self.variables.is_wrapper(above)
        ):
            self.note(
                name, "left", f"{self.source.of(above.func)}() gets the model itself, unsplit"
            )

    def _save_on_ranks(self, name: ast.Name, above: ast.Attribute) -> None:
        """Let all ranks bring the model up to date before one of them takes its state dict."""
        node: ast.AST = above
        if above.attr == "module":
            node = self.source.parent(above)
        if not isinstance(node, ast.Attribute) or node.attr != "state_dict":
            return
        condition: ast.If | None = None
        for each in self.source.parents(node):
            if isinstance(each, (ast.For, ast.While, ast.FunctionDef, ast.Module)):
                break
            if isinstance(each, ast.If):
                condition = each
        if condition is None or self.source.among(self.block[: self.begin], condition) is not None:
            self.edits.replace(*self.source.span(name), self.pipe)
            self.note(name, "changed", "the state dict is gathered from all ranks")
            return
        at, indent = self.source.span(condition)[0], self.source.indent(condition)
        line = f"{self.pipe}.fetch()  # all ranks bring their models up to date"
        self.edits.insert(at, f"{line}{self.source.newline}{indent}")
        self.note(condition, "changed", "all ranks fetch the weights before one saves them")

    def _use_in_training(self, name: ast.Name, above: ast.AST) -> None:
        """A function that trains has the pipeline under the model's name."""
        statement = self.source.statement(name)
        if isinstance(above, ast.Call) and above.func is name:
            return
        if isinstance(above, ast.Attribute):
            if above.attr in SUPPORTED or (above.attr == "module" and self.wrappers):
                return
            call = self.source.parent(above)
            if (
                above.attr in _MOVES
                and isinstance(call, ast.Call)
                and call in (getattr(statement, "value", None),)
            ):
                self._remove(statement)
                self.note(statement, "changed", "the pipeline has its devices already")
                return
        passed = next((each for each in self.variables.passed if each.argument is name), None)
        if passed is not None and (
            passed.function in self.leading or self._accepts(passed.function, passed.parameter)
        ):
            return
        self.edits.replace(*self.source.span(name), f"{name.id}.model")

    def _accepts(self, function: ast.FunctionDef, parameter: str, depth: int = 0) -> bool:
        """Whether a function uses a parameter only as a pipeline can be used."""
        for node in ast.walk(function):
            if not isinstance(node, ast.Name) or self.variables.variable(node) != (
                function,
                parameter,
            ):
                continue
            above = self.source.parent(node)
            if isinstance(above, ast.Call) and above.func is node:
                if self._is_scalar(above):
                    return False
            elif isinstance(above, ast.Attribute):
                if above.attr not in SUPPORTED:
                    return False
            else:
                passed = next((e for e in self.variables.passed if e.argument is node), None)
                if passed is None or depth > 8:
                    return False
                if not self._accepts(passed.function, passed.parameter, depth + 1):
                    return False
        return True

    def _is_scalar(self, call: ast.Call) -> bool:
        """Whether a part of a call's result is used that is not one row for each of the batch."""
        above = self.source.parent(call)
        if isinstance(above, ast.Attribute):
            return above.attr == "loss"
        if isinstance(above, ast.Subscript):
            return True
        if not isinstance(above, ast.Assign):
            return False
        if not isinstance(above.targets[0], ast.Name):
            return True
        name = above.targets[0].id
        for node in self.source.walk(self.source.scope(call)):
            is_it = isinstance(node, (ast.Attribute, ast.Subscript)) and dotted(node.value) == name
            if is_it and isinstance(node, ast.Attribute) and node.attr == "loss":
                return True
        return False

    def _clips(self) -> None:
        for node in ast.walk(self.source.tree):
            if not isinstance(node, ast.Call) or self.variables.full(node.func) not in _CLIPS:
                continue
            named = next((k.value for k in node.keywords if k.arg == "parameters"), None)
            inner = node.args[0] if node.args else named
            if inner is None or not self._is_all(inner):
                continue
            assert isinstance(inner, ast.Call)
            assert isinstance(inner.func, ast.Attribute)
            name = self._without_module(inner.func.value)
            scope = self.source.scope(node)
            if scope not in self.leading and scope is not self.owner:
                continue
            function = self.variables.full(node.func).split(".")[-1]
            self.edits.replace(*self.source.span(node.func), f"{self._prefix(name)}.{function}")
            self.note(node, "changed", "the pipeline clips the gradients of all its stages")
            if named is not None:
                continue
            start, end = self.source.span(inner)
            rest = re.compile(r"\s*,\s*").match(self.source.text, end)
            self.edits.replace(start, rest.end() if rest else end, "")
            self._gone.add(id(inner))

    def _samplers(self) -> None:
        """Every rank needs the whole batch."""
        for node in ast.walk(self.source.tree):
            if not isinstance(node, ast.Call):
                continue
            if self.variables.full(node.func).split(".")[-1] != "DistributedSampler":
                continue
            if {"num_replicas", "rank"} & {k.arg for k in node.keywords} or len(node.args) > 1:
                self.note(
                    node, "check", "every rank needs the same batches: num_replicas=1, rank=0"
                )
                continue
            end = self.source.span(node)[1] - 1
            comma = "" if self.source.text[:end].rstrip().endswith((",", "(")) else ", "
            self.edits.insert(end, f"{comma}num_replicas=1, rank=0")
            self.note(
                node,
                "check",
                "every rank gets the same, whole batch now, so a step has as many rows as "
                "batch_size says, where it had so many for each rank: multiply batch_size by the "
                "number of ranks to train with as many",
            )

    # -- the rest -----------------------------------------------------------------------------

    def _import(self) -> None:
        line = "import penstock as ps" if self.package == "ps" else "import penstock"
        new = self.source.newline
        lines = f"import torch{new}{line}" if self.needs_torch else line
        body = self.source.tree.body
        last = None
        for statement in body:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                last = statement
            elif last is not None or not (
                isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            ):
                break
        if last is not None:
            _, end = self.source.lines_of(last)
            before = "" if self.source.text[:end].endswith(("\n", "\r")) else new
            self.edits.insert(end, f"{before}{lines}{new}")
            return
        start = next((s for s in body if not isinstance(s, ast.Expr)), body[0])
        self.edits.insert(self.source.lines_of(start)[0], f"{lines}{new}")

    def _general_notes(self) -> None:
        text = self.source.text
        for node in ast.walk(self.source.tree):
            name = self.variables.full(node.func) if isinstance(node, ast.Call) else ""
            last = name.split(".")[-1]
            if last in ("no_sync", "require_backward_grad_sync"):
                self.note(node, "check", "a pipeline has no no_sync(): gradients add up without it")  # type: ignore[arg-type]
            elif last == "init_process_group":
                self.note(
                    node,  # type: ignore[arg-type]
                    "check",
                    "every rank is a worker of one pipeline: all must build the same model (call "
                    "torch.manual_seed before) and have the same batches. What one of them does "
                    f"alone must not call the pipeline; all call {self.pipe}.fetch() before it "
                    "uses the model",
                )
        dropout = re.search(r"[Dd]ropout", text)
        if dropout:
            line = text.count("\n", 0, dropout.start()) + 1
            self.notes.append(
                Note(
                    line,
                    "check",
                    "dropout draws other masks than without a pipeline, which depend on seed, "
                    "step and micro-batch only",
                )
            )
