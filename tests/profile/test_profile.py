"""What is measured is plausible, and measuring reaches nothing of the user's."""

from __future__ import annotations

import gc
import math
import weakref
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import penstock as ps
from penstock.capture import ROWS
from penstock.profile import measure
from penstock.profile import team as team_module
from penstock.profile.halving import launch_and_rate
from penstock.profile.team import Team
from penstock.profile.timing import Timing
from tests.support.models import cases, mlp


def test_every_call_has_a_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "halving_seconds", lambda _: 0.0)  # however small
    case = cases()["gpt2"]
    program = ps.capture(case.model(), case.args, case.kwargs)
    seen: list[tuple[int, int, str]] = []
    costs = ps.profile(program, devices=["cpu", "cpu"], progress=lambda *a: seen.append(a))
    kind = costs.on("cpu")
    assert kind.rows == (1, 2, 3, 6, 11)
    for table in (kind.forward, kind.backward):
        assert all(len(line) == len(program) == costs.num_calls for line in table)
        assert all(0 <= seconds < math.inf for line in table for seconds in line)
        assert sum(table[0]) > 0
    assert costs.batch_size == 11
    assert sum(costs.weights) == sum(p.nbytes for p in program.model.parameters())  # tied: once
    assert all(
        math.isfinite(seconds) for line in (*kind.forward, *kind.backward) for seconds in line
    )
    assert kind.spread >= 0
    assert len(costs.weights) == len(costs.labels) == len(costs.boundary) - 1
    assert len(costs.saved) == len(costs.outputs) == costs.num_calls
    for weights, backwards in zip(kind.weight, kind.backward, strict=True):
        assert all(0 <= w <= b for w, b in zip(weights, backwards, strict=True))
        assert sum(weights) > 0
    assert msgspec.json.decode(msgspec.json.encode(costs), type=ps.Profile) == costs
    assert seen[0][:2] == (0, 5)
    assert seen[-1][0] == seen[-1][1] >= 5


class Scheduled(nn.Module):
    """Takes a rate of its own at every forward, and has no more of them than training takes."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.rates, self.where = [0.1] * 120, where
        self.step, self.shared = 0, bytearray(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "attribute":
            self.step += 1
            return x * self.rates[self.step]
        self.shared[0] += 1
        return x * self.rates[self.shared[0]]


@pytest.mark.parametrize("where", ["attribute", "plain object"])
def test_no_forward_of_a_profile_is_out_of_bounds(where: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Scheduled(where), nn.Linear(4, 4))
    program = ps.capture(model, (torch.randn(8, 4),))
    ps.profile(program, devices=["cpu", "cpu"])
    assert model[1].step == model[1].shared[0] == 0


def test_profiling_touches_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    fired = []
    program = ps.capture(model, (torch.randn(8, 4),))
    model[0].register_forward_hook(lambda *_: fired.append("forward"))
    model[0].weight.register_hook(lambda _: fired.append("gradient"))
    model[0].weight.register_post_accumulate_grad_hook(lambda _: fired.append("accumulated"))
    model[0].weight.grad = gradient = torch.ones(4, 4)
    before = {name: (t._version, t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    state = torch.get_rng_state()
    ps.profile(program, devices=["cpu", "cpu"])
    assert fired == []
    assert model[0].weight.grad is gradient
    assert torch.equal(gradient, torch.ones(4, 4))
    assert model[0].bias.grad is None
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert tensor._version == before[name][0]
        assert torch.equal(tensor, before[name][1])
    assert torch.equal(torch.get_rng_state(), state)


def test_another_batch_can_be_given() -> None:
    program = ps.capture(mlp(4, 4, 4), (torch.randn(3, 4),))
    assert ps.profile(program, (torch.randn(20, 4),), devices=["cpu"]).batch_size == 20


def test_what_is_frozen_is_measured_as_frozen() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].requires_grad_(False)
    kind = ps.profile(ps.capture(model, (torch.randn(8, 64),)), devices=["cpu"]).on("cpu")
    assert kind.backward[-1][0] < kind.backward[-1][1]
    assert all(not p.requires_grad for p in model[0].parameters())


def test_boundaries_are_per_row_and_weights_belong_to_their_first_user() -> None:
    shared = nn.Linear(4, 4)
    program = ps.capture(nn.Sequential(shared, nn.ReLU(), shared), (torch.randn(8, 4),))
    costs = ps.profile(program, devices=["cpu"])
    assert sum(costs.weights) == 4 * (16 + 4)
    assert costs.parameters == (2, 0, 0)
    assert [round(n, 3) for n in costs.boundary[:1]] == [16.0]
    assert costs.labels == tuple(call.label for call in program.train.calls)


def test_cuts_that_are_not_possible_are_in_the_profile() -> None:
    program = ps.capture(nn.Sequential(_Twice(), nn.Linear(4, 4)), (torch.randn(8, 4),))
    costs = ps.profile(program, devices=["cpu"])
    assert costs.forbidden
    for cut, reason in costs.forbidden.items():
        assert reason == program.cuts.forbidden(cut)


class _Permuted(nn.Module):
    """Fills memory that was empty, and uses it as an index: what a mixture of experts does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = x[:, 0].argsort()
        back = torch.full_like(order, 1 << 40)
        back[order] = torch.arange(len(order))
        return self.layer(x[order])[back]


