"""Lightning's `Trainer` through pipelines, beside a loop of plain PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import penstock as ps
from penstock.errors import InputError
from penstock.integrations.lightning import PenstockStrategy
from penstock.oracle import Oracle

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]
ROWS, MICROBATCHES, EPOCHS = 12, 3, 2


def network(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout),
        nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3),
    )  # fmt: skip


class Lit(lightning.LightningModule):
    """As anybody would write it; nothing in it knows of Penstock."""

    def __init__(self, net: nn.Module, lr: float = 0.05) -> None:
        super().__init__()
        self.net = net
        self.lr = lr
        self.losses: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def loss(self, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x).float(), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Manual(Lit):
    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers().step()


class AtOnce(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        strategy = self.trainer.strategy
        loss = strategy.train_step(x, target=y, loss_fn=F.cross_entropy)
        self.losses.append(loss)
        self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()


class Unclipped(AtOnce):
    """Gradients are scaled until the optimizer's step."""

    def clip_gradients(self, *_: Any, **__: Any) -> None: ...


def data() -> DataLoader[Any]:
    """Four batches; the last one is smaller."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(3 * ROWS + 7, 6, generator=generator)
    y = torch.randint(0, 3, (len(x),), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=ROWS)


def strategy(**options: Any) -> PenstockStrategy:
    usual = {"devices": 2, "num_microbatches": MICROBATCHES, "replicas": 1, "progress": None}
    return PenstockStrategy(**(usual | options))


def trainer(strategy: Any, **options: Any) -> lightning.Trainer:
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": EPOCHS,
    }
    return lightning.Trainer(strategy=strategy, **(quiet | options))


def plain_loop(
    net: nn.Module,
    *,
    clip: Callable[[list[nn.Parameter]], Any] = lambda parameters: None,
    accumulate: int = 1,
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    scaler: torch.amp.GradScaler | None = None,
    at_once: bool = False,
) -> list[torch.Tensor]:
    """What Lightning does, by hand on one device; returns the losses."""
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    parameters = list(net.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    losses: list[torch.Tensor] = []

    def loss_fn(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(output.float(), y)
        losses.append(loss.detach())
        return scaler.scale(loss / accumulate)

    for _ in range(EPOCHS):
        batches = list(data())
        for k, (x, y) in enumerate(batches):
            if k % accumulate == 0:
                optimizer.zero_grad()
            with around():
                oracle = Oracle(net, (x,), {}, MICROBATCHES)
                if at_once:
                    scaled = lambda o, y: scaler.scale(F.cross_entropy(o, y))  # noqa: E731
                    losses.append(oracle.train_step(k, scaled, y) / scaler.get_scale())
                else:
                    oracle.call_and_backward(k, loss_fn, y)
            if (k + 1) % accumulate == 0 or k + 1 == len(batches):
                scaler.unscale_(optimizer) if scaler.is_enabled() else None
                clip(parameters)
                scaler.step(optimizer)
                scaler.update()
        scheduler.step()
    return losses


def check_same(lit: Lit, net: nn.Module, losses: Sequence[torch.Tensor]) -> None:
    wanted = net.state_dict()
    found = lit.net.state_dict()
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    assert len(lit.losses) == len(losses) > 0
    assert all(map(torch.equal, lit.losses, losses))


def test_the_bits_are_those_of_one_device() -> None:
    net, lit = twins()
    trainer(strategy()).fit(lit, data(), data())
    check_same(lit, net, plain_loop(net))


def twins(kind: type[Lit] = Lit) -> tuple[nn.Module, Lit]:
    torch.manual_seed(3)
    net = network()
    lit = kind(network())
    lit.net.load_state_dict(net.state_dict())
    return net, lit


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping(algorithm: str) -> None:
    net, lit = twins()
    options = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
    trainer(strategy(), **options).fit(lit, data())
    by = nn.utils.clip_grad_norm_ if algorithm == "norm" else nn.utils.clip_grad_value_
    check_same(lit, net, plain_loop(net, clip=lambda parameters: by(parameters, 0.05)))


def test_accumulation() -> None:
    net, lit = twins()
    trainer(strategy(), accumulate_grad_batches=3).fit(lit, data())
    check_same(lit, net, plain_loop(net, accumulate=3))


def test_manual_optimization() -> None:
    net, lit = twins(Manual)
    trainer(strategy()).fit(lit, data())
    check_same(lit, net, plain_loop(net, clip=lambda ps: nn.utils.clip_grad_norm_(ps, 0.1)))


def test_manual_optimization_with_a_step_at_once() -> None:
    net, lit = twins(AtOnce)
    trainer(strategy()).fit(lit, data())
    clip = lambda ps: nn.utils.clip_grad_norm_(ps, 0.1)  # noqa: E731
    check_same(lit, net, plain_loop(net, clip=clip, at_once=True))


def test_mixed_precision_in_bfloat16() -> None:
    net, lit = twins()
    trainer(strategy(), precision="bf16-mixed").fit(lit, data())
    around = lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False)  # noqa: E731
    check_same(lit, net, plain_loop(net, around=around))


def test_mixed_precision_in_float16() -> None:
    net, lit = twins()
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**20))
    trainer(strategy(), plugins=[plugin], gradient_clip_val=0.5).fit(lit, data())
    assert plugin.scaler.get_scale() < 2.0**20  # a step was left out
    losses = plain_loop(
        net,
        clip=lambda ps: nn.utils.clip_grad_norm_(ps, 0.5),
        around=lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
        scaler=torch.amp.GradScaler("cpu", init_scale=2.0**20),
    )
    check_same(lit, net, losses)


def test_a_step_at_once_in_float16() -> None:
    net, lit = twins(Unclipped)
    own, scaler = (torch.amp.GradScaler("cpu", init_scale=2.0**20) for _ in range(2))
    plugin = MixedPrecision("16-mixed", "cpu", own)
    trainer(strategy(), plugins=[plugin]).fit(lit, data())
    around = lambda: torch.autocast("cpu", torch.float16, cache_enabled=False)  # noqa: E731
    check_same(lit, net, plain_loop(net, around=around, scaler=scaler, at_once=True))
    assert plugin.scaler is own  # for the next pipeline
    assert own.get_scale() == scaler.get_scale() < 2.0**20


def test_weights_in_bfloat16() -> None:
    net, lit = twins()
    net.to(torch.bfloat16)

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        torch.set_default_dtype(torch.bfloat16)
        yield
        torch.set_default_dtype(torch.float32)

    trainer(strategy(), precision="bf16-true").fit(lit, data())
    with as_bfloat16():
        check_same(lit, net, plain_loop(net, around=around))


@contextlib.contextmanager
def as_bfloat16() -> Iterator[None]:
    """While open, `data()` gives what Lightning converts batches to."""
    plain = globals()["data"]
    globals()["data"] = lambda: [(x.to(torch.bfloat16), y) for x, y in plain()]
    yield
    globals()["data"] = plain


@pytest.mark.usefixtures("pool")
def test_worker_processes() -> None:
    net, lit = twins()
    trainer(strategy(workers="processes"), gradient_clip_val=0.05).fit(lit, data(), data())
    check_same(lit, net, plain_loop(net, clip=lambda ps: nn.utils.clip_grad_norm_(ps, 0.05)))


def test_the_module_itself() -> None:
    """Its forward is split, and its steps call `self(x)`."""

    class Several(Lit):
        def __init__(self, net: nn.Module) -> None:
            super().__init__(net)
            self.head = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.net(x))

        def loss(self, batch: Any) -> torch.Tensor:
            return F.cross_entropy(self(batch[0]), batch[1])

    net, lit = twins(Several)
    whole = nn.Sequential(net, nn.Linear(3, 3))
    whole[1].load_state_dict(lit.head.state_dict())
    through = strategy(module="")
    seen = Seen()
    trainer(through, callbacks=[seen]).fit(lit, data())
    check_same(lit, net, plain_loop(whole))
    assert torch.equal(lit.head.weight, whole[1].weight)
    assert seen.stages == 2


class Seen(Callback):
    """What the pipeline was, while there was one."""

    stages = microbatches = 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        (pipe,) = trainer.strategy.pipelines.values()
        self.stages = len(pipe.plan.stages)
        self.microbatches = pipe.plan.num_microbatches


def test_two_networks_have_a_pipeline_each() -> None:
    class Two(Lit):
        def __init__(self, net: nn.Module) -> None:
            super().__init__(net)
            self.judge = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))

        def loss(self, batch: Any) -> torch.Tensor:
            return F.cross_entropy(self.judge(self.net(batch[0])), batch[1])

    net, lit = twins(Two)
    judge = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))
    judge.load_state_dict(lit.judge.state_dict())
    trainer(strategy(module=["net", "judge"])).fit(lit, data())
    check_same(lit, net, plain_loop(nn.Sequential(net, judge)))


def test_validation_test_and_prediction_run_in_the_pipeline() -> None:
    net, lit = twins()
    of = trainer(strategy())
    of.fit(lit, data(), data())
    assert set(of.callback_metrics) == {"loss", "val"}
    plain_loop(net)
    net.eval()
    with torch.no_grad():
        wanted = [Oracle(net, (x,), {}, MICROBATCHES).call(0) for x, _ in data()]
        outputs = [
            (F.cross_entropy(o, y), len(y)) for o, (_, y) in zip(wanted, data(), strict=True)
        ]
    mean = sum(float(loss) * rows for loss, rows in outputs) / sum(rows for _, rows in outputs)
    assert of.test(lit, data(), verbose=False)[0]["test"] == pytest.approx(mean)
    found = of.predict(lit, data())
    assert found is not None
    assert all(map(torch.equal, found, wanted))


def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    """With dropout, whose masks depend on the pipeline's random state."""

    def fit(epochs: int, start: str | None = None) -> Lit:
        lightning.seed_everything(5, verbose=False)
        lit = Lit(network(0.3))
        if start:
            lightning.seed_everything(99, verbose=False)
        of = trainer(strategy(), max_epochs=epochs)
        of.fit(lit, data(), ckpt_path=start)
        of.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return lit

    whole = fit(3)
    fit(1)
    resumed = fit(3, str(tmp_path / "1.ckpt"))
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def test_a_resumed_run_has_as_many_microbatches(tmp_path: Path) -> None:
    whole, seen = {"limit_train_batches": 3}, Seen()  # with 12 rows each
    of = trainer(strategy(num_microbatches=5), max_epochs=1, **whole)
    of.fit(Lit(network()), data())
    of.save_checkpoint(tmp_path / "run.ckpt")
    through = strategy(num_microbatches="auto")
    again = trainer(through, max_epochs=2, callbacks=[seen], **whole)
    again.fit(Lit(network()), data(), ckpt_path=tmp_path / "run.ckpt")
    assert seen.microbatches == 5


