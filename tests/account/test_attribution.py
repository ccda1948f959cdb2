"""Where the time of a step went: parts add up, and what was wrong is found."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
import torch
from msgspec.structs import replace as replace_fields
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.account.attribution import (
    BETWEEN,
    DATA,
    FILL,
    IMBALANCE,
    LINK,
    OUTSIDE,
    SLOW,
    UNEVEN,
    WAITING,
    WORKING,
    Account,
    account,
)
from penstock.account.doing import Doing
from penstock.account.record import PASS, Interval, partition, shortened
from penstock.account.suggestions import suggestions
from penstock.bench.attribution import Case, case, is_found, judged
from penstock.observe.report import report_text

EVEN = Case("1f1b", 4, 4, 12, 1, (0.01,) * 4, 0, spread=0.0)


def parts_add_up(found: Account) -> None:
    for own in found.workers:
        assert set(own) <= {*WORKING, *WAITING, *BETWEEN}
        assert min(own.values()) >= 0
        assert sum(own.values()) == pytest.approx(found.seconds, rel=1e-9)


def of(wrong: Case) -> Account:
    found = account(wrong.record(), wrong.plan())
    parts_add_up(found)
    return found


def test_a_pipeline_that_fills_and_drains() -> None:
    """As Huang et al. 2019 have it: p - 1 of the m + p - 1 times that a micro-batch takes."""
    found = of(EVEN)
    for own in found.workers:
        assert own[FILL] == pytest.approx(3 * 0.03)
        assert own["forward"] == pytest.approx(12 * 0.01)
        assert own["backward"] == pytest.approx(12 * 0.02)
        assert sum(own[name] for name in WAITING) == pytest.approx(own[FILL])
    assert found.losses[0].cause == FILL
    assert found.losses[0].seconds == pytest.approx(3 * 0.03)


def test_a_slow_worker_keeps_the_others_waiting() -> None:
    found = of(replace(EVEN, cause=SLOW, where=2, much=2.0))
    assert found.speed == pytest.approx((1, 1, 2, 1))
    assert found.normal == pytest.approx(1)
    for worker in (0, 1, 3):
        assert found.workers[worker][SLOW] > 0.25
        assert found.waited_for[worker][2] > 0.15  # also through worker 1, which waits itself
    assert found.workers[2].get(SLOW, 0) == pytest.approx(0)
    assert (found.losses[0].cause, found.losses[0].worker) == (SLOW, 2)


def test_a_slow_machine_is_no_slow_worker() -> None:
    slow = replace(EVEN, forward=(0.02,) * 4)
    found = account(slow.record(), EVEN.plan())
    parts_add_up(found)
    assert found.normal == pytest.approx(2)
    assert all(own[SLOW] == pytest.approx(0) for own in found.workers)


def test_a_slow_link() -> None:
    found = of(replace(EVEN, cause=LINK, where=1, much=0.05))
    assert (found.losses[0].cause, found.losses[0].stage) == (LINK, 1)
    assert found.waited_for[2][-1] > 0.05


def test_one_micro_batch_that_takes_long() -> None:
    """One of the last stage; everybody is late from then on."""
    record = EVEN.record()
    last = record.logs[3]
    begun = next(when for when, code in last if code >> 22 == 5 and not code & 2)
    logs = {
        worker: [(when + 200_000_000 * (when > begun), code) for when, code in log]
        for worker, log in record.logs.items()
    }
    end = max(log[-1][0] for log in logs.values())
    driver = (record.driver[0]._replace(end=end),)
    found = account(replace_fields(record, logs=logs, end=end, driver=driver), EVEN.plan())
    parts_add_up(found)
    assert found.losses[0].cause == UNEVEN
    assert found.losses[0].seconds == pytest.approx(0.2, rel=0.01)


def test_data_that_come_late() -> None:
    found = of(replace(EVEN, cause=DATA, much=0.5))
    assert all(own[DATA] == pytest.approx(0.5) for own in found.workers)
    assert (found.losses[0].cause, found.losses[0].seconds) == (DATA, pytest.approx(0.5))


def test_a_stage_that_is_planned_to_be_long() -> None:
    found = of(replace(EVEN, cause=IMBALANCE, where=1, much=2.0))
    assert (found.losses[0].cause, found.losses[0].stage) == (IMBALANCE, 1)
    named = [each.what for each in suggestions([found], EVEN.plan())]
    assert "stage 1 (layer1 … layer1)" in named[0]


@pytest.mark.parametrize("read", [1e-4, 2e-3])
def test_reading_values_that_are_there_is_no_slow_link(read: float) -> None:
    """The first stage sends faster than the second one works: values lie there, and are read."""
    case = replace(EVEN, cause=IMBALANCE, where=1, much=2.0, read=read)
    found = of(case)
    assert (found.losses[0].cause, found.losses[0].stage) == (IMBALANCE, 1)
    plain = of(replace(case, read=0.0))
    assert found.losses[0].seconds == pytest.approx(plain.losses[0].seconds, rel=0.15)
    link = next(loss.seconds for loss in found.losses if loss.cause == LINK)
    assert link < 0.1 * found.losses[0].seconds + 30 * read


def test_random_pipelines_with_one_thing_wrong() -> None:
    score = judged(60, seed=1)
    assert len(score.missed) <= 1
    assert score.most_apart < 1e-9


@pytest.mark.slow
def test_a_thousand_pipelines_with_one_thing_wrong() -> None:
    score = judged(1000, seed=2)
    assert len(score.missed) <= 10


def test_something_else_that_is_named_is_not_found() -> None:
    """So the test above can fail."""
    wrong = next(c for k in range(99) if (c := case(Random(k))).cause == LINK)
    found = account(wrong.record(), wrong.plan())
    assert is_found(wrong, found)
    assert not is_found(replace(wrong, cause=DATA), found)
    assert not is_found(replace(wrong, where=wrong.where + 1), found)


def test_the_innermost_counts() -> None:
    inner, outer = Interval("pass", 2, 5), Interval("call", 1, 7)
    assert list(partition([inner, outer], 0, 8)) == [
        ("", 0, 1),
        ("call", 1, 2),
        ("pass", 2, 5),
        ("call", 5, 7),
        ("", 7, 8),
    ]


def test_a_pass_counts_whatever_else_is_done_meanwhile() -> None:
    """Parts add up even if another thread loads data, or passes are said to overlap."""
    record = EVEN.record()
    begin, end = record.begin, record.end
    middle, quarter = (begin + end) // 2, (end - begin) // 4
    driver = (
        *record.driver,
        Interval(DATA, middle - quarter, middle),
        Interval(DATA, end - 10, end + 10),
        Interval("evaluation", begin - 10, middle),
        Interval(PASS, middle, end),
    )
    found = account(replace_fields(record, driver=driver), EVEN.plan())
    parts_add_up(found)
    assert DATA not in found.workers[0]
    assert found.pass_seconds == pytest.approx(record.seconds)


def test_clocks_that_go_back_take_no_time_twice() -> None:
    record = EVEN.record()
    logs = {
        w: [*log, *((t - 10**6, code) for t, code in log[1:])] for w, log in record.logs.items()
    }
    parts_add_up(account(replace_fields(record, logs=logs), EVEN.plan()))


def sums(intervals: list[Interval], begin: int, end: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for what, start, stop in partition(intervals, begin, end):
        found[what] = found.get(what, 0) + stop - start
    return found


def test_many_things_are_put_together_and_their_sums_stay() -> None:
    drawn = Random(0)
    for _ in range(50):
        at, every = 100, []
        for _ in range(drawn.randrange(60)):
            at += drawn.randrange(4)
            start, at = at, at + drawn.randrange(9)
            if start + 2 < at and drawn.random() < 0.5:
                every.append(Interval("inner", start + 1, at - 1))
            every.append(Interval(drawn.choice(["call", "data", PASS]), start, at))
        few = shortened(every, 100, at + 5)
        assert sums(few, 100, at + 5) == sums(every, 100, at + 5)
        assert {i for i in few if i.what == PASS} <= {*every}
        passes = sum(i.what == PASS for i in few)
        assert len(few) <= passes + 3 * (passes + 1)


def test_a_thread_that_does_much_is_known_in_few_intervals() -> None:
    doing = Doing()
    doing.enter("optimizer")
    for k in range(5000):
        doing.enter("call" if k % 2 else "data")
        doing.exit("call" if k % 2 else "data")
        doing.shorten([])
    assert len(doing.until(time.monotonic_ns())) <= 257
    now = time.monotonic_ns()
    found = sums(doing.until(now), 0, now)
    assert found["call"] > 0
    assert found["data"] > 0
    assert found["optimizer"] > 0


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


X = torch.randn(64, 64)


@pytest.mark.parametrize("workers", ["threads", "processes"])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("plain", [False, True])
def test_real_steps(workers: ps.Kind, replicas: int, plain: bool) -> None:
    """Parts add up, the script's own time is told apart, and all steps have the same shape."""
    with ps.Pipeline(
        Deep(), (X,), devices=["cpu"] * 2, workers=workers, replicas=replicas, num_microbatches=4
    ) as pipe:
        optimizer = pipe.optimizer(torch.optim.AdamW)

        def batches() -> list[torch.Tensor]:
            return [X] * 5

        for x in pipe.loading(batches()):
            optimizer.zero_grad()
            time.sleep(0.02)
            if plain:
                F.mse_loss(pipe(x), x).backward()
            else:
                pipe.train_step(x, target=x, loss_fn=F.mse_loss)
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
        found = pipe.accounts()
    assert len(found) == 3  # the first two are not recorded: caches are cold then
    for each in found:
        parts_add_up(each)
        for own in each.workers:
            assert own[OUTSIDE] > 0.015
            assert own["optimizer"] > 0
            assert own["clipping"] > 0
            assert own[DATA] > 0
            assert own["forward"] > 0
            assert own["backward"] > 0
        assert plain or any(own.get("loss", 0) > 0 for own in each.workers)


