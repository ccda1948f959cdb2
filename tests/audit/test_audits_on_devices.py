"""Audits on accelerators: the model's own forward gets its inputs where the model is."""

from __future__ import annotations

import pytest
import torch

import penstock as ps
from tests.interleavings.cases import CASES, Case
from tests.interleavings.running import plan_of
from tests.support.simulated.machine import Machine
from tests.support.simulated.module import install, simulated

install()


@pytest.mark.parametrize("where", ["cpu", "sim:1"])
def test_inputs_may_be_elsewhere(where: str) -> None:
    with simulated(Machine(2, seed=1)):
        case = Case(CASES["chain, 1f1b"].build, (), devices=("sim:0",))
        model = case.model().to("sim:0")
        x = case.batch(0)[0].to(where)
        program = ps.capture(model, (x.to("sim:0"),))
        with ps.Pipeline(
            model,
            (x.to("sim:0"),),
            devices=case.devices,
            plan=plan_of(case, program),
            program=program,
            workers="threads",
            audit=1,
            progress=None,
        ) as pipe:
            with torch.no_grad():  # autograd has no threads for simulated devices
                pipe(x)
            assert pipe.audit.microbatches == 1
