"""What to try, with what each is predicted to gain."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.account.attribution import (
    DATA,
    FILL,
    IMBALANCE,
    LINK,
    OUTSIDE,
    OVERHEAD,
    SLOW,
    UNEVEN,
    Account,
    LostTime,
    mean_losses,
)
from penstock.account.drift import drift
from penstock.board.phases import TURN
from penstock.plan.plan import Plan
from penstock.schedule import Costs
from penstock.simulate import Network, simulate

_LEAST = 0.01  # of a step's time; suggestions that gain less are left out

_CURES = {
    IMBALANCE: (
        "Cut stage {stage} ({calls}) elsewhere: pipe.replan() measures where; cuts=[...], "
        'schedule="interleaved" or tune=True when the pipeline is built',
        "worker {worker} has more to do than the others, by the plan",
    ),
    SLOW: (
        "See what else runs on the device of worker {worker}; pipe.replan() gives it less, if it "
        "is another device than those of the others",
        "it takes longer for its stages than planned, beside the others",
    ),
    LINK: (
        "Send less (boundary_dtype=torch.bfloat16, which changes bits), or by reference "
        '(workers="threads") where workers are processes of one machine',
        "values of stage {stage} were under way while the next stage waited for them",
    ),
    "recomputation": ('recompute="none", if the memory is there', "forwards run a second time"),
    UNEVEN: (
        "Micro-batches of equal size (train_microbatches), and a quieter machine",
        "some micro-batches took longer than others of the same stage",
    ),
    OVERHEAD: (
        "Fewer micro-batches than {count} (this changes bits), or a larger batch",
        "every pass and every action costs a little besides its work",
    ),
    DATA: ("More workers of the DataLoader, or pin_memory=True", "the workers wait for data"),
    OUTSIDE: (
        "Profile the script between its steps{loading}",
        "the workers wait while the script does other things",
    ),
    "optimizer": (
        "pipe.optimizer(..., fused=True), which steps on all workers at once",
        "no stage runs while the optimizer steps",
    ),
    TURN: (
        "replicas=1, or modules that remember nothing from one forward to the next",
        "replicas wait for the turn of their micro-batches",
    ),
}
"""For every cause, templates of what to try and why. The placeholders are the worker and stage of a
`LostTime`, the calls of that stage, the number of micro-batches (`count`), and a hint to use
`pipe.loading`, which is empty if the script does (`loading`)."""

_LOADING = "; pipe.loading(batches) tells how much of it is data"


@dataclass(frozen=True)
class Suggestion:
    """Something to try.

    Attributes:
        what: in words, with the argument or the method that does it.
        gain: the share of a step's time that it is predicted to save, from 0 to 1.
        why: the reason, in words.
        is_most: whether `gain` is an upper bound, not an estimate.
    """

    what: str
    gain: float
    why: str
    is_most: bool = True


def suggestions(accounts: Sequence[Account], plan: Plan) -> list[Suggestion]:
    """What to try, the largest gain first; gains of less than 1 % of a step are left out.

    Args:
        accounts: of some steps.
        plan: by which they ran.
    """
    if not accounts:
        return []
    whole = statistics.fmean(account.seconds for account in accounts)
    found = [*_of_losses(mean_losses(accounts), whole, plan), *_of_plan(accounts, plan)]
    return sorted((s for s in found if s.gain >= _LEAST), key=lambda s: -s.gain)


def _of_losses(found: Sequence[LostTime], whole: float, plan: Plan) -> Iterator[Suggestion]:
    """What to try against each loss that has an entry in `_CURES`.

    Args:
        found: the losses.
        whole: the seconds of a step, of which each loss is a share.
        plan: the plan by which the steps ran.
    """
    loading = _LOADING if all(loss.cause != DATA for loss in found) else ""
    for loss in found:
        if loss.cause in _CURES:
            stage = plan.stages[loss.stage or 0]
            what, why = (
                text.format(
                    stage=loss.stage,
                    calls=f"{stage.first} … {stage.last}",
                    worker=loss.worker,
                    count=plan.num_microbatches,
                    loading=loading,
                )
                for text in _CURES[loss.cause]
            )
            yield Suggestion(what, loss.seconds / whole, why)


def _of_plan(accounts: Sequence[Account], plan: Plan) -> Iterator[Suggestion]:
    """What to try with another plan: twice the micro-batches, or a candidate that is now faster."""
    usual = statistics.median(account.usual_seconds for account in accounts)
    whole = statistics.median(account.seconds for account in accounts)
    filling = any(loss.cause == FILL and loss.seconds for a in accounts for loss in a.losses)
    count, rows = 2 * plan.num_microbatches, min(account.rows for account in accounts)
    if filling and plan.replicas == 1 and len(plan.stages) > 1 and count <= rows:
        now, then = (_simulated(plan, number) for number in (plan.num_microbatches, count))
        yield Suggestion(
            f"num_microbatches={count} (this changes bits)",
            usual * (1 - then / now) / whole,
            "a pipeline fills and drains once for each batch; if a micro-batch of half the rows "
            "takes half the time",
        )
    drifted = drift(accounts, plan)
    if drifted is not None and drifted.better is not None:
        better = drifted.better
        yield Suggestion(
            f"replicas={better.replicas}, num_microbatches={better.num_microbatches} (another "
            "number changes bits)",
            (drifted.calibrated_seconds - drifted.better_seconds) / whole,
            f"{better.schedule or better.way} with {better.stages} stages, as it was predicted, on "
            "the machine as it is now",
            is_most=False,
        )


def _simulated(plan: Plan, count: int) -> float:
    """The seconds of a step with `count` micro-batches, if actions take time in proportion to rows.

    Args:
        plan: the plan, with the costs of its own number of micro-batches.
        count: the number of micro-batches.
    """
    factor = plan.num_microbatches / count
    costs = plan.costs
    scaled = Costs(
        tuple(factor * s for s in costs.forward),
        tuple(factor * s for s in costs.backward),
        tuple(factor * s for s in costs.weight),
        costs.latency,
        tuple(factor * s for s in costs.transfer),
        tuple(factor * s for s in costs.halving),
    )
    network = Network.of(scaled, overlap=plan.overlap, overhead=plan.overhead_seconds)
    return simulate(plan.schedule_for(count), scaled.seconds, network).seconds