def test_calls_read_what_earlier_ones_have_changed() -> None:
    costs = ps.profile(ps.capture(_Permuted(), (torch.randn(8, 4),)), devices=["cpu"])
    assert costs.num_calls > 4


class _Twice(nn.Module):
    """Adds to its buffer before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        x = self.layer(x)
        self.count.add_(1)
        return x


def test_parameters_that_a_forward_writes_are_not_those_of_the_user() -> None:
    words = nn.Embedding(9, 4, max_norm=0.1)
    model = nn.Sequential(words, nn.Linear(4, 4))
    before = words.weight.detach().clone()
    program = ps.capture(model, (torch.arange(6),))
    assert program.written == {"0.weight"}
    ps.profile(program, devices=["cpu"], num_microbatches=1)
    assert torch.equal(words.weight, before)


def test_what_ran_beside_a_first_measurement_is_not_in_the_profile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A size that took longer than the others promise is measured again, and the better counts."""
    program = ps.capture(mlp(8, 8, 8), (torch.randn(16, 8),))
    visits: list[int] = []

    class Disturbed:
        members = ()

        def __init__(self, *_: object) -> None:
            pass

        def measure(self, leaves: object, sizes: dict[str, int], brief: bool) -> list[Timing]:
            (rows,) = sizes.values()
            visits.append(rows)
            seconds = 0.01 * (1.0 + rows) * (2.0 if rows == 4 and visits.count(4) == 1 else 1.0)
            calls = [seconds / len(program)] * len(program)
            return [Timing(calls, calls, [(seconds, seconds)], [0.0] * len(program))]

        def halving(self, *given: object) -> float:
            return 0.0

        def nests(self, leaves: object, sizes: object) -> bool:
            return False

        def contention(self, leaves: object, sizes: object, seconds: float) -> list[float]:
            return []

        def saved_bytes(self, leaves: object, sizes: object) -> list[int]:
            return [0] * len(program)

    monkeypatch.setattr(measure, "Team", Disturbed)
    kind = ps.profile(program, devices=["cpu"]).on("cpu")
    assert visits.count(4) == 2
    assert [sum(line) for line in kind.forward] == pytest.approx(
        [0.01 * (1.0 + r) for r in kind.rows]
    )


