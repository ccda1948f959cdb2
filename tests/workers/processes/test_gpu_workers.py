"""Worker processes on GPUs: they have the model's memory there, and let go of it."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock as ps
from tests.generation.subjects import expected, gpt2, padded, tokens
from tests.generation.subjects import pipeline as generating
from tests.support.models import uniform_plan

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # of autograd's own thread
]
WIDTH, CLASSES, ROWS = 16, 4, 12
GPU = "cuda:0"


def model() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def batch(device: str = GPU) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x.to(device), torch.randint(CLASSES, (ROWS,), generator=generator).to(device)


def pipeline(of: nn.Module, workers: Any = "processes", **options: Any) -> ps.Pipeline:
    x, _ = batch()
    program = ps.capture(of, (x,))
    given = {"plan": uniform_plan(program, 2, 3), "devices": [GPU, GPU], **options}
    return ps.Pipeline(
        of, (x,), program=program, workers=workers, threads_per_worker=1, progress=None, **given
    )


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def trained(workers: Any, **options: Any) -> list[Tensor]:
    """What three steps leave, with a loss whose weights are on the GPU, and everything in bf16."""
    own = model().to(GPU)
    weights = torch.linspace(0.5, 2.0, CLASSES, device=GPU)
    torch.manual_seed(7)
    with pipeline(own, workers, audit=None, **options) as pipe:
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.01)
        found = []
        for _ in range(3):
            x, y = batch()
            with torch.autocast("cuda", torch.bfloat16):
                loss = pipe.train_step(
                    x, target=y, loss_fn=lambda o, t: F.cross_entropy(o.float(), t, weights)
                )
            pipe.clip_grad_norm_(0.5)
            found += [loss, *(p.grad.clone() for p in own.parameters() if p.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
        pipe.eval()
        with torch.no_grad():
            found.append(pipe(batch()[0]))
        found += [value for _, value in sorted(pipe.state_dict().items())]
    return [*found, *own.parameters()]


@pytest.mark.parametrize("options", [{}, {"cuda_graphs": True}])
def test_the_bits_are_those_of_threads(options: dict[str, Any]) -> None:
    ours, theirs = trained("processes", **options), trained("threads")
    assert [a.device for a in ours] == [b.device for b in theirs]
    assert [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)] == [True] * len(ours)


def test_values_stay_on_the_gpu() -> None:
    with pipeline(model().to(GPU)) as pipe:
        assert pipe.links == ("shared memory (cuda)",)


@pytest.mark.parametrize("when", ["before", "after"])
def test_settings_of_cuda_are_those_of_the_script(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512)).to(GPU).eval()
    x = torch.randn(64, 512, device=GPU)
    if when == "before":
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    with (
        ps.Pipeline(
            wide, (x,), devices=[GPU, GPU], workers="processes", replicas=1, num_microbatches=1
        ) as pipe,
        torch.no_grad(),
    ):
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
        rounded = wide(x)
        assert torch.equal(pipe(x), rounded)
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
        assert not torch.equal(wide(x), rounded)
        assert torch.equal(pipe(x), wide(x))


def test_memory_is_let_go() -> None:
    used = []
    for _ in range(3):  # cuBLAS keeps what it takes in the first
        own = model().to(GPU)
        with pipeline(own) as pipe:
            x, y = batch()
            pipe.train_step(x, target=y, loss_fn=F.cross_entropy)
        del own, pipe, x, y
        gc.collect()
        torch.cuda.ipc_collect()
        used.append(torch.cuda.memory_allocated(0))
    assert used[1] == used[2] == used[0]


def test_gradients_that_are_kept_stay_what_they_are() -> None:
    own = model().to(GPU)
    with pipeline(own) as pipe:
        x, y = batch()
        pipe.train_step(x, target=y, loss_fn=F.cross_entropy)
        kept = [p.grad for p in own.parameters() if p.grad is not None]
        views = [gradient.view(-1)[1:] for gradient in kept]
        copies = [gradient.clone() for gradient in kept]
        parts = [view.clone() for view in views]
        for round_ in range(3):
            own.zero_grad()
            if round_ == 1:
                kept = []
            pipe.train_step(2 * x, target=y, loss_fn=F.cross_entropy)
            assert all(map(torch.equal, kept, copies))
            assert all(map(torch.equal, views, parts))
        summed = [p.grad.clone() for p in own.parameters() if p.grad is not None]
        pipe.train_step(2 * x, target=y, loss_fn=F.cross_entropy)  # adds to them
        assert not any(
            torch.equal(p.grad, s) for p, s in zip(own.parameters(), summed, strict=True)
        )


def test_an_error_leaves_the_pipeline_usable_and_a_dead_worker_does_not() -> None:
    own = model().to(GPU)
    with pipeline(own) as pipe:
        x, y = batch()
        with pytest.raises(ps.WorkerError, match="in the loss"):
            pipe.train_step(x, target=y, loss_fn=lambda o, t: o["nothing"])
        assert all(p.grad is None for p in own.parameters())
        pipe.train_step(x, target=y, loss_fn=F.cross_entropy)
        os.kill(pipe.members[1].pid, signal.SIGKILL)
        with pytest.raises(ps.WorkerDied):
            pipe.train_step(x, target=y, loss_fn=F.cross_entropy)


def test_a_cpu_and_a_gpu_together() -> None:
    """Kernels of different devices round differently, so this one is compared with a tolerance."""
    ours, theirs = model().eval(), model().eval().to(GPU)
    x, y = batch()
    program = ps.capture(ours, (x.cpu(),))
    devices = ["cpu", GPU]
    with ps.Pipeline(
        ours,
        (x.cpu(),),
        program=program,
        plan=uniform_plan(program, 2, 3),
        devices=devices,
        workers="processes",
        progress=None,
    ) as pipe:
        pipe.train_step(x.cpu(), target=y, loss_fn=F.cross_entropy)
        assert {p.device.type for p in ours.parameters()} == {"cpu", "cuda"}
        F.cross_entropy(theirs(x), y).backward()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(a.grad.to(GPU), b.grad, rtol=1e-3, atol=1e-5)


def test_generation() -> None:
    own = gpt2().to(GPU)
    ids = tokens().to(GPU)
    for options in ({"max_new_tokens": 8}, {"max_new_tokens": 8, "do_sample": True}):
        wanted = padded(expected(own, [ids[:2], ids[2:]], **options))
        with generating(own, "processes", devices=[GPU, GPU]) as pipe:
            found = pipe.generate(ids, seed=0, group_size=2, **options)
        assert torch.equal(found, wanted)


def test_what_is_for_cpus_is_refused() -> None:
    own = model().to(GPU)
    with pytest.raises(ps.InputError, match=r"on_failure= is for worker processes on CPUs"):
        pipeline(own, on_failure="replace")
    with pytest.raises(ps.InputError, match=r"replicas=2 on cuda:0 are for workers=\"threads\""):
        ps.Pipeline(
            own, (batch()[0],), devices=[GPU, GPU], replicas=2, workers="processes", progress=None
        )
