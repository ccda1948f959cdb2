"""Dimensions beside the batch that vary: `capture(dynamic=...)`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import penstock as ps
from penstock.capture import Key
from penstock.capture.trees import flatten
from penstock.comparison.reference import run_with_threads
from tests.support.models import gpt2, own_forward

KEY = Key(1, 2, 3)
LENGTH = {"input_ids": {1: "length"}}


class Mixer(nn.Module):
    """Flattens rows and places, makes positions, and shortens: sizes of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
        self.shorten = nn.Conv1d(6, 4, 3, stride=2)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        rows, length, width = x.shape
        places = torch.arange(length).view(1, length, 1).expand(rows, length, 1) / (length + 1)
        flat = self.inner((x + places).view(rows * length, width)).view(rows, length, width)
        short = self.shorten((flat * mask.unsqueeze(-1)).transpose(1, 2))
        scores = flat @ flat.transpose(1, 2) / (2 * rows * length + 3)
        return {"out": self.head(short.mean(2)), "scores": scores, "count": rows * length - 1}


def example(rows: int = 3, length: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, length, 6), torch.randint(0, 2, (rows, length)).float()


def captured() -> ps.Program:
    dynamic = {0: {1: "length"}, 1: {1: "length"}}
    return ps.capture(Mixer(), example(), dynamic=dynamic)


@pytest.mark.parametrize(("rows", "length"), [(3, 11), (1, 4), (5, 30), (2, 3)])
def test_other_lengths(rows: int, length: int) -> None:
    program = captured()
    args = example(rows, length)
    assert not program.closed
    assert "B·length" in {str(leaf) for c in program.train.calls for leaf in flatten(c.args)[0]}
    ours, theirs = program.replay(args, {}, KEY), program.model(*args)
    assert ours["count"] == theirs["count"] == rows * length - 1
    for name in ("out", "scores"):
        assert torch.equal(ours[name], theirs[name])


def test_a_language_model_at_other_lengths() -> None:
    tokens = torch.randint(0, 50, (2, 12))
    program = ps.capture(gpt2(), kwargs={"input_ids": tokens, "use_cache": False}, dynamic=LENGTH)
    assert len(program) > 20
    for rows, length in [(3, 5), (1, 16)]:
        given = {"input_ids": torch.randint(0, 50, (rows, length)), "use_cache": False}
        ours = flatten(program.replay((), given, KEY))[0]
        theirs = flatten(own_forward(program, (), given, KEY))[0]
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert ours[0].shape[:2] == (rows, length)


def test_microbatches_of_several_lengths_in_one_step() -> None:
    torch.manual_seed(0)
    dynamic = {0: {1: "length"}, 1: {1: "length"}}
    model, twin = Mixer(), Mixer()
    twin.load_state_dict(model.state_dict())
    batches = [example(3, 11), example(2, 5), example(4, 20)]
    targets = [torch.randint(0, 3, (len(x),)) for x, _ in batches]

    def loss_fn(output: dict[str, Any], target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output["out"], target) + output["scores"].square().mean()

    options = {"devices": ["cpu", "cpu"], "num_microbatches": 1}  # its scores mix the rows
    with ps.Pipeline(model, example(), dynamic=dynamic, **options, replicas=1) as pipe:
        loss = pipe.train_microbatches(batches, targets=targets, loss_fn=loss_fn)

        def alone() -> torch.Tensor:
            losses = []
            for inputs, target in zip(batches, targets, strict=True):
                part, share = loss_fn(twin(*inputs), target), len(target) / 9
                (part * share).backward()
                losses.append(part.detach() * share)
            return losses[0] + losses[1] + losses[2]

        assert torch.equal(loss, run_with_threads(alone, pipe.threads_per_worker))
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            assert torch.equal(ours.grad, theirs.grad)
        # and whole batches of another length, through both ways of training
        x, mask = example(6, 7)
        loss = pipe.train_step(x, mask, target=torch.zeros(6, dtype=torch.long), loss_fn=loss_fn)
        pipe(x, mask)["scores"].sum().backward()
        assert pipe(x, mask)["scores"].shape == (6, 7, 7)
        with pytest.raises(ps.InputError, match=r"micro-batch 1: .* 'length': input 0 has 5, inp"):
            pipe.train_microbatches(
                [batches[0], (batches[1][0], batches[0][1][:2])], loss_fn=loss_fn
            )
        with pytest.raises(ps.InputError, match="2 targets were given for 3 micro-batches"):
            pipe.train_microbatches(batches, targets=targets[:2], loss_fn=loss_fn)
        with pytest.raises(ps.InputError, match="no micro-batches"):
            pipe.train_microbatches([], loss_fn=loss_fn)


