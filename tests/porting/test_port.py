"""Which steps become `train_step`, which stay as they are, and what is said of it."""

from __future__ import annotations

import ast

import pytest

from penstock.errors import InputError
from penstock.porting import Ported, port
from penstock.porting.uses import SUPPORTED

HEAD = """\
import torch
from torch import nn
from torch.nn import functional as F

model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
mean, total = nn.MSELoss(), 3
each = nn.MSELoss(reduction="none")
summed = nn.MSELoss(reduction="sum")
weighted = nn.CrossEntropyLoss(weight=torch.ones(2))
loader = [(torch.randn(4, 4), torch.randn(4, 2))]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
"""


def body(*lines: str) -> str:
    return HEAD + "".join(f"    {line}\n" for line in lines)


def ported(*lines: str) -> Ported:
    return port(body(*lines))


FORWARD, LOSS = "out = model(x)", "loss = F.mse_loss(out, y)"
BACKWARD, ZERO, STEP = "loss.backward()", "optimizer.zero_grad()", "optimizer.step()"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([FORWARD, LOSS, BACKWARD], "pipe.train_step(x, target=y, loss_fn=F.mse_loss)"),
        ([FORWARD, LOSS, ZERO, BACKWARD], "train_step(x, target=y, loss_fn=F.mse_loss)"),
        (["loss = F.mse_loss(model(x), y)", BACKWARD], "loss_fn=F.mse_loss)"),
        (["F.mse_loss(model(x), y).backward()"], "    pipe.train_step(x, target=y"),
        ([FORWARD, "loss = summed(out, y)", BACKWARD], "loss_fn=summed, weight=None)"),
        (
            [FORWARD, "loss = F.mse_loss(out.view(-1), y.view(-1)) / total", BACKWARD],
            "loss_fn=lambda out, y: F.mse_loss(out.view(-1), y.view(-1)) / total",
        ),
        (["loss = model(x)[0]", BACKWARD], "pipe.train_step(x, loss_fn=lambda output: output[0])"),
        (
            ["hidden, loss = model(x, mask=y)", BACKWARD],
            "pipe.train_step(x, mask=y, loss_fn=lambda output: output[1])",
        ),
        ([FORWARD, LOSS, "loss.backward(retain_graph=False)"], "train_step"),
        (
            [
                "z = x * 2",
                "out = model(",
                "    z,  # the doubled input",
                ")",
                "loss = F.mse_loss(",
                "    out,",
                "    y,",
                ")",
                BACKWARD,
            ],
            "train_step(z, target=y, loss_fn=F.mse_loss)",
        ),
    ],
)
def test_steps_that_surely_mean_the_same(lines: list[str], expected: str) -> None:
    found = ported(*lines, STEP)
    assert found.style == "train_step"
    assert expected in found.text
    assert ".backward(" not in found.text
    assert "optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)" in found.text


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([FORWARD, LOSS, BACKWARD, "print(out.mean())"], "uses out"),
        ([FORWARD, "p = out.argmax(1)", LOSS, BACKWARD], "uses out"),
        ([FORWARD, LOSS, "if loss > 3: continue", BACKWARD], "uses loss before"),
        ([FORWARD, "loss = weighted(out, y)", BACKWARD], "weight="),
        ([FORWARD, "loss = each(out, y)", BACKWARD], "not a plain mean"),
        ([FORWARD, "loss = F.cross_entropy(out, y, ignore_index=0)", BACKWARD], "ignore_index"),
        ([FORWARD, "loss = contrastive(out, y)", BACKWARD], "contrastive"),
        ([FORWARD, "loss = out.mean()", BACKWARD], "mean over rows"),
        ([FORWARD, "loss = mean(out, y) + penalty(model)", BACKWARD], "not one function"),
        ([FORWARD, LOSS, "loss.backward(retain_graph=True)"], "arguments"),
        (["loss = F.mse_loss(model(x), model(y))", BACKWARD], "several calls"),
        ([FORWARD, LOSS, "x, y = more()", ZERO, BACKWARD], "gradients are used"),
        ([FORWARD, LOSS, "model.eval()", BACKWARD], "the model is used"),
        ([FORWARD, "loss = F.mse_loss(out, out)", BACKWARD], "what the target is"),
        (["loss = F.mse_loss(model(x), x * y)", BACKWARD], "uses"),
        ([FORWARD, "loss = F.mse_loss(out, y)", "(loss / 2).backward()"], "goes backward"),
        (["out = model(x); " + LOSS, BACKWARD], "share a line"),
        (["out = hidden = model(x)", LOSS, BACKWARD], "several names"),
        (["loss = F.mse_loss(model(x, target=y), y)", BACKWARD], "name of one of train_step"),
    ],
)
def test_steps_that_may_not(lines: list[str], why: str) -> None:
    """They stay as they are, but for the call of the model."""
    before = body(*lines, STEP)
    found = port(before)
    assert found.style == "call"
    assert "train_step" not in found.text
    assert "pipe(x" in found.text
    assert ".backward(" in found.text
    kept = before.replace("model(x", "pipe(x").replace("model(y)", "pipe(y)")
    assert set(kept.splitlines()[12:]) <= set(found.text.splitlines())
    assert why in next(note.text for note in found.notes if "backward() stays" in note.text)


