"""Whether a plan still holds, by what steps took."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_fields

from penstock.account.attribution import SLOW, account
from penstock.account.drift import Drift, drift
from penstock.account.suggestions import suggestions
from penstock.bench.attribution import Case
from penstock.plan.decisions import Candidate
from penstock.plan.plan import Plan

EVEN = Case("1f1b", 2, 2, 8, 1, (0.01,) * 2, 0, spread=0.0)


def plan_of(case: Case, **changes: object) -> Plan:
    """Its plan, with what is predicted of it."""
    return replace_fields(case.plan(), predicted_step_seconds=case.seconds, **changes)


def test_a_plan_that_holds() -> None:
    plan = plan_of(EVEN)
    found = drift([account(EVEN.record(), plan)] * 3, plan)
    assert found is not None
    assert found.ratio == pytest.approx(1)
    assert found.calibrated_seconds == pytest.approx(plan.predicted_step_seconds)
    assert not found.is_notable
    assert str(found) == "a step takes 0.27 s, 1.00 times the predicted 0.27 s"
    assert drift([], plan) is None


def test_a_machine_that_is_slower_than_when_it_was_profiled() -> None:
    plan = plan_of(EVEN)
    slow = replace(EVEN, forward=(0.015,) * 2)
    found = drift([account(slow.record(), plan)], plan)
    assert found is not None
    assert found.is_notable
    assert found.machine == pytest.approx(1.5)
    assert "the machine is 1.50 times slower than when it was profiled" in str(found)
    assert "worker" not in str(found)


def test_only_the_latest_steps_count() -> None:
    plan, slow = plan_of(EVEN), replace(EVEN, forward=(0.015,) * 2)
    early, late = account(slow.record(), plan), account(EVEN.record(), plan)
    found = drift([early] * 20 + [late] * 6, plan, 0.3)
    assert found is not None
    assert (found.steps, found.machine) == (6, pytest.approx(1))
    assert found.measured_seconds == 0.3


def test_no_two_workers_are_slower_than_each_other() -> None:
    """In two of four steps the one was slower, in two the other."""
    plan = plan_of(EVEN)
    steps = [replace(EVEN, cause=SLOW, where=k % 2, much=2.0).record() for k in range(4)]
    found = drift([account(step, plan) for step in steps], plan)
    assert found is not None
    assert "slower than the others" not in str(found)


def test_a_worker_that_is_slower_than_the_others() -> None:
    plan = plan_of(EVEN)
    found = drift([account(replace(EVEN, cause=SLOW, where=1, much=2.0).record(), plan)], plan)
    assert found is not None
    assert found.workers == pytest.approx((1, 2))
    assert "machine" not in str(found)
    assert "worker 1 is 2.00 times slower than the others, against the plan" in str(found)


def test_actions_that_cost_more_than_the_profile_says() -> None:
    """Then fewer micro-batches are better than the plan, which were not before."""
    few = Candidate(schedule="1f1b", num_microbatches=2, predicted_step_seconds=0.30, stages=2)
    plan = plan_of(EVEN, considered=(few,))
    record = EVEN.record()
    assert drift([account(record, plan)], plan).better is None  # type: ignore[union-attr]
    late = 80_000_000  # that the pass ends later than all actions: 5 ms for each of 16
    slow = replace_fields(
        record,
        end=record.end + late,
        driver=(record.driver[0]._replace(end=record.end + late),),
    )
    accounts = [account(slow, plan)]
    found = drift(accounts, plan)
    assert found is not None
    assert found.better == few
    assert found.better_seconds == pytest.approx(0.30 + 4 * 0.005, rel=0.01)
    assert "1 replica of 2 stages with 2 micro-batches would take 0.32 s now" in str(found)
    assert "replan() keeps 8 micro-batches: another number" in str(found)
    same = plan_of(EVEN, considered=(replace_fields(few, num_microbatches=8, replicas=2),))
    assert "replan()" not in str(drift([account(slow, same)], same))
    shared = plan_of(EVEN, considered=(replace_fields(few, num_microbatches=4, replicas=2),))
    as_fast = drift([account(slow, shared)], shared)
    assert as_fast is not None
    assert as_fast.better_seconds == found.better_seconds  # each replica runs two of the four
    [best] = [s for s in suggestions([account(slow, shared)], shared) if not s.is_most]
    assert "replicas=2, num_microbatches=4 " in best.what
    [best] = [each for each in suggestions(accounts, plan) if not each.is_most]
    assert "num_microbatches=2" in best.what
    assert best.gain == pytest.approx(1 - 0.32 / 0.35, rel=0.05)


def test_a_faster_plan_is_news_even_if_steps_take_what_was_predicted() -> None:
    few = Candidate(schedule="1f1b", num_microbatches=2, predicted_step_seconds=0.9, stages=2)
    as_predicted = Drift(3, 1.05, 1.0, 1.05, 1.0, (1.0, 1.0))
    assert not as_predicted.has_news
    faster = replace(as_predicted, better=few, better_seconds=0.9, microbatches=2)
    assert (faster.is_notable, faster.has_news) == (False, True)
    assert "with 2 micro-batches would take 0.90 s now" in str(faster)


def test_batches_of_other_sizes_say_nothing_of_the_plan() -> None:
    plan = plan_of(EVEN)
    quick = replace(EVEN, forward=(0.001,) * 2).record()
    small = account(replace_fields(quick, rows=1, as_planned=False), plan)
    assert (small.rows, small.as_planned) == (1, False)
    assert drift([small] * 3, plan) is None
    found = drift([small, small, account(EVEN.record(), plan)], plan)
    assert found is not None
    assert (found.steps, found.ratio) == (1, pytest.approx(1))
    assert all(each.is_most for each in suggestions([small], plan))