class Picky(nn.Module):
    """One block asks how long the input is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4))
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.first(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(x) if x.shape[1] % 2 else self.a(x)


def test_a_block_that_decides_on_the_length_is_closed_and_right() -> None:
    program = ps.capture(Picky(), (torch.randn(2, 8, 4),), dynamic={0: {1: "length"}})
    assert set(program.closed) == {"block"}
    assert "length=7" in program.closed["block"]
    for length in (1, 2, 9):
        x = torch.randn(3, length, 4)
        assert torch.equal(program(x), program.model(x))


def test_what_is_not_marked_may_not_vary() -> None:
    program = ps.capture(Mixer(), example())
    with pytest.raises(ps.InputError, match=r"11 in dimension 1.*that dynamic= names.*{0: {1: "):
        program(*example(3, 12))
    named = dict(zip(("x", "mask"), example(), strict=True))
    other = dict(zip(("x", "mask"), example(3, 12), strict=True))
    with pytest.raises(ps.InputError, match=r"dynamic={'x': {1: \"length\"}}\) lets"):
        ps.capture(Mixer(), kwargs=named)(**other)
    with pytest.raises(ps.InputError, match=r"has dtype torch.float64;.*may vary$"):
        program(*(part.double() for part in example()))
    with pytest.raises(ps.InputError, match=r"Only the batch size.* and length may vary"):
        captured()(torch.randn(3, 11, 7), torch.zeros(3, 11))


@pytest.mark.parametrize("names", [("x", "mask"), (0, "mask"), ("x", 1), (0, 1)])
@pytest.mark.parametrize("by_position", [0, 1, 2])
def test_arguments_are_named_as_the_forward_names_them(
    names: tuple[str | int, ...], by_position: int
) -> None:
    """However they are given, by the example and by later calls."""
    named = ("x", "mask")
    both = example()
    kwargs = dict(zip(named[by_position:], both[by_position:], strict=True))
    dynamic = {name: {1: "length"} for name in names}
    program = ps.capture(Mixer(), both[:by_position], kwargs, dynamic=dynamic)
    for count in (0, 1, 2):
        x = example(3, 14)
        rest = dict(zip(named[count:], x[count:], strict=True))
        assert torch.equal(program(*x[:count], **rest)["out"], program.model(*x)["out"])


def test_one_argument_named_twice() -> None:
    with pytest.raises(ps.InputError, match="argument 1 and 'mask' are the same argument"):
        ps.capture(Mixer(), example(), batch_dim={1: 0, "mask": None})


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        ({"y": {1: "length"}}, "the argument 'y', which the example does not have; it has 0, 1"),
        ({0: {3: "length"}}, r"dimension 3 \(length\) does not exist in input 0"),
        ({0: {0: "length"}}, "already is 'B'"),
        ({0: {1: "B"}}, "'B' is the name of the rows"),
        ({0: {1: "length", 2: "length"}}, "disagree on the dimension 'length'"),
    ],
)
def test_names_that_do_not_fit(dynamic: Any, message: str) -> None:
    with pytest.raises(ps.InputError, match=message):
        ps.capture(Mixer(), example(), dynamic=dynamic)


class Patches(nn.Module):
    """Patches of all images in one dimension, four for each, and a text for each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Linear(6, 5), nn.Linear(5, 5)
        self.text, self.head = nn.Embedding(9, 5), nn.Linear(5, 3)

    def forward(self, ids: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
        images = self.mix(self.embed(patches).relu()).view(len(ids), -1, 5).mean(1)
        return self.head(self.text(ids).mean(1) + images)


def pictured(rows: int, each: int = 4) -> dict[str, torch.Tensor]:
    return {"ids": torch.randint(9, (rows, 3)), "patches": torch.randn(rows * each, 6)}


def test_several_entries_for_each_row() -> None:
    model, twin = Patches(), Patches()
    twin.load_state_dict(model.state_dict())
    options: Any = {"batch_dim": {"patches": (0, 4)}}
    with ps.Pipeline(
        model, kwargs=pictured(5), devices=["cpu", "cpu"], num_microbatches=3, **options, replicas=1
    ) as pipe:
        assert "4Bx6" in str(pipe.program.train.inputs[1])
        batch = pictured(7)
        pipe.train_step(**batch, loss_fn=lambda out: out.square().mean())

        def alone() -> None:
            parts = zip((3, 2, 2), (0, 3, 5), strict=True)
            for rows, start in parts:
                patches = batch["patches"][4 * start : 4 * (start + rows)]
                out = twin(batch["ids"][start : start + rows], patches)
                (out.square().mean() * (rows / 7)).backward()

        run_with_threads(alone, pipe.threads_per_worker)
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            assert torch.equal(ours.grad, theirs.grad)
        with pytest.raises(ps.InputError, match="has 27 entries in dimension 0, which are not 4"):
            pipe(ids=batch["ids"], patches=batch["patches"][:27])
    with pytest.raises(ps.InputError, match=r"input 0 has 5, input 1 has 20.*\(0, 4\)"):
        ps.capture(model, kwargs=pictured(5))


def test_verify_splits_arguments_that_are_named_but_given_by_position() -> None:
    ids, patches = pictured(6).values()
    found = ps.verify(
        Patches(),
        (ids, patches),
        loss_fn=lambda out: out.square().mean(),
        devices=["cpu", "cpu"],
        batch_dim={"patches": (0, 4)},
    )
    assert found.ok


class Packed(nn.Module):
    """An LSTM over rows that are sorted by their lengths, as `pack_padded_sequence` wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Linear(6, 5), nn.LSTM(5, 5, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.embed(x), lengths, batch_first=True)
        out, _ = pad_packed_sequence(self.lstm(packed)[0], True, total_length=x.shape[1])
        return out


def test_rows_that_are_sorted_by_their_lengths() -> None:
    lengths = torch.tensor([9, 8, 8, 5, 4, 1])
    program = ps.capture(Packed(), (torch.randn(6, 9, 6), lengths), dynamic={"x": {1: "time"}})
    for time in (9, 12, 30):
        x = torch.randn(5, time, 6)
        assert torch.equal(program(x, lengths[:5]), program.model(x, lengths[:5]))