def test_a_forward_that_is_recomputed_is_told_apart() -> None:
    with ps.Pipeline(
        Deep(), (X,), devices=["cpu"] * 2, replicas=1, num_microbatches=2, recompute="all"
    ) as pipe:
        for _ in range(4):
            pipe.train_step(X, target=X, loss_fn=F.mse_loss)
        found = pipe.accounts()[-1]
    assert all(own["recomputation"] > 0 for own in found.workers)
    assert any(loss.cause == "recomputation" and loss.seconds > 0 for loss in found.losses)


def test_steps_with_a_pass_that_was_not_recorded_are_not_kept() -> None:
    """And evaluation between steps is not taken for their work."""
    with ps.Pipeline(Deep(), (X,), devices=["cpu"] * 2, replicas=1, num_microbatches=2) as pipe:
        for _ in range(6):
            pipe.train_step(X, target=X, loss_fn=F.mse_loss)
            with torch.no_grad():
                pipe(X)
        found = pipe.accounts()
    assert found
    for each in found:
        parts_add_up(each)
        assert all(own["evaluation"] > 0 for own in each.workers)


def test_a_step_with_an_audit_does_not_stand_for_others() -> None:
    """Another one is recorded instead, as soon as there is one without."""
    with ps.Pipeline(
        Deep(), (X,), devices=["cpu"] * 2, replicas=1, num_microbatches=2, audit=2
    ) as pipe:
        for _ in range(11):
            pipe.train_step(X, target=X, loss_fn=F.mse_loss)
        records = pipe.history().records
        assert [record.step for record in records] == [3, 4, 5, 6, 9, 10]
        assert [record.step for record in records if record.is_audited] == [3, 5, 9]
        assert [found.step for found in pipe.accounts()] == [4, 6, 10]


