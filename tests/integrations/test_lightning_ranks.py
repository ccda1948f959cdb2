"""Lightning and Fabric under torchrun: every rank has the bits of one device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.integrations import lightning_ranks, test_fabric
from tests.integrations.test_lightning import EPOCHS, data, network, plain_loop, twins
from tests.workers.ranks.launching import Launcher

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ranks(launcher: Launcher, tmp_path: Path) -> None:
    ranks = launcher.run("lightning", tmp_path, seconds=300)
    assert all(ranks), "a rank failed"

    net, _ = twins()
    losses = plain_loop(net, clip=lambda ps: nn.utils.clip_grad_norm_(ps, 0.05))
    for found in ranks:
        assert "their seeds differ (0 on rank 0, 1 on another)" in found["other seeds"]
        assert_same(found["trained"]["weights"], net.state_dict())
        assert all(map(torch.equal, found["trained"]["losses"], losses))
    assert [found["trained"]["writes"] for found in ranks] == [True, False]
    assert ranks[0]["trained"]["metrics"] == ranks[1]["trained"]["metrics"]

    saved = torch.load(tmp_path / "trained.ckpt", weights_only=False)
    plain = network()
    plain.load_state_dict({k.removeprefix("net."): v for k, v in saved["state_dict"].items()})
    assert_same(plain.state_dict(), net.state_dict())
    optimizer = torch.optim.AdamW(plain.parameters())
    optimizer.load_state_dict(saved["optimizer_states"][0])
    assert {int(s["step"]) for s in optimizer.state.values()} == {EPOCHS * len(data())}
    assert len(optimizer.state) == len(list(plain.parameters()))

    net, _ = twins()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    plain_loop(
        net,
        clip=lambda ps: nn.utils.clip_grad_norm_(ps, 0.5),
        around=lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
        scaler=scaler,
    )
    for found in ranks:
        assert found["scaled"]["scale"] == scaler.get_scale() < 2.0**20
        assert_same(found["scaled"]["weights"], net.state_dict())
        whole, resumed = found["resumed"]
        assert_same(resumed, whole)

    wanted = lightning_ranks.scaled_by_hand()
    for found in ranks:
        for one, other in zip(found["scaled by hand"], wanted, strict=True):
            assert_same(one, other)

    torch.manual_seed(3)
    net = test_fabric.network()
    test_fabric.plain_loop(net)
    for found in ranks:
        assert_same(found["fabric"]["weights"], net.state_dict())
        assert_same(found["fabric"]["saved"]["model"], net.state_dict())
        assert len(found["fabric"]["saved"]["optimizer"]["state"]) == len(list(net.parameters()))
