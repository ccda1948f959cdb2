"""Walking a schedule: who runs which stage, what every action waits for, and in which order.

Micro-batch `i` of a pipeline of `p` stages travels one path of `2p` actions,

    F0.i  F1.i  ...  F(p-1).i  B(p-1).i  ...  B1.i  B0.i

where any `B` may be only its first half, `I`. Every action waits for the one before it on that
path: `F` for the activations, `B` and `I` for the gradients (and so, through the path, for their
own `F`). A second half `W` is off the path: it waits for its own `I`, and nobody waits for it.
That is the whole dependency graph, so how far each micro-batch has come says everything about what
may run next.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import ScheduleError
from penstock.schedule.actions import Action, Kind, Schedule


def placement(schedule: Schedule) -> tuple[int, ...]:
    """The worker of every stage.

    Raises:
        ScheduleError: a stage has no worker or several, or does not exist.
    """
    homes: dict[int, int] = {}
    for worker, actions in enumerate(schedule.workers):
        for stage in sorted({action.stage for action in actions}):
            if not 0 <= stage < schedule.num_stages:
                raise ScheduleError(
                    f"{schedule.name}: worker {worker} runs stage {stage}, "
                    f"but the stages are 0 to {schedule.num_stages - 1}"
                )
            if stage in homes:
                raise ScheduleError(
                    f"{schedule.name}: stage {stage} is run by worker {homes[stage]} and by "
                    f"worker {worker}; a stage's parameters live on one worker only"
                )
            homes[stage] = worker
    for stage in range(schedule.num_stages):
        if stage not in homes:
            raise ScheduleError(f"{schedule.name}: no worker runs stage {stage}")
    return tuple(homes[stage] for stage in range(schedule.num_stages))


def walk(schedule: Schedule, forwards: bool = True) -> Iterator[tuple[int, Action]]:
    """Yields `(worker, action)` in an order in which a single thread could run the whole schedule.

    Every worker's own order is kept, and every action comes after what it waits for. Takes constant
    time per action.

    Args:
        schedule: of a step, or of its forwards alone, or of its backwards alone.
        forwards: whether it has forwards; if not, they are done before it begins.

    Raises:
        ScheduleError: the workers wait for each other; the message says what each is stuck on.
    """
    homes = placement(schedule)
    path = homes + homes[::-1]  # the worker of every action on a micro-batch's path
    last = len(path) - 1
    forward, weight = Kind.FORWARD, Kind.WEIGHT
    travelled = [0 if forwards else schedule.num_stages] * schedule.num_microbatches
    heads = [0] * len(schedule.workers)
    awake = list(range(len(schedule.workers) - 1, -1, -1))
    while awake:
        worker = awake.pop()
        actions, head = schedule.workers[worker], heads[worker]
        while head < len(actions):
            kind, stage, microbatch = action = actions[head]
            position = stage if kind is forward else last - stage
            if kind is weight:
                if travelled[microbatch] <= position:
                    break
                head += 1
                yield worker, action
                continue
            if travelled[microbatch] != position:
                break
            travelled[microbatch] = position + 1
            head += 1
            yield worker, action
            # Its successor can be what another worker sleeps on.
            if position < last and path[position + 1] != worker:
                awake.append(path[position + 1])
        heads[worker] = head
    if any(head < len(actions) for head, actions in zip(heads, schedule.workers, strict=True)):
        raise ScheduleError(_describe_deadlock(schedule, heads))


def _describe_deadlock(schedule: Schedule, heads: list[int]) -> str:
    stuck = []
    for worker, (head, actions) in enumerate(zip(heads, schedule.workers, strict=True)):
        if head < len(actions):
            awaited = _awaited(schedule, actions[head])
            reason = f"waits for {awaited}" if awaited else "was already done"
            stuck.append(f"worker {worker} is stuck on {actions[head]}, which {reason}")
    total = sum(map(len, schedule.workers))
    return (
        f"{schedule.name} with {schedule.num_stages} stages and {schedule.num_microbatches} "
        f"micro-batches deadlocks after {sum(heads)} of {total} actions: {'; '.join(stuck)}"
    )


def _awaited(schedule: Schedule, action: Action) -> Action | None:
    """The action whose result `action` waits for; None for a forward of stage 0."""
    kind, stage, microbatch = action
    if kind is Kind.FORWARD:
        return Action(kind, stage - 1, microbatch) if stage else None
    if kind is Kind.WEIGHT:
        return Action(Kind.INPUT, stage, microbatch)
    if stage == schedule.num_stages - 1:
        return Action(Kind.FORWARD, stage, microbatch)
    half = Action(Kind.INPUT, stage + 1, microbatch)
    if any(half in actions for actions in schedule.workers):
        return half
    return Action(Kind.BACKWARD, stage + 1, microbatch)
