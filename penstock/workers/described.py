"""The description of a running pipeline that is published with its board."""

from __future__ import annotations

import os
import socket
import sys
import time

from torch import nn

from penstock.board.process import started_at
from penstock.board.runs import Description, Worker
from penstock.plan import Plan
from penstock.plan.text import prediction
from penstock.workers.backend import Workers


def description_of(model: nn.Module, plan: Plan, workers: Workers) -> Description:
    """The description of a running pipeline, for the readers of its board.

    Args:
        model: the model that is run.
        plan: the plan by which it is run.
        workers: the workers that run it.
    """
    placement = plan.placement
    stages = [
        tuple(index for index, place in enumerate(placement) if place == member.place)
        for member in workers.members
    ]
    is_rank = bool(workers.role.name)
    return Description(
        pid=os.getpid(),
        started=started_at(),
        host=socket.gethostname(),
        command=" ".join(sys.argv).encode(errors="replace").decode(),
        began=time.time(),
        model=type(model).__name__,
        plan=prediction(plan),
        microbatches=plan.num_microbatches,
        workers=tuple(
            Worker(
                number=member.number,
                device=str(member.device),
                replica=member.replica,
                place=member.place,
                pid=member.pid,
                host=member.host,
                stages=own,
                memory=sum(plan.stages[index].memory_bytes for index in own),
                limit=plan.memory_limit or 0,
            )
            for member, own in zip(workers.members, stages, strict=True)
        ),
        recorded=tuple(workers.recorded),
        placement=tuple(placement),
        predicted_seconds=plan.predicted_step_seconds,
        bound_seconds=plan.bound_seconds,
        rank=workers.role.index,
        ranks=len(workers.members) if is_rank else 1,
        job=workers.job,
    )
