"""A run goes on from a checkpoint with the bits that it would have had, anywhere."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.checkpoint.checkpoint import Checkpoint
from penstock.storage.folder import INDEX
from tests.checkpoint.steps import Run, uninterrupted
from tests.support.models import mlp, uniform_plan
from tests.workers.ranks.steps import X, small
from tests.workers.ranks.test_torchrun import assert_equal

CPUS = {stages: ["cpu"] * stages for stages in (2, 3)}


pytestmark = pytest.mark.usefixtures("pool")


@functools.cache
def expected(steps: int) -> dict[str, Any]:
    """The state after so many steps, computed once."""
    return uninterrupted(steps)


def a_run(workers: str = "threads", stages: int = 2) -> Run:
    return Run(stages, workers=workers, devices=CPUS[stages])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint after three steps, by threads."""
    run = a_run()
    with run.pipe:
        run.go(3)
        run.save(tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("before", "after", "background"),
    [
        (("threads", 2), ("processes", 2), False),
        (("processes", 2), ("threads", 3), True),
        (("threads", 3), ("threads", 2), True),
        (("processes", 2), ("processes", 2), False),
    ],
)
def test_the_bits_of_an_uninterrupted_run(
    tmp_path: Path, before: tuple[str, int], after: tuple[str, int], background: bool
) -> None:
    run = a_run(*before)
    with run.pipe:
        run.go(1)
        with torch.no_grad():
            run.pipe.eval()(X)  # which changes nothing
        run.pipe.train()
        run.go(2)
        save = run.save(tmp_path / "run", background=background)
        run.go(1)  # what the snapshot must not see
        save.wait()
        assert save.done
    shards = {f"model-000001-0000{k}-of-0000{before[1]}.safetensors" for k in range(1, 3)}
    assert shards <= {path.name for path in (tmp_path / "run").iterdir()}
    run = a_run(*after)
    with run.pipe:
        run.go(2)
        run.restore(tmp_path / "run")
        assert all(p.grad is None for p in run.pipe.parameters())
        run.go(3)
        assert_equal("resumed", run.state(), expected(6))


def test_a_checkpoint_of_an_earlier_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the count of batches, and its seed in the state of the generators alone."""
    run = a_run()
    with run.pipe:
        run.go(3)
        run.save(tmp_path / "run")
    pickled = Checkpoint._pickled

    def earlier(self: Checkpoint, name: str) -> Any:
        found = pickled(self, name)
        if name.startswith("training-"):
            del found["random_state"]
        return found

    monkeypatch.setattr(Checkpoint, "_pickled", earlier)
    torch.manual_seed(77)
    run = a_run()
    with run.pipe:
        run.restore(tmp_path / "run")
        run.go(3)
        assert_equal("resumed", run.state(), expected(6))


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step of plain PyTorch."""
    torch.manual_seed(1)
    F.mse_loss(model.eval()(X), X).backward()
    optimizer.step()


def test_plain_pytorch(saved: Path) -> None:
    """By names, by order, and without Penstock."""
    checkpoint = ps.load(saved)
    found = []
    for way in ("restore", "state", "files"):
        model = small()
        weights = [p for n, p in model.named_parameters() if n.endswith(".weight")]
        others = [p for n, p in model.named_parameters() if n.endswith(".bias")]
        if way == "restore":
            weights.reverse()  # names decide, not the order
        optimizer = torch.optim.AdamW([{"params": weights}, {"params": others}])
        if way == "restore":
            data = checkpoint.restore(model, optimizer=optimizer, scheduler=None, generator=None)
            assert data["data"]["losses"] == expected(3)["losses"]
        elif way == "state":
            model.load_state_dict(checkpoint.model_state())
            optimizer.load_state_dict(checkpoint.optimizer_state())
        else:
            state: dict[str, Any] = {}
            for file in sorted(saved.glob("*.safetensors")):
                state |= load_file(file)
            missing, unexpected = model.load_state_dict(state, strict=False)
            assert (missing, unexpected) == (["3.0.weight"], [])  # tied, and there once
            optimizer.load_state_dict(checkpoint.optimizer_state())
        assert_equal(way, dict(model.state_dict()), dict(expected(3)["model"]))
        plain_step(model, optimizer)
        found.append(dict(model.state_dict()))
    assert_equal("a step", found[0], found[1])
    assert_equal("a step", found[2], found[1])


