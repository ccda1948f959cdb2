"""What is remembered of parameters is where these are."""

from __future__ import annotations

import torch
from torch import nn

from penstock.workers.optimizer_parts import move_state


def test_state_follows_parameters_to_other_devices() -> None:
    parameter = nn.Parameter(torch.zeros(3, device="meta"))
    for fused in (False, True):
        state = {parameter: {"exp_avg": torch.zeros(3), "step": torch.zeros(()), "other": 1}}
        move_state([{"params": [parameter], "fused": fused}], state)
        own = state[parameter]
        assert own["exp_avg"].device.type == "meta"
        assert own["step"].device.type == ("meta" if fused else "cpu")
        assert own["other"] == 1
