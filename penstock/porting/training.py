"""The steps of a script: where a model's result becomes a loss, and the loss goes backward."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.porting.source import LOOPS, Script, dotted, loaded, receiver, stored
from penstock.porting.variables import Variable, Variables

_OWN_NAMES = {"target", "loss_fn", "weight", "loss_kwargs", "metrics", "outputs", "scaler"}
_MEANS = {  # losses of torch: means over rows, or over entries of which all rows have equally many
    *"cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss".split(),
    *"binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss".split(),
    *"CrossEntropyLoss NLLLoss MSELoss L1Loss SmoothL1Loss HuberLoss BCELoss".split(),
    *"BCEWithLogitsLoss SoftMarginLoss".split(),
}
_HARMLESS = {"label_smoothing", "beta", "delta", "pos_weight"}  # options that keep it a mean
_GRADIENTS = ("zero_grad", ".grad", "step(", "clip_grad")


@dataclass(frozen=True)
class Step:
    """One backward, and the call of the model that it begins with.

    Attributes:
        call: the call of the model.
        backward: the statement that calls `backward()`.
        scaler: the name of the gradient scaler; empty if there is none.
        is_own_loss: whether the model returns the loss itself.
        one_call: how `train_step` does the step; `None` if it might not mean the same.
        why_not: why it might not; empty otherwise.
    """

    call: ast.Call
    backward: ast.stmt
    scaler: str = ""
    is_own_loss: bool = False
    one_call: OneCall | None = None
    why_not: str = ""


@dataclass(frozen=True)
class OneCall:
    """A step as a call of `train_step`.

    Attributes:
        loss: the name that the loss is assigned to; empty if it has none.
        target: the target, as an expression; empty if there is none.
        loss_fn: the loss function, as an expression.
        reduction: whether the loss is the mean of its rows, or their sum.
        replaced: the statement that becomes the call.
        removed: the other statements of the step, which go.
    """

    loss: str
    target: str
    loss_fn: str
    reduction: Literal["mean", "sum"]
    replaced: ast.stmt
    removed: tuple[ast.stmt, ...]


class _Unclear(Exception):  # noqa: N818
    """Why `train_step` might not mean the same."""


def steps(variables: Variables, model: Variable) -> list[Step]:
    """The steps that train a model, in the order of the text."""
    source = variables.source
    found = []
    for node in ast.walk(source.tree):
        given = receiver(node.value, "backward") if isinstance(node, ast.Expr) else None
        if not isinstance(node, ast.Expr) or given is None:
            continue
        scaler, loss = _unscaled(given)
        chain = _chain(source, node, loss)
        calls = [
            each
            for part in (*(assign.value for assign in chain), loss)
            for each in ast.walk(part)
            if isinstance(each, ast.Call)
            and isinstance(each.func, ast.Name)
            and variables.are_same(variables.variable(each.func), model)
        ]
        if calls:
            reader = _Reader(variables, node, scaler, loss, chain, calls)
            found.append(reader.step())
    return sorted(found, key=lambda step: step.backward.lineno)


def _unscaled(node: ast.expr) -> tuple[str, ast.expr]:
    """The name of the scaler and the loss of `scaler.scale(loss)`."""
    scaler = receiver(node, "scale")
    if scaler is not None and isinstance(node, ast.Call) and len(node.args) == 1:
        return dotted(scaler), node.args[0]
    return "", node


def straight(source: Script, node: ast.stmt) -> list[ast.stmt]:
    """The statements that surely ran before one in the same turn of its loop, in order.

    Those of a `with` are among them one by one; other compound statements are whole.
    """
    found: list[ast.stmt] = []
    at: ast.stmt = node
    while True:
        block = source.block(at)
        found = [each for before in block[: block.index(at)] for each in _flat(before)] + found
        above = source.parent(at)
        if not isinstance(above, (ast.With, ast.AsyncWith, ast.If, ast.Try)):
            return found
        at = above


def _flat(statement: ast.stmt) -> list[ast.stmt]:
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        return [each for inner in statement.body for each in _flat(inner)]
    return [statement]


def _chain(source: Script, backward: ast.stmt, loss: ast.expr) -> list[ast.Assign]:
    """The assignments that the loss comes from, one after the other, the first one first."""
    chain: list[ast.Assign] = []
    wanted = loaded(loss)
    for statement in reversed(straight(source, backward)):
        if isinstance(statement, ast.Assign) and stored(statement) & wanted:
            chain.insert(0, statement)
            wanted = (wanted - stored(statement)) | loaded(statement.value)
    return chain


class _Reader:
    """Reads one step."""

    def __init__(
        self,
        variables: Variables,
        statement: ast.Expr,
        scaler: str,
        loss: ast.expr,
        chain: Sequence[ast.Assign],
        calls: Sequence[ast.Call],
    ) -> None:
        self.variables, self.source = variables, variables.source
        self.backward: ast.Expr = statement
        self.scaler, self.loss = scaler, loss
        self.calls, self.call = calls, calls[0]
        first = next((k for k, a in enumerate(chain) if self.call in ast.walk(a)), len(chain))
        names: set[str] = set(stored(chain[first])) if first < len(chain) else set()
        self.chain = list(chain[first : first + 1])
        for each in chain[first + 1 :]:  # of those that come from the model's result
            if loaded(each.value) & names:
                self.chain.append(each)
                names |= stored(each)

    def step(self) -> Step:
        try:
            one_call, is_own = self._one_call()
        except _Unclear as why:
            own = self._is_own_loss(self._expression()[0]) if len(self.calls) == 1 else False
            return Step(self.call, self.backward, self.scaler, own, None, str(why))
        return Step(self.call, self.backward, self.scaler, is_own, one_call)

    # -- the loss as a function of the model's result -----------------------------------------

    def _placeholder(self) -> str:
        """A name for the model's result."""
        first = self.chain[0] if self.chain else None
        if (
            first is not None
            and first.value is self.call
            and isinstance(first.targets[0], ast.Name)
        ):
            return first.targets[0].id
        return "output"

    def _expression(self) -> tuple[ast.expr, str]:
        """The loss as an expression of the model's result, and its text."""
        output = self._placeholder()
        names: dict[str, str] = {}
        whole = {id(self.call): output}
        for assign in self.chain:
            value = self._written(assign.value, names, whole)
            target = assign.targets[0]
            simple = isinstance(assign.value, (ast.Call, ast.Name, ast.Attribute, ast.Subscript))
            if isinstance(target, ast.Name):
                names[target.id] = value if simple or value.isidentifier() else f"({value})"
            elif isinstance(target, (ast.Tuple, ast.List)):
                for k, each in enumerate(target.elts):
                    if isinstance(each, ast.Name):
                        names[each.id] = f"{value}[{k}]"
        text = self._written(self.loss, names, whole)
        if text.startswith("(") and text.endswith(")") and _is_balanced(text[1:-1]):
            text = text[1:-1]
        return _parsed(text), text

    def _written(self, node: ast.expr, names: dict[str, str], whole: dict[int, str]) -> str:
        """The text of an expression on one line.

        Raises:
            _Unclear: it has a comment, or white space in a string.
        """
        nodes: dict[ast.AST, str] = {
            each: whole[id(each)] for each in ast.walk(node) if id(each) in whole
        }
        raw = self.source.replaced(node, names, nodes)
        text = " ".join(raw.split())
        if raw != text:
            text = text.replace("( ", "(").replace(", )", ")").replace(" )", ")")
        if not _is_balanced(text) or ast.dump(_parsed(text)) != ast.dump(_parsed(f"({raw}\n)")):
            raise _Unclear("the loss has a text that cannot be put on one line")
        return text

    def _is_own_loss(self, expression: ast.expr) -> bool:
        """Whether the loss is a part of the model's result, perhaps scaled."""
        while isinstance(expression, ast.BinOp) and isinstance(expression.op, (ast.Div, ast.Mult)):
            if self._placeholder() in loaded(expression.right):
                return False
            expression = expression.left
        while isinstance(expression, (ast.Attribute, ast.Subscript)):
            expression = expression.value
        return isinstance(expression, ast.Name) and expression.id == self._placeholder()

    # -- whether train_step means the same ----------------------------------------------------

    def _one_call(self) -> tuple[OneCall, bool]:
        if len(self.calls) > 1:
            raise _Unclear("the loss comes from several calls of the model")
        given = self.backward.value
        assert isinstance(given, ast.Call)
        if given.args or any(not _is_false(each.value) for each in given.keywords):
            raise _Unclear("backward() has arguments")
        if any(len(assign.targets) > 1 for assign in self.chain):
            raise _Unclear("a result gets several names")
        if {k.arg for k in self.call.keywords} & _OWN_NAMES:
            raise _Unclear("an argument of the model has the name of one of train_step")
        if any(not self.source.is_alone(each) for each in (*self.chain, self.backward)):
            raise _Unclear("several statements share a line")
        expression, text = self._expression()
        self._check_no_other_model(expression)
        is_own = self._is_own_loss(expression)
        reduction = "mean" if is_own else self._reduction(expression)
        target, loss_fn = self._loss_fn(expression, text)
        loss = self._loss_name()
        self._check_uses(loss)
        replaced = self._place()
        removed = tuple(s for s in (*self.chain, self.backward) if s is not replaced)
        return OneCall(loss, target, loss_fn, reduction, replaced, removed), is_own

    def _loss_name(self) -> str:
        if isinstance(self.loss, ast.Name):
            return self.loss.id
        if any(name in stored(*self.chain) for name in loaded(self.loss)) and self.chain:
            last = self.chain[-1].targets[0]
            if isinstance(last, ast.Name) and last.id != self._placeholder():
                raise _Unclear("what goes backward is not what has the name of the loss")
        return ""

    def _reduction(self, expression: ast.expr) -> Literal["mean", "sum"]:
        """Whether a loss is the mean of its rows, or their sum.

        Raises:
            _Unclear: it is not known to be either.
        """
        while isinstance(expression, ast.BinOp) and isinstance(expression.op, (ast.Div, ast.Mult)):
            if self._placeholder() in loaded(expression.right):
                raise _Unclear("the loss is not a function of torch that is a mean over rows")
            expression = expression.left
        if not isinstance(expression, ast.Call):
            raise _Unclear("the loss is not one function of torch")
        name, options = self.variables.full(expression.func), expression.keywords
        called = expression.func
        if isinstance(called, ast.Name) and not self.variables.is_imported(called.id):
            made = self._made(called.id)
            if made is None or made.args:
                raise _Unclear(f"whether {name} is a mean over rows cannot be seen")
            name, options = self.variables.full(made.func), [*options, *made.keywords]
        if not name.startswith("torch.nn") or name.split(".")[-1] not in _MEANS:
            raise _Unclear(f"whether {name or 'the loss'} is a mean over rows cannot be seen")
        reduction: object = "mean"
        for each in options:
            if each.arg == "reduction" and isinstance(each.value, ast.Constant):
                reduction = each.value.value
            elif each.arg not in _HARMLESS:
                raise _Unclear(f"{name} with {each.arg}= is not a plain mean over rows")
        if reduction not in ("mean", "sum") or len(expression.args) != 2:
            raise _Unclear(f"this use of {name} is not a plain mean over rows")
        return "sum" if reduction == "sum" else "mean"

    def _check_no_other_model(self, expression: ast.expr) -> None:
        others = self.variables.models()
        for each in ast.walk(expression):
            if isinstance(each, ast.Call) and isinstance(each.func, ast.Name):
                own = self.variables.lookup(self.source.scope(self.backward), each.func.id)
                if any(self.variables.are_same(own, other) for other in others):
                    raise _Unclear(f"the loss calls {each.func.id}, which is another model")

    def _made(self, name: str) -> ast.Call | None:
        """The only call that makes the object of a name, `nn.MSELoss()`; `None` if none is."""
        variable = self.variables.lookup(self.source.scope(self.backward), name)
        found = [
            each.argument
            for each in self.variables.passed
            if not isinstance(each.argument, ast.Name)
            and self.variables.are_same(Variable(each.function, each.parameter), variable)
        ]
        scope = variable.scope
        if not isinstance(scope, ast.Module) and not found:
            plain = [*scope.args.posonlyargs, *scope.args.args]
            pairs = zip(plain[::-1], scope.args.defaults[::-1], strict=False)
            found += [value for arg, value in pairs if arg.arg == name]
        for node in ast.walk(self.source.tree):
            if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
                continue
            if self.variables.are_same(self.variables.variable(node.targets[0]), variable):
                found.append(node.value)
        made = found[0] if len(found) == 1 else None
        while (moved := receiver(made, "to", "cuda")) is not None:
            made = moved
        return made if isinstance(made, ast.Call) else None

    def _batch_names(self) -> set[str]:
        """The names that change from turn to turn of the loops that the step is in."""
        loops = self.source.loops(self.backward)
        if not loops:
            return stored(*straight(self.source, self.backward))
        target = [loops[0].target] if isinstance(loops[0], ast.For) else []
        return stored(*target, *loops[0].body)

    def _loss_fn(self, expression: ast.expr, text: str) -> tuple[str, str]:
        """The target, and the loss as a function of the model's result and the target."""
        output = self._placeholder()
        from_model = stored(*self.chain)
        changing = (self._batch_names() & loaded(expression)) - {output}
        if self.source.loops(self.backward):
            changing = {name for name in changing if not self._is_number(name)}
        if changing & (from_model - {output}) or any(
            variable in changing for variable in self._models_of(expression)
        ):
            raise _Unclear("the loss uses other parts of the model's result")
        found = _chains(expression, changing)
        chains = {str(ast.get_source_segment(text, each)) for each in found}
        if len(chains) > 1:
            raise _Unclear(f"the loss uses {' and '.join(sorted(chains))}")
        if not chains:
            if output not in loaded(expression):
                raise _Unclear("the loss does not use the model's result")
            if self._is_own_loss(expression):
                return "", f"lambda {output}: {text}"
            return self._without_a_batch(expression, output, text)
        (chain,) = chains
        if chain == output:
            raise _Unclear("the result has the name of the target")
        name = chain if chain.isidentifier() else "target"
        if _is_plain(expression, text, output, chain):
            return chain, _function(expression, text)
        if name == "target" != chain:
            text = Script(text, "the loss").with_nodes(found, name)
        return chain, f"lambda {output}, {name}: {text}"

    def _without_a_batch(self, expression: ast.expr, output: str, text: str) -> tuple[str, str]:
        """The target and the loss function, if the loss uses no name that a loop assigns."""
        names = [
            name
            for argument in getattr(expression, "args", [])[1:]
            for name in loaded(argument)
            if not self.variables.is_imported(name) and name not in stored(*self.chain)
        ]
        if len(names) == 1 and _is_plain(expression, text, output, names[0]):
            return names[0], _function(expression, text)
        raise _Unclear("what the target is cannot be seen")

    def _is_number(self, name: str) -> bool:
        """Whether a name that a loop assigns is the counter of `enumerate`."""
        loop = self.source.loops(self.backward)[0]
        if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Tuple):
            return False
        first = loop.target.elts[0]
        is_counted = isinstance(loop.iter, ast.Call) and dotted(loop.iter.func) == "enumerate"
        return is_counted and isinstance(first, ast.Name) and first.id == name

    def _models_of(self, expression: ast.expr) -> set[str]:
        return {
            each.func.id
            for each in ast.walk(expression)
            if isinstance(each, ast.Call)
            and isinstance(each.func, ast.Name)
            and each.func.id == dotted(self.call.func)
        }

    def _check_uses(self, loss: str) -> None:
        """Raise if the model's result is used elsewhere than in the loss."""
        for name in sorted(stored(*self.chain)):
            own = {*map(id, self.chain), id(self.backward)}
            for node in self.source.walk(self.source.scope(self.backward)):
                if not (isinstance(node, ast.Name) and node.id == name):
                    continue
                statement = self.source.statement(node)
                if not isinstance(node.ctx, ast.Load) or id(statement) in own:
                    continue
                if self._is_other(node, name):
                    continue
                if name != loss:
                    raise _Unclear(f"line {node.lineno} uses {name}, too")
                if self._is_between(statement) or self._goes_backward(node):
                    raise _Unclear(f"line {node.lineno} uses {name} before its backward")

    def _goes_backward(self, name: ast.Name) -> bool:
        above = self.source.parent(name)
        return isinstance(above, ast.Attribute) and above.attr in ("backward", "grad_fn")

    def _is_other(self, node: ast.Name, name: str) -> bool:
        """Whether a name has another value here: it is assigned before, and not by the step."""
        statement = self.source.statement(node)
        before = straight(self.source, statement)
        own = {id(each) for each in self.chain}
        inside = [any(id(each) in own for each in ast.walk(one)) for one in before]
        return not any(inside) and any(name in stored(each) for each in before)

    def _is_between(self, statement: ast.stmt) -> bool:
        if not self.chain:
            return False
        return self.chain[0].lineno < statement.lineno < self.backward.lineno

    def _place(self) -> ast.stmt:
        """The statement in whose place forward and backward can run together.

        Raises:
            _Unclear: there is none.
        """
        if not self.chain:
            return self.backward
        first, last = self.chain[0], self.chain[-1]
        before = straight(self.source, self.backward)
        if any(not any(each is one for one in before) for each in self.chain):
            raise _Unclear("forward and backward are in different branches")
        start = next(k for k, each in enumerate(before) if each is first)
        between = [s for s in before[start:] if not any(s is each for each in self.chain)]
        needs = loaded(self.call, self.loss, *self.chain)
        changed = stored(*between) & needs
        texts = [self.source.of(each) for each in between]
        model = dotted(self.call.func)
        if any(f"{model}." in text and "zero_grad" not in text for text in texts):
            raise _Unclear("the model is used between forward and backward")
        if any(isinstance(each, LOOPS) for each in between):
            raise _Unclear("there is a loop between forward and backward")
        gradients = any(word in text for text in texts for word in _GRADIENTS)
        blocks = {id(self.source.parent(each)) for each in self.chain}
        if not between and len(blocks) == 1:
            return last
        here = id(self.source.parent(self.backward))
        if not changed and blocks == {here}:
            return self.backward
        if gradients:
            raise _Unclear("gradients are used between forward and backward")
        if len(blocks) > 1:
            raise _Unclear("forward and loss are in different blocks")
        after = before[next(k for k, each in enumerate(before) if each is last) :]
        later = stored(*(each for each in between if each in after)) & needs
        if changed != later:
            raise _Unclear(f"{', '.join(sorted(changed))} changes between forward and loss")
        return last