def test_what_is_in_it(saved: Path) -> None:
    checkpoint = ps.load(saved)
    assert checkpoint.names == ("optimizer", "scheduler", "generator", "data")
    assert (checkpoint.batches, checkpoint.number) == (3, 1)
    assert checkpoint.data["data"]["losses"] == expected(3)["losses"]
    assert checkpoint.state("scheduler")["last_epoch"] == 3
    assert checkpoint.plan.num_microbatches == 3
    assert "optimizer: optimizer" in str(checkpoint)
    with pytest.raises(ps.InputError, match=r"no optimizer 'scheduler'; it has optimizer"):
        checkpoint.optimizer_state("scheduler")


def test_weights_of_a_pipeline(saved: Path) -> None:
    with ps.empty_weights():
        model = small()
    program = ps.capture(model, (X,))
    plan = uniform_plan(program, 2, 3)
    options: dict[str, Any] = {"devices": CPUS[2], "plan": plan, "weights": saved}
    with ps.Pipeline(model, (X,), program=program, **options, replicas=1) as pipe:
        for name, value in pipe.state_dict().items():
            if "running" not in name and "num_batches" not in name:  # buffers were there already
                assert torch.equal(value, expected(3)["model"][name]), name


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_a_plain_optimizer_of_the_driver(tmp_path: Path, workers: str) -> None:
    found = []
    for interrupted in (False, True):
        program = ps.capture(model := small(), (X,))
        plan = uniform_plan(program, 2, 3)
        with ps.Pipeline(
            model, (X,), program=program, plan=plan, devices=CPUS[2], workers=workers
        ) as pipe:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
            torch.manual_seed(2)
            for k in range(4):
                if interrupted and k == 2:
                    pipe.save(tmp_path, optimizer=optimizer)
                    for _ in range(2):
                        pipe.train_step(X, target=X, loss_fn=F.mse_loss)
                        optimizer.step()
                    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5, momentum=0.9)
                    ps.load(tmp_path).restore(pipe, optimizer=optimizer)
                pipe.train_step(X, target=X, loss_fn=F.mse_loss)
                optimizer.step()
                optimizer.zero_grad()
            found.append((dict(model.state_dict()), optimizer.state_dict()))
    assert_equal("resumed", found[1], found[0])


def test_a_later_save_replaces_the_earlier(saved: Path) -> None:
    (saved / "notes.txt").write_text("mine")
    before = ps.load(saved)
    run = a_run()
    with run.pipe:
        run.go(2)
        run.save(saved)
        first = run.save(saved, background=True)
        second = run.save(saved, background=True)
        assert first.done
    assert second.done
    names = [path.name for path in saved.iterdir()]
    assert "notes.txt" in names
    assert sorted(n for n in names if "00" in n) == sorted(ps.load(saved)._files)
    assert ps.load(saved).number == 4
    assert ps.load(saved).data["data"]["losses"] == expected(2)["losses"]
    with pytest.raises(ps.CheckpointError, match="load it again"):
        before.model_state()


def test_what_modules_and_states_may_have(tmp_path: Path) -> None:
    """States that are no tensors, numbers of numpy, memory that two parameters share."""

    class Counting(nn.Linear):
        seen = 3

        def get_extra_state(self) -> Any:
            return {"seen": self.seen}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state["seen"]

    def build() -> nn.Module:
        model = nn.Sequential(Counting(6, 6), nn.ReLU(), nn.Linear(6, 6))
        model[2].bias.data = model[0].bias.data  # the same memory
        return model

    import numpy as np

    with ps.Pipeline(
        model := build(), (X,), devices=CPUS[2], num_microbatches=2, replicas=1
    ) as pipe:
        model[0].seen = 7
        average = torch.optim.swa_utils.AveragedModel(model)
        pipe.save(tmp_path, average=average, best=np.float64(0.1), none=None)
    other = build()
    with torch.no_grad():
        other[0].weight.zero_()
    averaged = torch.optim.swa_utils.AveragedModel(other)
    assert ps.load(tmp_path).restore(other, average=averaged) == {"best": 0.1, "none": None}
    assert other[0].seen == 7
    assert torch.equal(averaged.module[0].weight, model[0].weight)
    assert_equal("model", other.state_dict()["0.weight"], model.state_dict()["0.weight"])
    assert json.loads((tmp_path / INDEX).read_text())["metadata"]["total_size"] == 4 * 84


