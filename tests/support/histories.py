"""Histories of runs that nobody ran: their records are made from simulated steps."""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec

from penstock.account.history import About, History, StepTimes
from penstock.account.record import CALL, PASS, Interval, StepRecord
from penstock.board.activity import LOSS, SENDING, code, within
from penstock.board.memory import Log
from penstock.board.runs import Description, Worker
from penstock.board.status import Happened
from penstock.plan.decisions import StagePlan
from penstock.plan.plan import Plan
from penstock.plan.text import prediction
from penstock.schedule import SCHEDULES, Action, Kind, Timeline
from penstock.simulate import Network, simulate

BEGAN = 1_700_000_000.0  # seconds since 1970


@dataclass(frozen=True)
class Made:
    """How a history is made.

    Attributes:
        workers: how many; each has a stage.
        microbatches: of a batch.
        schedule: its name.
        slow: how many times as long as planned the last worker takes.
        model: the class of the model.
        milliseconds: of a forward.
        records: how many steps are recorded.
        seed: of what is random.
    """

    workers: int = 2
    microbatches: int = 4
    schedule: str = "1f1b"
    slow: float = 1.0
    model: str = "Net"
    milliseconds: float = 10.0
    records: int = 3
    seed: int = 0


def plan_of(made: Made) -> Plan:
    """A plan for so many workers, whose first stage is a little longer than the others."""
    forward = 1e-3 * made.milliseconds
    stages = tuple(
        StagePlan(
            worker=number,
            device="cpu",
            calls=(3 * number, 3 * number + 3),
            first=f"layers.{3 * number}",
            last=f"layers.{3 * number + 2}",
            weight_bytes=4_000_000,
            input_bytes=65_536,
            forward_seconds=forward * (1.3 if number == 0 else 1.0),
            backward_seconds=2 * forward * (1.3 if number == 0 else 1.0),
            weight_seconds=forward if SCHEDULES[made.schedule].splits_backward else 0.0,
            held_bytes=2_000_000,
            memory_bytes=16_000_000 + 2_000_000 * (made.workers - number),
            latency_seconds=2e-5 if number else 0.0,
        )
        for number in range(made.workers)
    )
    rough = Plan(
        fingerprint="0123",
        batch_size=2 * made.microbatches,
        num_microbatches=made.microbatches,
        schedule=made.schedule,
        stages=stages,
        predicted_step_seconds=1.0,
        bound_seconds=1.0,
        one_device_seconds=made.microbatches * sum(stage.seconds for stage in stages),
        memory_limit=32_000_000,
        threads=1,
    )
    took = rough.timeline().seconds
    least = made.microbatches * max(stage.seconds for stage in stages) + 2 * forward
    return msgspec.structs.replace(
        rough, predicted_step_seconds=took, bound_seconds=min(took, least)
    )


def logs_of(timeline: Timeline, origin: int) -> dict[int, Log]:
    """What workers would note who do this: waits, then actions with their parts."""
    logs: dict[int, Log] = {worker: [] for worker in range(timeline.num_workers)}
    last = max(event.action.stage for event in timeline.events)
    for worker, log in logs.items():
        now = origin
        for event in sorted((e for e in timeline.events if e.worker == worker), key=lambda e: e[2]):
            start, end = (origin + round(1e9 * t) for t in (event.start, event.end))
            log.append((now, code(event.action, True)))
            started = code(event.action, False)
            log.append((max(now, start), started))
            part = (end - start) // 20
            if event.action.kind is Kind.FORWARD:
                is_last = event.action.stage == last
                log.append((end - part, within(started, LOSS if is_last else SENDING)))
            now = end
        log.append((now, 0))
    return logs


def record_of(plan: Plan, made: Made, step: int, begin: int, drawn: random.Random) -> StepRecord:
    """A step in which actions took about as long as planned."""
    costs = plan.costs

    def seconds(action: Action) -> float:
        slow = made.slow if action.stage == made.workers - 1 else 1.0
        return costs.seconds(action) * slow * drawn.uniform(0.97, 1.06)

    timeline = simulate(plan.schedule_for(plan.num_microbatches), seconds, Network.of(costs))
    data, call, update = 3_000_000, 400_000, 5_000_000
    start = begin + data + update + call
    end = start + round(1e9 * timeline.seconds) + 300_000
    return StepRecord(
        step=step,
        begin=begin,
        end=end,
        rows=plan.batch_size,
        num_workers=made.workers,
        driver=(
            Interval("optimizer", begin + 200_000, begin + 200_000 + update),
            Interval("data", begin + 200_000 + update, start - call),
            Interval(CALL, start - call, end),
            Interval(PASS, start, end),
        ),
        logs=logs_of(timeline, start),
    )


def history_of(made: Made | None = None, steps: int = 60) -> History:
    """A run of so many steps, of which one was slow as a checkpoint was saved."""
    made = made or Made()
    plan, drawn = plan_of(made), random.Random(made.seed)
    records, begin = [], 10**12
    for step in range(1, made.records + 1):
        records.append(record_of(plan, made, 20 * step, begin, drawn))
        begin = records[-1].end
    usual = records[0].seconds if records else plan.predicted_step_seconds
    times, at = [], BEGAN + 2.0
    for step in range(1, steps + 1):
        extra = {1: 1.7 * usual, 41: 3.1 * usual}.get(step, usual * drawn.uniform(0.0, 0.08))
        at += usual + extra
        times.append(StepTimes(step, at, 1, usual + extra, 0.8 * usual, step, usual + extra, 8))
    saved = Happened(times[40].at - 0.001, 40, "saved a checkpoint") if steps > 41 else None
    description = Description(
        pid=4711,
        started=0,
        host="build-7",
        command="train.py --epochs 3",
        began=BEGAN,
        model=made.model,
        plan=prediction(plan),
        microbatches=plan.num_microbatches,
        workers=tuple(
            Worker(number, "cpu", 0, number, 4711, "build-7", (number,))
            for number in range(made.workers)
        ),
        recorded=tuple(range(made.workers)),
        placement=plan.placement,
        predicted_seconds=plan.predicted_step_seconds,
        bound_seconds=plan.bound_seconds,
    )
    environment = {"penstock": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "cores": "4"}
    return History(
        about=About(description=description, plan=plan, environment=environment),
        steps=times,
        records=records,
        events=[saved] if saved else [],
    )