def _chains(node: ast.AST, names: set[str]) -> list[ast.expr]:
    """The longest expressions like `batch["labels"]` that begin with one of the names."""
    found: list[ast.expr] = []

    def visit(each: ast.AST, is_called: bool) -> None:
        root, parts = each, 0
        while isinstance(root, (ast.Attribute, ast.Subscript)) and not (is_called and root is each):
            if isinstance(root, ast.Subscript) and not isinstance(root.slice, ast.Constant):
                break
            root, parts = root.value, parts + 1
        is_known = isinstance(root, ast.Name) and root.id in names
        if (
            is_known
            and isinstance(each, ast.expr)
            and not (is_called and isinstance(each, ast.Attribute))
        ):
            found.append(each)
            return
        for field in ast.iter_child_nodes(each):
            visit(field, isinstance(each, ast.Call) and field is each.func)

    visit(node, False)
    return found


def _is_plain(expression: ast.expr, text: str, output: str, target: str) -> bool:
    """Whether an expression, of this text, is `loss_fn(output, target)`."""
    return (
        isinstance(expression, ast.Call)
        and not expression.keywords
        and [ast.get_source_segment(text, each) for each in expression.args] == [output, target]
    )


def _function(expression: ast.expr, text: str) -> str:
    """`loss_fn` of `loss_fn(output, target)`."""
    return str(ast.get_source_segment(text, getattr(expression, "func", expression)))


def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not node.value


def _is_balanced(text: str) -> bool:
    """Whether a text is an expression by itself: no bracket in it closes one before it."""
    try:
        ast.parse(text, mode="eval")
    except SyntaxError:
        return False
    return True