def test_another_model(saved: Path) -> None:
    checkpoint = ps.load(saved)
    model = mlp(6, 5, 6)
    before = model[0].weight.clone()
    with pytest.raises(ps.InputError, match=r"another model.*'0.0.weight' is not in the model"):
        checkpoint.restore(model, optimizer=None, scheduler=None, generator=None)
    wider = small()
    wider[1][0] = nn.Linear(6, 7)
    with pytest.raises(ps.InputError, match=r"'1.0.weight' has shape \(6, 6\), in the model \(7,"):
        checkpoint.restore(wider, optimizer=None, scheduler=None, generator=None)
    assert torch.equal(model[0].weight, before)


def test_things_that_do_not_fit(saved: Path) -> None:
    checkpoint, model = ps.load(saved), small()
    zero = [p.detach().zero_() for p in model.parameters()]
    none: dict[str, Any] = {"scheduler": None, "generator": None}
    with pytest.raises(ps.InputError, match=r"also has generator=, which was not given"):
        checkpoint.restore(model)
    with pytest.raises(ps.InputError, match=r"restore scaler= .* not in it. Give gen"):
        checkpoint.restore(model, optimizer=None, scaler=nn.Linear(1, 1), **none)
    with pytest.raises(ps.InputError, match=r"data= .* plain data, which is returned"):
        checkpoint.restore(model, optimizer=None, data={}, **none)
    with pytest.raises(ps.InputError, match=r"groups of 15 parameters, there of \d, \d"):
        checkpoint.restore(model, optimizer=torch.optim.AdamW(model.parameters()), **none)
    weights = [p for n, p in model.named_parameters() if n.endswith(".weight")]
    others = [p for n, p in model.named_parameters() if not n.endswith(".weight")]
    groups = [{"params": weights}, {"params": others}]
    words = "of another class .*: it needs dampening, momentum, nesterov, .* not know amsgrad, bet"
    with pytest.raises(ps.InputError, match=words):
        checkpoint.restore(model, optimizer=torch.optim.SGD(groups, lr=0.1), **none)
    with pytest.raises(ps.InputError, match=r"optimizer= is a Linear, .*state of an optimizer"):
        checkpoint.restore(model, optimizer=nn.Linear(1, 1), **none)
    with pytest.raises(ps.InputError, match="give a Pipeline, or the plain model"):
        checkpoint.restore(model.state_dict(), optimizer=None, **none)  # type: ignore[arg-type]
    assert all(not p.any() for p in zero)  # nothing was changed


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    run = a_run()
    with run.pipe:
        run.go(1)
        with pytest.raises(ps.InputError, match=r"^position= cannot be saved"):
            run.pipe.save(tmp_path / "a", optimizer=run.optimizer, position=iter([1]))
        with pytest.raises(
            ps.InputError, match=r"^kind= cannot be saved.*it has a torch.optim.adam"
        ):
            run.pipe.save(tmp_path / "a", kind=torch.optim.Adam)
        with pytest.raises(ps.InputError, match="other parameters than this model's"):
            run.pipe.save(tmp_path / "a", optimizer=torch.optim.SGD(small().parameters()))
        assert not (tmp_path / "a").exists()
        (tmp_path / "file").write_text("")
        for path in (tmp_path / "file", tmp_path / "file" / "b"):
            with pytest.raises(ps.CheckpointError, match=r"file is a file, and not a folder"):
                run.save(path)
        with pytest.raises(ps.CheckpointError, match="File name too long"):
            run.save(tmp_path / ("a" * 300))
    with pytest.raises(ps.ClosedError):
        run.save(tmp_path / "a")


def test_an_optimizer_of_another_pipeline(tmp_path: Path) -> None:
    run, other = a_run("processes"), a_run("threads")
    with run.pipe, other.pipe:
        run.go(1)
        other.optimizer = run.pipe.optimizer(torch.optim.SGD, lr=0.1)
        other.optimizer.step()
        pipe = ps.Pipeline(run.pipe.model, (X,), devices=CPUS[2], plan=run.pipe.plan)
        with pipe, pytest.raises(ps.InputError, match=r"^optimizer= belongs to another pipeline"):
            pipe.save(tmp_path, optimizer=run.optimizer)
