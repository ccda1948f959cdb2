"""The same script under torchrun: the bits of threads, and an error on every rank if one fails."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.support.training import USES, assert_same, used_plainly
from tests.workers.ranks import scenarios
from tests.workers.ranks.launching import ROOT, Launcher, collected, environment
from tests.workers.ranks.steps import EXACT, LARGER, Found, X, Y, everything


def torchrun(scenario: str, directory: Path, seconds: float = 100) -> list[Any]:
    """What each of two ranks has found that torchrun itself has started."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(ROOT / "tests/workers/ranks/script.py")]
    process = subprocess.run(
        [*command, scenario, str(directory)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return collected(directory, 2)


def assert_equal(name: str, mine: Any, theirs: Any) -> None:
    """Bit for bit."""
    if isinstance(theirs, dict):
        assert mine.keys() == theirs.keys(), name
        for key, value in theirs.items():
            assert_equal(f"{name}, {key}", mine[key], value)
    elif isinstance(theirs, (list, tuple)):
        for k, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert_equal(f"{name}, {k}", a, b)
    elif isinstance(theirs, torch.Tensor):
        assert torch.equal(mine, theirs), name
    else:
        assert mine == theirs, name


@functools.cache
def by_threads(exact: tuple[tuple[str, str], ...]) -> dict[str, Found]:
    """The same by threads, once."""
    return everything({"workers": "threads", "devices": ["cpu"] * 2}, list(exact))


def assert_the_bits_of_threads(ranks: list[dict[str, Found]], exact: Any, link: str) -> None:
    """Every rank has the same losses and states, and between them they have all gradients."""
    for name, expected in by_threads(tuple(exact)).items():
        gradients: dict[str, torch.Tensor] = {}
        for rank, found in enumerate(ranks):
            own = dict(found[name])
            for key in ("gradients", "x"):
                here = {k: v for k, v in own.pop(key, {}).items() if v is not None}
                assert not here.keys() & gradients.keys(), f"{name}: {here.keys()} on both"
                gradients |= here
            for other in own.pop("links", ()):
                assert other == link
            rest = {k: v for k, v in expected.items() if k in own}
            assert len(rest) >= 1
            assert_equal(f"rank {rank}, {name}", own, rest)
        assert_equal(name, gradients, expected["gradients"] | expected.get("x", {}))


def test_the_bits_of_threads(tmp_path: Path) -> None:
    assert_the_bits_of_threads(torchrun("same_bits", tmp_path), EXACT, "shared memory")


def test_the_bits_of_threads_over_a_process_group(launcher: Launcher, tmp_path: Path) -> None:
    found = launcher.run("by_process_group", tmp_path)
    assert_the_bits_of_threads(found, EXACT, "torch.distributed (gloo)")


def test_batches_of_map_do_not_wait_for_those_before(launcher: Launcher, tmp_path: Path) -> None:
    """The first stage begins with a batch while the second is at the one before."""
    first, second = launcher.run("mapped", tmp_path)
    starts = [begun for begun, _ in first[0]]
    ends = [ended for _, ended in second[0]]
    assert len(starts) == len(ends) == 8
    early = [start < end for start, end in zip(starts[1:], ends, strict=False)]
    assert sum(early) >= 5, early
    for found in (first, second):
        _, results, left, again = found
        assert all(torch.equal(r, 4 * k * scenarios.X) for k, r in enumerate(results))
        assert torch.equal(left, results[0])
        assert all(map(torch.equal, again, results))


def test_every_rank_compiles_its_stage(launcher: Launcher, tmp_path: Path) -> None:
    for results, wanted, parts, inference, refused in launcher.run("compiled", tmp_path):
        assert all(torch.equal(result, wanted) for result in results)
        assert (parts, inference) == (1, True)
        assert refused[0] == "InputError"


def test_losses_metrics_hooks_and_clipping(launcher: Launcher, tmp_path: Path) -> None:
    """The bits of plain PyTorch; every rank has the same, and the gradients of its own stages."""
    (found, partial, alone, failed), others = launcher.run("training", tmp_path)
    for name in USES:
        assert_same(joined(found[name], others[0][name]), used_plainly(name))
    assert torch.equal(partial, used_plainly("losses")["losses"][0])
    assert torch.equal(partial, others[1])
    assert alone[0] == "InputError"
    assert "give it there, too" in alone[1]
    assert others[2][0] == ""
    for kind, text, cause, at in (failed, others[3]):
        assert (kind, cause, at) == ("WorkerError", "ZeroDivisionError", (1, 0))
        assert "in the metrics of micro-batch 0" in text


def joined(one: Any, other: Any) -> Any:
    """What two ranks have found: the same, apart from gradients by name, which one or both have."""
    if isinstance(one, dict):
        keys = [*one, *(key for key in other if key not in one)]
        return {k: joined(one.get(k, other.get(k)), other.get(k, one.get(k))) for k in keys}
    if type(one) is list:
        return [joined(a, b) for a, b in zip(one, other, strict=True)]
    assert_same(one, other)
    return one


@pytest.mark.slow
def test_the_bits_of_threads_with_larger_models(tmp_path: Path) -> None:
    found = torchrun("same_bits_of_larger_models", tmp_path, seconds=600)
    assert_the_bits_of_threads(found, LARGER, "shared memory")


def test_failures(launcher: Launcher, tmp_path: Path) -> None:
    """Each is the same error on both ranks, and the next step is clean."""
    ranks = launcher.run("failures", tmp_path)
    (found, loss, mine), (again, same_loss, others) = ranks
    for name in found.keys() - {"late", "exit"}:
        assert found[name][0] == again[name][0], name
        assert found[name][2:] == again[name][2:], name
        texts = [f[name][1].split("In rank")[0].strip() for f in (found, again)]
        assert texts[0] == texts[1] != "", name
    for armed in (0, 1):
        for where in ("forward", "backward"):
            kind, text, cause, (stage, microbatch) = found[f"{where} {armed}"]
            assert (kind, cause, stage, microbatch) == (
                "WorkerError",
                "ZeroDivisionError",
                armed,
                1,
            )
            assert where in text
    assert "_ = 1 / 0" in found["forward 1"][1]  # the traceback comes along
    assert found["loss"][:3:2] == ("WorkerError", "KeyError")
    for name in ("batch", "target", "no inputs", "no loss", "mixed"):
        assert found[name][0] == "InputError", found[name]
    assert "float64" in found["batch"][1]
    assert "the target has shape (3, 6)" in found["target"][1]
    assert "rank 0" in found["no inputs"][1]
    assert "so this rank needs the inputs" in found["no inputs"][1]
    assert "loss_fn=None is not a function" in found["no loss"][1]
    assert "rank 1 is in state_dict and rank 0 in train_step" in found["mixed"][1]
    for name, words in (("modes", "in evaluation mode"), ("gradients", "without gradients")):
        assert words in found[name][1]
        assert "rank 0 is in" in found[name][1]
    assert found["closed"][0] == "ClosedError"
    assert "rank 1 (process" in found["exit"][1]
    assert "which was ended by SystemExit during train_step" in found["exit"][1]
    assert again["exit"][1] == "7"
    assert found["late"][0] == "WorkerTimeout"
    assert "No answer from rank 1 (process" in found["late"][1]
    assert again["late"][0] in ("WorkerDied", "WorkerTimeout")

    with scenarios.trapped(2, workers="threads", devices=["cpu"] * 2) as pipe:
        expected = scenarios.step(pipe)
    assert torch.equal(loss, expected)
    assert torch.equal(same_loss, expected)
    for name, parameter in pipe.named_parameters():
        assert torch.equal((mine | others)[name], parameter.grad), name


@pytest.mark.parametrize(("scenario", "victim"), [("first_killed", 0), ("last_killed", 2)])
def test_a_killed_rank(launcher: Launcher, tmp_path: Path, scenario: str, victim: int) -> None:
    ranks = launcher.run(scenario, tmp_path, ranks=3)
    assert ranks[victim] is None
    for rank, found in enumerate(ranks):
        if rank != victim:
            (kind, text, _, where), after, is_whole = found
            assert not is_whole  # nobody waits for what that rank was to write
            assert kind == "WorkerDied"
            assert f"rank {victim} (process" in text
            assert f"in the backward of micro-batch {where[1]} in stage {victim}" in text
            assert where == (victim, 1)
            assert after[0] == "ClosedError"


@pytest.mark.parametrize(
    ("scenario", "victim"), [("first_stopped", 0), ("last_stopped", 2), ("far_stopped", 1)]
)
def test_a_stopped_rank(launcher: Launcher, tmp_path: Path, scenario: str, victim: int) -> None:
    ranks = launcher.run(scenario, tmp_path, ranks=3)
    for rank, (timeout, (kind, text, _, where), after) in enumerate(ranks):
        assert timeout >= 600  # nothing has waited for that
        if rank == victim:
            assert after[0] in ("WorkerDied", "ClosedError")  # when it goes on
            continue
        assert kind == "WorkerDied"
        assert after[0] == "ClosedError"
        assert f"rank {victim} (process" in text
        assert "is stopped by a signal (such as SIGSTOP)" in text
        is_seen = scenario != "far_stopped"  # as if on another machine, with a board of its own
        assert where == ((victim, 1) if is_seen else (None, None))


def test_a_rank_that_leaves_early(launcher: Launcher, tmp_path: Path) -> None:
    ranks = launcher.run("left_early", tmp_path, ranks=3)
    for found in (ranks[0], ranks[2]):
        kind, text, _, _ = found
        assert kind == "WorkerDied"
        assert "rank 1 (process" in text


def test_another_model_on_one_rank(launcher: Launcher, tmp_path: Path) -> None:
    for kind, text, _, _ in launcher.run("another_model", tmp_path):
        assert kind == "PlanError"
        assert "rank 1 has another model than rank 0" in text


def test_ways_and_weights_that_only_some_ranks_have(launcher: Launcher, tmp_path: Path) -> None:
    ranks = launcher.run("forked", tmp_path)
    assert ranks[0][1] == ranks[1][1]  # the plan
    plan = tmp_path / "plan.json"
    plan.write_bytes(ranks[0][1])
    first, _, second, _ = scenarios.forked(0, workers="threads", devices=["cpu"] * 2, plan=plan)
    found: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    for mine, _, seeded, empty in ranks:
        assert_equal("losses", mine[0], first[0])
        assert mine[2] == first[2]  # what has run, on all ranks
        assert_equal("a seeded loss", seeded[0], second[0])
        assert_equal("a state", seeded[2], second[2])
        assert len(empty) in (2, 4)  # the others' parameters are nowhere but there
        found[0].update(mine[1])
        found[1].update(seeded[1])
    assert_equal("gradients", found[0], first[1])
    assert_equal("seeded gradients", found[1], second[1])


def test_clocks_of_machines_are_compared(launcher: Launcher, tmp_path: Path) -> None:
    """Times of all ranks mean the same to each of them, though one has another clock."""
    ranks = launcher.run("skewed", tmp_path)
    assert ranks[0][1] == 0
    assert abs(ranks[1][1] + 5e9) < 1e8  # half of what a message takes on a busy machine, at most
    for timeline, _, account in ranks:
        assert timeline.seconds < 4
        assert account.seconds < 4
        begun = {event.action: event.start for event in timeline.events}
        for action, start in begun.items():
            if action.stage == 1 and action.kind.value == "F":
                assert start > begun[action._replace(stage=0)] - 0.1
        for own in account.workers:
            assert own["forward"] > 0.1  # of 0.3: the most that clocks are off is not the rest


def plain_attributes() -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Loss and gradients after every change, by a loop over micro-batches."""
    torch.manual_seed(8)
    model, found = scenarios.Warm(), []
    for name, value in scenarios.CHANGES:
        setattr(model, name, value)
        model.zero_grad()
        total = torch.zeros(())
        for x, y in zip(X.tensor_split(2), Y.tensor_split(2), strict=True):
            loss = F.mse_loss(model(x), y) * (len(x) / len(X))
            loss.backward()
            total = total + loss.detach()
        found.append((total, {n: p.grad.clone() for n, p in model.named_parameters()}))  # type: ignore[union-attr]
    return found


def assert_as_plain(ranks: list[Any]) -> None:
    """Every rank has the loss, and between them they have all gradients, after every change."""
    for k, (loss, expected) in enumerate(plain_attributes()):
        gradients: dict[str, torch.Tensor] = {}
        for rank, found in enumerate(ranks):
            _, own, part = found[k]
            assert torch.equal(own, loss), (rank, scenarios.CHANGES[k])
            gradients |= part
        assert_equal(f"after {scenarios.CHANGES[k]}", gradients, expected)


def test_every_rank_writes_its_own_profile(launcher: Launcher, tmp_path: Path) -> None:
    for rank, actions in enumerate(launcher.run("profiled", tmp_path)):
        assert actions is not None
        assert sorted(actions) == [
            f"{what} {k} in stage {rank}" for what in ("backward", "forward") for k in (0, 1)
        ]
        assert (tmp_path / f"{rank}.pftrace").stat().st_size > 0


def test_attributes_that_change_on_one_rank(launcher: Launcher, tmp_path: Path) -> None:
    """An error on both, that leaves no gradients; and when both have changed, the right bits."""
    ranks = launcher.run("attributes", tmp_path)
    for found in ranks:
        for (name, _), (errors, _, _) in zip(scenarios.CHANGES, found, strict=True):
            for (kind, text, _, _), left in errors:
                assert kind == "InputError", (name, text)
                assert "rank with the first stage" in text, (name, text)
                assert "change models on all ranks in the same way" in text, (name, text)
                assert not left
    assert_as_plain(ranks)


def test_attributes_that_change_on_all_ranks(launcher: Launcher, tmp_path: Path) -> None:
    assert_as_plain(launcher.run("attributes_everywhere", tmp_path))