def test_what_uses_the_result_in_another_branch_keeps_it() -> None:
    found = ported(
        "if total:", f"    {FORWARD}", f"    {LOSS}", f"    {BACKWARD}", "print(out.shape)", STEP
    )
    assert found.style == "call"


def test_results_of_the_same_name_in_other_loops_are_no_use_of_it() -> None:
    lines = body(FORWARD, LOSS, BACKWARD, STEP)
    found = port(lines + "for x, y in other:\n    out = model(x)\n    print(out)\n")
    assert found.style == "train_step"
    assert "    out = pipe(x)\n    print(out)\n" in found.text


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("loader = iter(stream)\n", "iterator"),
        ("loader = (b for b in stream)\n", "generator"),
        ("loader = torch.utils.data.DataLoader(d, generator=g)\n", "random generator"),
        ("def stream():\n    yield 1\nloader = stream()\n", "generator"),
    ],
)
def test_batches_that_cannot_be_read_twice(source: str, why: str) -> None:
    """The pipeline is built with the first one, in the loop."""
    lines = body(FORWARD, LOSS, BACKWARD, STEP).replace("for x", f"{source}for x")
    lines = lines.replace("loader = [(torch.randn(4, 4), torch.randn(4, 2))]\n", "")
    found = port(lines)
    assert "fork_rng" not in found.text
    assert "pipe = None\nfor x, y in loader:\n    if pipe is None:\n        pipe = " in found.text
    assert any(why in note.text for note in found.notes)


def test_names_that_are_taken() -> None:
    found = port("ps = pipe = 1\n" + body(FORWARD, LOSS, BACKWARD))
    assert "import penstock\n" in found.text
    assert "pipeline = penstock.Pipeline(model, (x,))" in found.text


def test_names_of_the_example_that_mean_something_else_where_the_model_is_made() -> None:
    function, _, _ = HEAD.partition("for x, y in loader:\n")
    step = f"        {FORWARD}\n        {LOSS}\n        {BACKWARD}\n"
    train = f"def train(model, data):\n    for x, y in data:\n{step}\n"
    found = port(f"{train}{function}x = 'mine'\ntrain(model, loader)\nprint(x)\n")
    assert "    example_x, y = next(iter(loader))\n" in found.text
    assert "ps.Pipeline(model, (example_x,))" in found.text


def test_a_loss_that_is_imported_by_its_own_name() -> None:
    head = HEAD.replace("as F", "as F\nfrom torch.nn.functional import mse_loss")
    found = port(head + f"    {FORWARD}\n    loss = mse_loss(out, y)\n    {BACKWARD}\n")
    assert "pipe.train_step(x, target=y, loss_fn=mse_loss)" in found.text