def test_checkpoints_are_plain(tmp_path: Path) -> None:
    _, lit = twins()
    keep = ModelCheckpoint(tmp_path, monitor="val", save_last=True)
    options = {"enable_checkpointing": True, "callbacks": [keep], "enable_progress_bar": False}
    trainer(strategy(), **options).fit(lit, data(), data())
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    plain = network()
    plain.load_state_dict({k.removeprefix("net."): v for k, v in saved["state_dict"].items()})
    optimizer = torch.optim.AdamW(plain.parameters())
    optimizer.load_state_dict(saved["optimizer_states"][0])
    assert optimizer.state_dict()["state"][0]["step"] == EPOCHS * len(data())
    assert Path(keep.best_model_path).exists()
    trainer("auto", max_epochs=EPOCHS + 1).fit(lit, data(), ckpt_path=tmp_path / "last.ckpt")


def test_logging_and_progress_bars(tmp_path: Path) -> None:
    _, lit = twins()
    logger = CSVLogger(tmp_path)
    options = {"enable_progress_bar": True, "callbacks": [TQDMProgressBar()]}
    trainer(strategy(), logger=logger, log_every_n_steps=1, **options).fit(lit, data(), data())
    lines = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    assert len(lines) == 1 + EPOCHS * (len(data()) + 1)


