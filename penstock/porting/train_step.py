"""The steps of a script as calls of `train_step`, and those that stay as they are."""

from __future__ import annotations

import re

from penstock.porting.building import Built
from penstock.porting.changes import Changes
from penstock.porting.training import OneCall, Step

_ROWS = re.compile(r"SequenceClassification|ImageClassification|MultipleChoice")
_COUNTS = {  # how many labels count, by the class of a model that returns its own loss
    re.compile(r"CausalLM|LMHeadModel"): "(labels[:, 1:] != -100).sum()",
    re.compile(
        r"MaskedLM|TokenClassification|ConditionalGeneration|Seq2SeqLM"
    ): "(labels != -100).sum()",
}


def change_step(step: Step, built: Built, changes: Changes) -> None:
    """Let the pipeline do a step."""
    one = built.one_call(step)
    if one is None:
        _note_stays(step, built, changes)
        return
    target, loss_fn, weight = one.target, one.loss_fn, ""
    if one.reduction == "sum":
        weight = "None"
    elif step.is_own_loss:
        target, loss_fn, weight = _own_loss(step, one, built, changes)
    source = changes.source
    parts = [*map(source.of, step.call.args), *map(source.keyword, step.call.keywords)]
    parts += [f"target={target}"] if target else []
    parts.append(f"loss_fn={loss_fn}")
    parts += [f"weight={weight}"] if weight else []
    parts += [f"scaler={step.scaler}"] if step.scaler else []
    assigned = f"{one.loss} = " if one.loss else ""
    function = f"{assigned}{built.name_for(step.call.func)}.train_step"
    changes.rewrite(one.replaced, changes.call(function, parts, source.indent(one.replaced)))
    for statement in one.removed:
        changes.remove(statement)
    changes.note(one.replaced, "changed", "train_step runs forward, loss and backward")


def _note_stays(step: Step, built: Built, changes: Changes) -> None:
    name = built.name_for(step.call.func)
    why = step.why_not or "the gradient scaler is created before the pipeline"
    changes.note(step.call, "changed", f"{name}(...) takes the place of the model")
    changes.note(
        step.backward,
        "left",
        f"backward() stays, because {why}. {name}.train_step(..., loss_fn=...) would hold "
        "fewer activations, if the loss is a mean over rows",
    )
    if step.is_own_loss:
        changes.note(
            step.call,
            "check",
            "the model returns its own loss, of which micro-batches have one each: build "
            "the pipeline with num_microbatches=1, or use train_step (docs/results.md)",
        )
    if re.search(r"\.cuda\(|cuda|\.to\(", changes.source.text):
        changes.note(
            step.call,
            "check",
            "on several GPUs the result is on the last stage's device: move the target there "
            "before the loss, y.to(out.device)",
        )


def _own_loss(step: Step, one: OneCall, built: Built, changes: Changes) -> tuple[str, str, str]:
    """The target, loss and weight of a model that returns its own loss."""
    source, call = changes.source, step.call
    kinds = " ".join(source.of(each.value) for each in built.model.created)
    if _ROWS.search(kinds):
        return "", one.loss_fn, ""
    labels = next((source.of(k.value) for k in call.keywords if k.arg == "labels"), "")
    whole = [source.of(k.value) for k in call.keywords if k.arg is None]
    if not labels and len(whole) == 1 and not call.args:
        labels = f'{whole[0]}["labels"]'
    count = next((count for kind, count in _COUNTS.items() if kind.search(kinds)), "")
    if count and labels:
        output, body = one.loss_fn.removeprefix("lambda ").split(": ", 1)
        changes.note(call, "check", "the model's loss is weighted by the labels that are not -100")
        return labels, f"lambda {output}, labels: {body}", f"lambda labels: {count}"
    changes.note(
        call,
        "check",
        "the model's own loss is taken for a mean over rows; if it is one over fewer entries, "
        "such as labels that are not -100, add weight= (README, Losses and metrics)",
    )
    return "", one.loss_fn, ""