def train(pipe: ps.Pipeline, count: int, x: torch.Tensor = X) -> None:
    for _ in range(count):
        pipe.train_step(x, target=x, loss_fn=F.mse_loss)


def two(**options: object) -> ps.Pipeline:
    given = {"replicas": 1, "num_microbatches": 2, "audit": None, **options}
    return ps.Pipeline(Deep(), (X,), devices=["cpu"] * 2, **given)


def test_audits_of_the_first_steps_push_nothing_out() -> None:
    """By default the first twenty are audited; then one is recorded that is not."""
    with two(audit="auto") as pipe:
        train(pipe, 40)
        records = pipe.history().records
        assert pipe.audit.microbatches >= 20
    assert [record.step for record in records if record.is_audited] == [3, 4, 5, 6, 9, 17]
    assert [record.step for record in records if not record.is_audited][:2] == [21, 33]


def test_steps_are_not_recorded_for_ever_if_each_is_audited() -> None:
    with two(audit=1) as pipe:
        steps = pipe._runner.steps
        recorded = []
        for _ in range(60):
            recorded.append(steps.is_recorded)
            train(pipe, 1)
        assert [record.step for record in pipe.history().records] == [3, 4, 5, 6, 9, 17, 33]
    assert not any(recorded[50:])


@pytest.mark.parametrize("evaluations", [1, 3])
def test_evaluations_do_not_change_which_steps_are_recorded(evaluations: int) -> None:
    with two() as pipe:
        for _ in range(20):
            for _ in range(evaluations):
                pipe.eval_step(X, target=X, loss_fn=F.mse_loss)
            train(pipe, 1)
        assert [record.step for record in pipe.history().records] == [3, 4, 5, 6, 9, 17]


