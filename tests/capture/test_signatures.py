"""One pipeline takes calls of several signatures, each as the model itself takes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps

pytestmark = pytest.mark.usefixtures("one_thread")


class Language(nn.Module):
    """Gives logits, and its own loss where there are labels, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.a, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11)
        self.drop = nn.Dropout(0.2)

    def forward(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        scale: float = 1.0,
        flip: bool = False,
    ) -> dict[str, torch.Tensor]:
        x = self.words(ids)
        if mask is not None:
            x = x * mask[..., None]
        x = self.drop(self.a(x).tanh()) * scale
        logits = self.head(-x if flip else x)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.transpose(1, 2), labels), "logits": logits}


IDS = torch.randint(0, 11, (6, 5), generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(0, 11, (6, 5), generator=torch.Generator().manual_seed(2))
MASK = (torch.arange(30).reshape(6, 5) % 3 > 0).float()

CALLS: list[dict[str, Any]] = [
    {},
    {"labels": LABELS},
    {"mask": MASK},
    {"mask": None},
    {"mask": MASK, "labels": LABELS},
    {"flip": True},
    {"scale": 0.5},
    {"scale": 2},
]


def pipeline(example: dict[str, Any], kind: Any = "threads", **options: Any) -> ps.Pipeline:
    torch.manual_seed(0)
    model = Language()
    options = {"cuts": ["a"], "schedule": "gpipe", "recompute": "none"} | options
    options = {"num_microbatches": 3, "workers": kind} | options
    return ps.Pipeline(
        model, (), {"ids": IDS} | example, devices=["cpu", "cpu"], **options, replicas=1
    )


def parts_of(call: dict[str, Any], count: int = 3) -> list[dict[str, Any]]:
    """Micro-batches as a plain loop makes them."""
    split = {
        k: v.tensor_split(count) if isinstance(v, torch.Tensor) else [v] * count
        for k, v in ({"ids": IDS} | call).items()
    }
    return [{k: v[part] for k, v in split.items()} for part in range(count)]


@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.parametrize("example", [{}, {"labels": LABELS}], ids=["without", "with"])
def test_every_call_gives_what_the_model_gives(example: dict[str, Any], kind: Any) -> None:
    with pipeline(example, kind) as pipe:
        for training in (False, True, False):
            pipe.train(training)
            for call in CALLS:
                plain = [pipe.model.eval()(**part) for part in parts_of(call)]
                pipe.train(training)
                step = pipe.eval_step(
                    ids=IDS, **call, loss_fn=lambda o: o["logits"].square().mean(), outputs="list"
                )
                for one, other in zip(plain, step.outputs, strict=True):
                    assert one.keys() == other.keys()
                    assert all(torch.equal(one[k], other[k]) for k in one)
                assert pipe.training is training


@pytest.mark.parametrize("example", [{}, {"labels": LABELS}], ids=["without", "with"])
def test_gradients_of_another_signature(example: dict[str, Any]) -> None:
    with pipeline(example) as pipe:
        pipe.model.drop.p = 0.0
        for call in ({"labels": LABELS}, {"labels": LABELS, "mask": MASK}):
            total = torch.zeros(())
            for part in parts_of(call):
                loss = pipe.model(**part)["loss"]
                (loss * (1 / 3)).backward()
                total = total + loss.detach() * (1 / 3)
            expected = [p.grad for p in pipe.parameters()]
            pipe.zero_grad()
            loss = pipe.train_step(ids=IDS, **call, loss_fn=lambda output: output["loss"])
            assert torch.equal(loss, total)
            for parameter, gradient in zip(pipe.parameters(), expected, strict=True):
                assert gradient is not None
                assert torch.equal(parameter.grad, gradient)
            pipe.zero_grad()


def test_dropout_of_another_signature_is_random_in_training_only() -> None:
    """Also where the example's own signature is the same in both modes."""
    with pipeline({}) as pipe:
        pipe.eval()
        assert torch.equal(*(pipe(ids=IDS, mask=MASK)["logits"] for _ in range(2)))
        pipe.train()
        assert not torch.equal(*(pipe(ids=IDS, mask=MASK)["logits"] for _ in range(2)))
        pipe.eval()
        assert torch.equal(*(pipe(ids=IDS, mask=MASK)["logits"] for _ in range(2)))


class Denoiser(nn.Module):
    """Takes a time step for every row, or one for all, as a tensor or as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, time: torch.Tensor | float) -> torch.Tensor:
        if not isinstance(time, torch.Tensor):
            time = torch.tensor([time], dtype=torch.float32)
        elif time.ndim == 0:
            time = time[None]
        return self.b((self.a(x) + time.expand(len(x))[:, None]).tanh())


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))


def test_a_time_step_for_every_row_or_for_all() -> None:
    torch.manual_seed(0)
    model = Denoiser()
    options: dict[str, Any] = {"num_microbatches": 2, "cuts": ["b"]}
    with ps.Pipeline(
        model, (X, torch.rand(6)), devices=["cpu", "cpu"], **options, replicas=1
    ) as pipe:
        for time in (torch.tensor(3.0), torch.tensor(7.0), 5.0, torch.rand(6)):
            times = time.chunk(2) if isinstance(time, torch.Tensor) and time.ndim else [time] * 2
            plain = torch.cat([model(x, t) for x, t in zip(X.chunk(2), times, strict=True)])
            assert torch.equal(pipe(X, time), plain)
        ways = len(pipe._runner.ways(True))
        for step in range(50):  # tensors are values: no way is made of them
            pipe(X, torch.tensor(float(step)))
        assert len(pipe._runner.ways(True)) == ways


class Named(nn.Module):
    """Does what an argument says."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.a(x) * len(name)


def test_plain_values_without_end_are_refused_in_time() -> None:
    x = torch.randn(6, 4)
    with ps.Pipeline(Named(), (x, ""), devices=["cpu"], num_microbatches=2, replicas=1) as pipe:
        for step in range(1, 32):
            pipe(x, "a" * step)
        with pytest.raises(ps.InputError, match="32 signatures"):
            pipe(x, "a" * 32)
        for name in ("", "aaa"):
            assert torch.equal(pipe(x, name), torch.cat([pipe.model(p, name) for p in x.chunk(2)]))


def test_arguments_that_the_model_does_not_take() -> None:
    with pipeline({}) as pipe:
        expected = pipe.eval()(ids=IDS)["logits"]
        with pytest.raises(ps.InputError, match=r"another structure.*masks=Tensor.*TypeError"):
            pipe(ids=IDS, masks=MASK)
        with pytest.raises(ps.InputError, match=r"another structure.*: \(\), but.*captured with"):
            pipe()
        with pytest.raises(ps.InputError, match=r"different batch sizes"):
            pipe(ids=IDS, mask=MASK[:4])
        assert torch.equal(pipe(ids=IDS)["logits"], expected)


def test_dimensions_that_vary_of_arguments_that_the_example_lacks() -> None:
    length = {1: "length"}
    dynamic = {"ids": length, "labels": length}
    with pipeline({}, dynamic=dynamic) as pipe:
        pipe.eval()
        for n in (5, 3, 4):
            step = pipe.eval_step(
                ids=IDS[:, :n], labels=LABELS[:, :n], loss_fn=lambda o: o["loss"], outputs="list"
            )
            parts = zip(IDS[:, :n].chunk(3), LABELS[:, :n].chunk(3), strict=True)
            for one, (ids, labels) in zip(step.outputs, parts, strict=True):
                assert torch.equal(one["loss"], pipe.model(ids, labels=labels)["loss"])


def test_eval_step_leaves_everything_as_it_was() -> None:
    with pipeline({"labels": LABELS}) as pipe:
        pipe.model.a.eval()
        modes = [m.training for m in pipe.model.modules()]
        one = pipe.eval_step(ids=IDS, labels=LABELS, loss_fn=lambda o: o["loss"])
        two = pipe.eval_step(ids=IDS, labels=LABELS, loss_fn=lambda o: o["loss"])
        assert torch.equal(one, two)  # without dropout
        assert not one.requires_grad
        assert [m.training for m in pipe.model.modules()] == modes
        assert all(p.grad is None for p in pipe.parameters())
        step = pipe.eval_step(
            ids=IDS,
            labels=LABELS,
            target=LABELS,
            loss_fn=lambda o, t: o["loss"],
            metrics=lambda o, t: (o["logits"].argmax(-1) == t).sum(),
        )
        pipe.eval()
        plain = [pipe.model(**part) for part in parts_of({"labels": LABELS})]
        hits = [
            (o["logits"].argmax(-1) == t).sum() for o, t in zip(plain, LABELS.chunk(3), strict=True)
        ]
        assert all(map(torch.equal, step.metrics, hits))
        with pytest.raises(ps.WorkerError):
            pipe.train().eval_step(ids=IDS, labels=LABELS, loss_fn=lambda o: o["nothing"])
        assert pipe.training