def test_the_module_is_as_it_was_afterwards() -> None:
    _, lit = twins()
    before = set(vars(lit.net))
    trainer(strategy()).fit(lit, data())
    assert set(vars(lit.net)) == before
    x = torch.randn(4, 6)
    assert torch.equal(lit.eval()(x), lit.net(x))


def test_devices_of_the_trainer_are_used() -> None:
    _, lit = twins()
    seen = Seen()
    through = PenstockStrategy(num_microbatches=MICROBATCHES, replicas=1, progress=None)
    trainer(through, devices=2, callbacks=[seen]).fit(lit, data())
    assert seen.stages == 2


# -- mistakes --------------------------------------------------------------------------------------


def test_options_that_do_not_exist_are_errors() -> None:
    with pytest.raises(InputError, match=r"num_microbatch=4; did you mean num_microbatches=\?"):
        PenstockStrategy(num_microbatch=4)
    with pytest.raises(InputError, match="args= is not given: the first batch is the example"):
        PenstockStrategy(args=(1,))
    with pytest.raises(InputError, match="workers='thread' is unknown"):
        PenstockStrategy(workers="thread")
    for workers in ("ray", ps.Ray()):
        with pytest.raises(InputError, match="workers in a Ray cluster keep weights"):
            PenstockStrategy(workers=workers)


def test_devices_in_two_places_are_an_error() -> None:
    with pytest.raises(InputError, match="Trainer has 3 devices and the strategy devices=2"):
        trainer(strategy(), devices=3)


def test_a_module_that_has_to_be_named() -> None:
    lit = Lit(network())
    lit.head = nn.Linear(3, 3)
    with pytest.raises(InputError, match=r"several children with parameters, 'net', 'head': say"):
        trainer(strategy()).fit(lit, data())
    with pytest.raises(InputError, match=r"Lit has no module 'nett'; its children are 'net'"):
        trainer(strategy(module="nett")).fit(Lit(network()), data())
    lit = Lit(nn.Identity())
    with pytest.raises(InputError, match="no child with parameters"):
        trainer(strategy()).fit(lit, data())
    with pytest.raises(InputError, match=r"'net.0' is a part of 'net'"):
        trainer(strategy(module=["net", "net.0"])).fit(Lit(network()), data())


def test_a_module_that_is_not_called_is_an_error() -> None:
    class ByForward(Lit):
        def loss(self, batch: Any) -> torch.Tensor:
            return F.cross_entropy(self.net.forward(batch[0]), batch[1])

    with pytest.raises(InputError, match="training_step did not call 'net'"):
        trainer(strategy()).fit(ByForward(network()), data())


def test_a_step_at_once_in_automatic_optimization_is_an_error() -> None:
    class Wrong(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            return self.trainer.strategy.train_step(x, target=y, loss_fn=F.cross_entropy)

    with pytest.raises(InputError, match="automatic_optimization = False"):
        trainer(strategy()).fit(Wrong(network()), data())