def test_data_that_another_thread_loads_ahead_are_not_waited_for() -> None:
    with two() as pipe:
        stop = threading.Event()

        def slow() -> Iterator[torch.Tensor]:
            while not stop.wait(0.002):
                yield X

        ahead = threading.Thread(target=lambda: [None for _ in pipe.loading(slow())])
        ahead.start()
        train(pipe, 20)
        stop.set()
        ahead.join()
        found = pipe.accounts()
    assert len(found) == 6
    for each in found:
        parts_add_up(each)
        assert DATA not in each.workers[0]


def test_a_long_evaluation_is_known_as_such() -> None:
    with two() as pipe:
        train(pipe, 3)
        begun = time.monotonic()
        for _ in range(400):
            pipe.eval_step(X, target=X, loss_fn=F.mse_loss)
        took = time.monotonic() - begun
        train(pipe, 1)
        record, found = pipe.history().records[-1], pipe.accounts()[-1]
    assert record.step == 4
    parts_add_up(found)
    assert len(record.driver) < 300
    assert found.workers[0]["evaluation"] > 0.3 * took
    assert found.workers[0][OUTSIDE] < 0.3 * took


def test_results_that_are_dropped_are_no_work_of_a_step() -> None:
    """And what workers noted of them does not pile up."""
    with two() as pipe:
        train(pipe, 3)
        steps = pipe._runner.steps
        steps.is_asked = True
        for _ in range(40):
            pipe(X)
        assert sum(len(log) for ran in steps._ran for log in ran.logs.values()) < 100
        kept = pipe(X)
        train(pipe, 1)
        found = pipe.accounts()[-1]
        del kept
    parts_add_up(found)
    assert found.workers[0]["evaluation"] > 20 * found.workers[0]["forward"] / 4


def test_batches_of_a_loader_have_its_length_and_begin_anew() -> None:
    with two() as pipe:
        batches = pipe.loading([X, X, X])
        assert len(batches) == 3
        assert [len([*batches]) for _ in range(2)] == [3, 3]
        with pytest.raises(TypeError, match="no len"):
            len(pipe.loading(iter([X])))
        assert len([*pipe.loading(iter([X, X]))]) == 2


def test_batches_of_another_size_than_planned_are_not_compared() -> None:
    with two() as pipe:
        train(pipe, 8, X[:16])
        assert {found.as_planned for found in pipe.accounts()} == {False}
        status, text = pipe.status(), report_text(pipe.history())
        assert not any("predicted" in line for line in status.headline[1:])
        assert "times the predicted" not in text
        assert "machine is" not in text
        assert "one device alone" not in text.lower()
        assert "batches of other sizes" in text
        assert "The plan was made for a batch of 64 rows" in text
        train(pipe, 9)
        assert pipe.accounts()[-1].as_planned
        assert "times the predicted" in pipe.status().headline[2]
        assert "times the predicted" in report_text(pipe.history())


def test_longer_sequences_are_not_as_planned() -> None:
    model = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 8))
    tokens = torch.zeros(4, 6, dtype=torch.long)
    options = {"num_microbatches": 2, "replicas": 1, "audit": None, "dynamic": {0: {1: "T"}}}
    with ps.Pipeline(model, (tokens,), devices=["cpu"] * 2, **options) as pipe:
        for length in (6, 6, 6, 3):
            pipe.train_step(tokens[:, :length], loss_fn=lambda out: out.mean())
        assert [found.as_planned for found in pipe.accounts()] == [True, False]


def test_an_optimizer_that_fails_is_not_taken_to_go_on() -> None:
    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            if self.fails:
                raise RuntimeError("no")

    with ps.Pipeline(
        Deep(), (X,), devices=["cpu"] * 2, replicas=1, num_microbatches=2, audit=None
    ) as pipe:
        optimizer = Failing(pipe.parameters(), lr=0.1)
        with pytest.raises(RuntimeError, match="no"):
            optimizer.step()
        Failing.fails = False
        for _ in range(4):
            time.sleep(0.05)
            pipe.train_step(X, target=X, loss_fn=F.mse_loss)
            optimizer.step()
        found = pipe.accounts()[-1]
    parts_add_up(found)
    assert found.workers[0][OUTSIDE] > 0.04
    assert found.workers[0]["optimizer"] < found.workers[0][OUTSIDE]