def test_workers_together_and_one_alone_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody runs in every other round, only the first in those between."""
    program = ps.capture(mlp(8, 8, 8), (torch.randn(4, 8),))
    team = Team(program, torch.device("cpu"), 2, threads=1)
    left = {
        team.members[0]: [9.0, 3.0, 1.0, 6.0, 2.0, 5.0, 1.0],  # the first is a warm-up
        team.members[1]: [9.0, 5.0, 8.0, 5.0],
    }
    monkeypatch.setattr(team_module, "_MOST_CONTENTIONS", 3)
    monkeypatch.setattr(team_module._Member, "_whole", lambda self, *_: (left[self].pop(0), 0.0))
    leaves, sizes = list(program.example), program.sizes(4)
    assert team.contention(leaves, sizes, 60.0) == [4.0, 3.5, 5.0]
    assert list(left.values()) == [[], []]
    left |= {team.members[0]: [9.0, 1.0, 2.0], team.members[1]: [9.0, 1.0]}
    assert team.contention(leaves, sizes, 0.0) == [0.5]  # after one turn


def test_contention_of_a_size_is_that_of_its_own_turns_and_those_around() -> None:
    """One turn, in which something else ran, must not make one device look fast."""
    turns = {1: [1.4, 1.5, 1.6], 2: [1.2, 1.1, 1.0], 4: [1.1, 1.0, 1.0], 8: [2.1], 16: []}
    found = measure.contention((1, 2, 4, 8, 16), turns)
    assert found == pytest.approx([1.3, 1.1, 1.1, 1.05, 1.05])
    assert measure.contention((1, 3), {1: [0.5], 5: [3.0, 3.0, 3.0]}) == [3.0, 3.0]
    assert measure.contention((1, 3), {1: [0.5]}) == [1.0, 1.0]
    assert measure.contention((1, 2), {1: [], 2: []}) == []


def test_only_the_whole_is_timed_where_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    program = ps.capture(mlp(8, 8, 8), (torch.randn(4, 8),))
    team = Team(program, torch.device("cpu"), 2, threads=1)
    ran: list[float] = []

    def whole(*_: object) -> tuple[float, float]:
        ran.append(0.0)
        return 1.0, 2.0

    monkeypatch.setattr(team_module._Member, "_whole", whole)
    leaves, sizes = list(program.example), program.sizes(4)
    assert team.measure(leaves, sizes, brief=True) == [Timing([], [], [(1.0, 2.0)])] * 2
    assert len(ran) == 4  # a warm-up each
    ran.clear()
    monkeypatch.setattr(team_module, "_WARMING_UP", 0.0)
    monkeypatch.setattr(team_module, "_MOST_PASSES", 1)
    (timing, _) = team.measure(leaves, sizes)
    assert len(timing.forward) == len(program)
    assert timing.wholes == [(1.0, 2.0)]
    assert len(ran) == 4  # no further warm-up, as they take too long


def test_what_is_known_of_calls_outlasts_a_faster_time_of_the_whole() -> None:
    """A model that takes long is measured with its calls, and again without them."""
    slow = [Timing([1.0, 3.0], [2.0, 2.0], [(5.0, 5.0)], [0.0, 0.5])] * 4
    quick = [Timing([], [], [(3.0, 3.0)])] * 2
    better = Timing([1.0, 3.0], [2.0, 2.0], [(3.0, 3.0)], [0.0, 0.5])
    assert measure._better(slow, quick) == [better] * 2
    assert measure._better(quick, slow) == quick
    assert measure._better(slow, [Timing([], [], [(6.0, 6.0)])]) == slow
    found = measure.device_profile("cpu", {2: measure._better(slow, quick)}, [0.0])
    assert found.forward == ((0.75, 2.25),)


def test_calls_have_their_part_of_the_nearest_size_where_only_the_whole_was_timed() -> None:
    timings = {
        1: [Timing([1.0, 3.0], [2.0, 2.0], [(4.0, 4.0)], [0.0, 0.5])],
        2: [Timing([2.0, 2.0], [6.0, 2.0], [(4.0, 8.0)], [0.25, 0.0])],
        8: [Timing([], [], [(8.0, 16.0)])],
    }
    found = measure.device_profile("cpu", timings, [0.0] * 3)
    assert found.forward == ((1.0, 3.0), (2.0, 2.0), (4.0, 4.0))
    assert found.backward == ((2.0, 2.0), (6.0, 2.0), (12.0, 4.0))
    assert found.weight == ((0.0, 1.0), (1.5, 0.0), (3.0, 0.0))


def test_lists_of_devices_take_turns() -> None:
    """The speed of a machine changes, and they are to be compared."""
    program = ps.capture(mlp(8, 8, 8), (torch.randn(4, 8),))
    told: list[str] = []
    found = measure.profiles(
        program,
        choices=[(["cpu"], 2), (["cpu", "cpu"], 1)],
        seconds=0.0,
        progress=lambda done, of, what: told.append(what),
    )
    assert [(costs.devices, costs.threads) for costs in found] == [(("cpu",), 2), (("cpu",) * 2, 1)]
    sizes = [what for what in told if "rows" in what]
    assert sizes == [f"profiling {rows} rows on cpu" for rows in (1, 1, 2, 2)]
    (alone,) = measure.profiles(program, choices=[(["cpu"], 1)], num_microbatches=2)
    assert alone.devices == ("cpu",)


def test_one_worker_has_nobody_to_contend_with() -> None:
    program = ps.capture(mlp(8, 8, 8), (torch.randn(4, 8),))
    costs = [ps.profile(program, devices=["cpu"] * n, num_microbatches=2) for n in (1, 2)]
    found = [profile.on("cpu").contention for profile in costs]
    assert found[0] == ()
    assert len(found[1]) == 1
    assert found[1][0] >= 1


def test_halving_is_measured_small_and_large_and_lies_on_their_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A launch and a rate; sizes that take long are not halved to learn it."""
    monkeypatch.setattr(measure, "halving_seconds", lambda _: 0.25)
    monkeypatch.setattr(measure, "_HALVINGS", 0.4)
    asked: list[int] = []

    class Halving:
        members = (SimpleNamespace(device=torch.device("cpu")),)

        def halving(self, leaves: object, sizes: dict[str, int], seconds: float) -> float:
            asked.append(sizes["rows"])
            assert seconds <= 1.0
            return 0.015 + 0.005 * sizes["rows"]

    def found(seconds: float, *sizes: int, share: float = 0.5) -> list[float]:
        asked.clear()
        timings = {r: [Timing([r * seconds], [0.0], [(r * seconds, 0.0)], [share])] for r in sizes}
        return measure._halving(Halving(), timings, lambda n: ([], {"rows": n}), 1.0)  # type: ignore[arg-type]

    assert found(0.1, 1, 2, 3, 8) == pytest.approx([0.02, 0.025, 0.03, 0.055])
    assert asked == [1, 3]
    assert found(1.0, 2, 4) == pytest.approx([0.025, 0.05])  # a row costs as much
    assert asked == [2]
    assert found(1.5, 2, 4, share=1.0) == [0.25, 0.25]  # so long that it is not measured at all
    assert asked == []
    assert found(0.1, 1, 2, share=0.0) == [0.0, 0.0]
    assert asked == []