def test_the_pipeline_is_given_the_name_that_the_model_got_last() -> None:
    script = HEAD.replace(
        "mean, total", 'if 1 > 2:\n    other = model.cuda()\nnet = model.to("cpu")\nmean, total'
    )
    script = script.replace("model.parameters", "net.parameters")
    found = port(script + f"    out = net(x)\n    {LOSS}\n    {BACKWARD}\n")
    assert "ps.Pipeline(net, " in found.text


def test_wrappers_go_with_the_condition_around_them() -> None:
    lines = HEAD.replace(
        "mean, total",
        "if torch.cuda.device_count() > 1:\n"
        "    print('several')\n"
        "    model = nn.DataParallel(model)\n"
        "mean, total",
    )
    found = port(lines + f"    {FORWARD}\n    {LOSS}\n    {BACKWARD}\n    model.module.train()\n")
    assert "DataParallel" not in found.text
    assert "several" not in found.text
    assert "    model.train()" in found.text


def test_annotated_assignments_are_assignments() -> None:
    text = body("out: torch.Tensor = model(x)", "loss: torch.Tensor = F.mse_loss(out, y)", BACKWARD)
    found = port(text.replace("model = ", "model: nn.Module = "))
    assert "model: nn.Module = nn.Sequential" in found.text
    assert "    loss = pipe.train_step(x, target=y, loss_fn=F.mse_loss)\n" in found.text


def test_a_line_that_has_no_room_for_the_pipeline() -> None:
    lines = body(FORWARD, LOSS, BACKWARD, STEP)
    with pytest.raises(InputError, match=r":11: .* a line of its own"):
        port(lines.replace("optimizer = ", "seed = 1; optimizer = "))
    ast.parse(port(lines.replace("optimizer = ", "if total: optimizer = ")).text)


def test_all_ranks_have_the_weights_before_one_saves_them() -> None:
    lines = "from torch import distributed\ndistributed.init_process_group()\n" + body(
        FORWARD, LOSS, BACKWARD, STEP, "if rank == 0:", "    torch.save(model.state_dict(), 'f')"
    )
    found = port(lines + "state = model.state_dict()\n")
    assert 'workers="torchrun"' in found.text
    assert (
        "\n    pipe.fetch()  # all ranks bring their models up to date\n    if rank" in found.text
    )
    assert "torch.save(model.state_dict(), 'f')" in found.text
    assert "\nstate = pipe.state_dict()\n" in found.text


def test_functions_that_need_the_model_itself_get_it() -> None:
    lines = body(FORWARD, LOSS, BACKWARD, "show(model)", "check(model)", "torch.save(model, 'f')")
    functions = (
        "def show(m):\n    print(m.training, m(1))\n\ndef check(m):\n    return m.generate(1)\n\n"
    )
    found = port(functions + lines)
    assert "show(pipe)" in found.text
    assert "check(model)" in found.text
    assert "torch.save(model, 'f')" in found.text
    left = [note.text for note in found.notes if note.kind == "left"]
    assert any("check()" in text for text in left)
    assert any("torch.save()" in text for text in left)


def test_a_pipeline_has_what_functions_use_of_it() -> None:
    import penstock as ps

    assert set(dir(ps.Pipeline)) >= SUPPORTED


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "from torch import nn\nclass T:\n  def f(self, x):\n    self.model(x).backward()\n",
            "line 4",
        ),
        ("from lightning import Trainer\nTrainer().fit(m)\n", "Lightning"),
        ("def f(model, x):\n    model.train()\n    model(x).sum().backward()\n", "not in this"),
        (
            "def go(m, b):\n    m.train()\n    m(b).sum().backward()\n"
            "m = make()\n[go(m, b) for b in data]\n",
            "where b comes from",
        ),
    ],
)
def test_what_is_not_recognised(script: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        port(script)


def test_every_change_can_be_parsed_and_is_noted() -> None:
    found = ported(FORWARD, LOSS, BACKWARD, STEP)
    ast.parse(found.text)
    lines = body(FORWARD, LOSS, BACKWARD, STEP).splitlines()
    assert all(1 <= note.line <= len(lines) for note in found.notes)
    assert [note.line for note in found.notes] == sorted(note.line for note in found.notes)