def test_what_halving_costs_is_never_negative_however_noisy() -> None:
    totals = {1: 0.1, 4: 0.4}
    assert launch_and_rate({1: 0.02, 4: 0.05}, totals) == pytest.approx((0.01, 0.01))
    assert launch_and_rate({1: 0.02}, totals) == pytest.approx((0.0, 0.02))
    launch, rate = launch_and_rate({1: 0.02, 4: 0.0}, totals)  # the larger was disturbed
    assert rate == 0
    assert 0.01 < launch < 0.02  # the smaller is worth more
    launch, rate = launch_and_rate({1: 0.0, 4: 0.08}, totals)
    assert launch == 0
    assert rate == pytest.approx(0.01)
    assert launch_and_rate({1: -0.02, 4: -0.01}, totals) == (0.0, 0.0)


def test_sizes_that_do_not_fit_the_memory_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole program is measured on one device, which need not hold a large micro-batch."""
    plain, asked = Team.measure, list[int]()

    def limited(self: Team, leaves: list[torch.Tensor], *rest: Any) -> list[Timing]:
        asked.append(len(leaves[0]))
        if len(leaves[0]) > 4:
            raise torch.OutOfMemoryError("no more")
        return plain(self, leaves, *rest)

    monkeypatch.setattr(Team, "measure", limited)
    program = ps.capture(mlp(4, 4, 4), (torch.randn(16, 4),))
    costs = ps.profile(program, devices=["cpu", "cpu"])
    assert set(costs.on("cpu").rows) <= {1, 2, 4}
    assert sum(rows > 4 for rows in asked) == 1  # nor is a larger one tried
    assert ps.plan(costs).microbatch_size <= 4
    monkeypatch.setattr(Team, "measure", lambda *_: [][1])
    with pytest.raises(IndexError):
        ps.profile(program, devices=["cpu"])


def test_what_did_not_fit_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: what is measured next needs the memory."""
    plain, held, alive = team_module._Member._whole, list[Any](), list[bool]()

    def limited(self: Any, values: Any, sizes: Any) -> tuple[float, float]:
        activations = torch.empty(8)
        if sizes[ROWS] > 4:
            held.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("no more")
        return plain(self, values, sizes)

    def progress(*_: Any) -> None:
        alive.extend(ref() is not None for ref in held)

    monkeypatch.setattr(team_module._Member, "_whole", limited)
    program = ps.capture(mlp(4, 4, 4), (torch.randn(16, 4),))
    gc.disable()
    try:
        ps.profile(program, devices=["cpu", "cpu"], seconds=1.0, progress=progress)
    finally:
        gc.enable()
    assert alive
    assert not any(alive)


def test_a_model_that_fits_with_no_size_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> list[Timing]:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(Team, "measure", full)
    program = ps.capture(mlp(4, 4, 4), (torch.randn(16, 4),))
    with pytest.raises(torch.OutOfMemoryError, match="no more"):
        ps.profile(program, devices=["cpu"])
