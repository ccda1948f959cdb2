"""What the ranks of the tests do, each as a function of its rank; they return what is compared."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import random
import signal
import socket
import struct
import sys
import time
import traceback
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import penstock as ps
from penstock import steps
from penstock.board import memory
from penstock.links import handshake, process_group
from penstock.links.process_group import Have, Signal
from penstock.loading import tolerate_missing_torchvision_operators
from penstock.storage import folder, part
from penstock.workers import heartbeat
from penstock.workers.ranks import clocks, operations, rendezvous
from tests.checkpoint import autosaving_ranks
from tests.checkpoint.steps import Run
from tests.pipeline.subjects import run, sampled
from tests.support import precision
from tests.support.delays import slow_stages
from tests.support.models import uniform_plan
from tests.support.training import LABELS, USES, balanced, hits, split, used
from tests.support.training import X as X_ROUTED
from tests.support.traps import Trap, divide
from tests.workers.contract.clauses import CLAUSES
from tests.workers.ranks import replicated
from tests.workers.ranks.steps import EXACT, LARGER, X, Y, everything, small_pipe


def same_bits(rank: int) -> Any:
    """Everything that threads do as well."""
    return everything({}, EXACT)


def same_bits_of_larger_models(rank: int) -> Any:
    """The same, with models that take longer to import."""
    tolerate_missing_torchvision_operators()
    return everything({}, LARGER)


def training(rank: int) -> Any:
    """Losses, metrics, hooks and clipping; and what must be alike on all ranks that is not."""
    found = {name: used(name) for name in USES}
    with split("losses") as pipe:
        has_loss = pipe._runner.workers.role.has_loss
        mine = {"target": LABELS, "loss_fn": balanced} if has_loss else {}
        data = (X_ROUTED, LABELS) if pipe._runner.workers.role.has_inputs else ()
        partial = pipe.train_step(*data, **mine)
        asked = {} if has_loss else {"metrics": hits}
        alone = raised(lambda: pipe.train_step(*data, **mine, **asked))
        failed = raised(lambda: pipe.train_step(*data, **mine, metrics=divides))
    return found, partial, alone, failed


WHEN: list[tuple[float, float]] = []
"""From when to when forwards of `Slow` ran in this process, by the machine's clock."""


class Slow(nn.Module):
    """Sleeps, as if its device were busy."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Twice the input, after a while."""
        begun = time.monotonic()
        time.sleep(0.05)
        WHEN.append((begun, time.monotonic()))
        return 2 * x


def mapped(rank: int) -> Any:
    """When the stages worked on eight batches; and what came of them."""
    model = nn.Sequential(Slow(), Slow())
    with ps.Pipeline(model, (X,), num_microbatches=1, schedule="gpipe", cuts=["1"]) as pipe:
        feeds = pipe._runner.workers.role.has_inputs
        batches = [(k * X,) if feeds else () for k in range(8)]
        list(pipe.map(batches[:1]))
        WHEN.clear()
        results = list(pipe.map(batches, ahead=3))
        whole = list(WHEN)
        left = next(iter(pipe.map(batches, ahead=3)))  # and the rest is not wanted
        again = list(pipe.map(batches))
    return whole, results, left, again


def compiled(rank: int) -> Any:
    """Batches by stages that are compiled; how many parts were; and that none is trained."""
    parts = []

    def backend(module: Any, inputs: Any) -> Any:
        parts.append(module)
        return module.forward

    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).eval()
    with ps.Pipeline(
        *(model, (X,)), num_microbatches=1, inference=True, compile={"backend": backend}
    ) as pipe:
        feeds = pipe._runner.workers.role.has_inputs
        results = list(pipe.map([(X,) if feeds else ()] * 3))
        refused = raised(lambda: pipe.train_step(X, target=Y, loss_fn=torch.sum))
        inference = pipe.plan.inference
    return results, model(X).detach(), len(parts), inference, refused


def divides(output: Any, target: Any) -> float:
    """Metrics that fail."""
    return 1 / 0


def contract(rank: int) -> dict[str, str]:
    """What went wrong in each clause of the contract of workers."""
    found = {}
    for name, clause in CLAUSES.items():
        try:
            clause("torchrun")
            found[name] = ""
        except BaseException:
            found[name] = traceback.format_exc()
    return found


def contract_sample(rank: int) -> Any:
    """A point of the contract's product for every model."""
    from tests.pipeline.test_same_bits import NAMES, TWO

    tolerate_missing_torchvision_operators()
    chosen = [(name, p) for k, name in enumerate(NAMES) for p in sampled(TWO, 11 * k, 1)]
    return {(name, point): run(name, point) for name, point in chosen}


def contract_product(rank: int, name: str) -> Any:
    """All that two ranks can run, of one model."""
    from tests.pipeline.test_same_bits import TWO

    tolerate_missing_torchvision_operators()
    chosen = [(name, point) for point in TWO]
    return {(name, point): run(name, point) for name, point in chosen}


def any_replicas(rank: int, shape: str) -> Any:
    """The models of the contract on as many replicas, of which one is late."""
    from tests.pipeline.test_any_replicas import NAMES, parsed

    tolerate_missing_torchvision_operators()
    point, replicas = parsed(shape)
    with slow_stages(rank) if rank == 1 else nullcontext():
        return {name: run(name, point, replicas) for name in NAMES}


def apart(rank: int) -> None:
    """Let this rank take itself for one on a machine of its own."""
    for module in (handshake, rendezvous):
        module.this_machine = lambda: f"machine {rank}"


def a_group(rank: int) -> Any:
    """A process group of the script's own, without a word of torchrun in the environment."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        os.environ.pop(name)
    address = f"tcp://127.0.0.1:{os.environ.pop('MASTER_PORT')}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    alone = raised(lambda: trapped(2, devices=["cpu"] * 2))
    with trapped(2, workers="torchrun") as pipe:
        step(pipe)
        return alone, pipe.links


def stale(rank: int) -> Any:
    """`model.state_dict()` between steps, in a wrapper, of copies; after `pipe.state_dict()`."""
    with trapped(2) as pipe:
        model, wrapper = pipe.model, nn.ModuleList([pipe.model])
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        found: dict[str, Any] = {"before": raised(model.state_dict)}
        step(pipe)
        optimizer.step()
        for name, module in (("model", model), ("wrapper", wrapper), ("part", model[0])):
            found[name] = raised(module.state_dict)
        found["pickled"] = raised(lambda: pickle.dumps(model))
        copied = copy.deepcopy(model)
        found["copy"] = raised(copied.state_dict)
        found["live"] = raised(lambda: model.state_dict(keep_vars=True))
        expected = copy.deepcopy(pipe.state_dict())
        found["refreshed"] = copy.deepcopy(model.state_dict()), expected
        optimizer.step()
        found["stepped"] = raised(model.state_dict)
        model.load_state_dict(expected)
        found["loaded"] = raised(model.state_dict)
        step(pipe)
        found["again"] = raised(model.state_dict)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.state_dict()
    found["closed"] = [str(warning.message) for warning in caught]
    return found


def listening(rank: int) -> Any:
    """On which addresses this rank listens that it did not before: as it connects, and later.

    And how many more sockets it has open when the pipeline is closed.
    """
    dist.init_process_group("gloo")
    dist.barrier()
    before, found, open_before = tcp_servers(), [], len(open_sockets())
    connect = rendezvous.Others.connect

    def watched(self: Any, peers: dict[int, int]) -> Any:
        found.append(tcp_servers())
        return connect(self, peers)

    rendezvous.Others.connect = watched  # type: ignore[method-assign]
    with trapped(2):
        after = tcp_servers()
    new = {address for servers in found for address in servers - before}
    gc.collect()  # what is closed refers to itself
    left = len(open_sockets()) - open_before
    return sorted(ip for ip, _ in new), sorted(ip for ip, _ in after & new), left


def listening_apart(rank: int) -> Any:
    """The same, as if every rank were on a machine of its own."""
    apart(rank)
    return listening(rank)


def tcp_servers() -> set[tuple[str, int]]:
    """Addresses and ports on which this process listens."""
    own = open_sockets()
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in own:
                host, port = local.split(":")
                words = struct.unpack(f">{len(host) // 8}I", bytes.fromhex(host))
                ip = socket.inet_ntop(family, struct.pack(f"<{len(words)}I", *words))
                found.add((ip, int(port, 16)))
    return found


def open_sockets() -> set[str]:
    """The sockets that this process has, as Linux names them."""
    found = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if has(fd)}
    return {name for name in found if name.startswith("socket:")}


def has(fd: str) -> bool:
    """Whether it is open; that with which the folder was read is not any more."""
    return os.path.exists(f"/proc/self/fd/{fd}") or os.path.islink(f"/proc/self/fd/{fd}")


def use_one_core(rank: int) -> None:
    """So that there is one intra-op thread, as with threads: their number makes bits differ."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [cores[rank % len(cores)]])


def by_process_group(rank: int) -> Any:
    """The same, as if every rank were on a machine of its own."""
    apart(rank)
    use_one_core(rank)
    return everything({}, EXACT)


def mixed_precision(rank: int) -> Any:
    """Autocast, loss scaling, master weights, boundaries in half precision."""
    return precision.everything({})


def narrow_by_process_group(rank: int) -> Any:
    """The last of it, as if every rank were on a machine of its own."""
    apart(rank)
    use_one_core(rank)
    torch.manual_seed(3)
    return {"narrow": precision.narrow({})}


def replicas(rank: int, shape: str) -> Any:
    """Everything that one pipeline does, with stages x replicas."""
    return replicated.everything(shape)


def replicas_by_process_group(rank: int, shape: str) -> Any:
    """Some of it, as if every rank were on a machine of its own."""
    apart(rank)
    use_one_core(rank)
    return replicated.some(shape)


def refused(rank: int) -> Any:
    """What replicas on ranks cannot have."""
    return replicated.refused(rank)


def failed_step(rank: int) -> Any:
    """What follows an optimizer's step that fails on one rank."""
    return replicated.failed_step(rank)


def trapped(stages: int, **options: Any) -> ps.Pipeline:
    """A pipeline with a trap in every stage."""
    torch.manual_seed(3)
    parts = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), Trap()) for _ in range(stages)]
    model = nn.Sequential(*parts)
    names = [str(k) for k in range(stages)]
    program = ps.capture(model, (X,), keep_closed=names)
    plan = uniform_plan(program, stages, 3)
    return ps.Pipeline(model, (X,), program=program, plan=plan, **options)


def step(pipe: ps.Pipeline, **options: Any) -> torch.Tensor:
    return pipe.train_step(X, **{"target": Y, "loss_fn": F.mse_loss, **options})


def raised(work: Any) -> tuple[str, str, str, Any]:
    """The error that it ends in: its class, its text, the class of its cause, and where."""
    try:
        work()
    except ps.PenstockError as error:
        notes = "".join(getattr(error, "__notes__", ()))
        at = getattr(error, "stage", None), getattr(error, "microbatch", None)
        cause = type(error.__cause__).__name__
        return type(error).__name__, f"{error} {notes}", cause, at
    return "", "", "", None


def failures(rank: int) -> Any:
    """Every one of them is the same error on both ranks, and the next step is clean."""
    found: dict[str, Any] = {}

    def bad_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise KeyError("no such class")

    with trapped(2, timeout=30) as pipe:
        before = {name: value.clone() for name, value in pipe.state_dict().items()}
        trap: Trap = pipe.model[rank][2]
        for armed in (0, 1):
            for where in ("forward", "backward"):
                if rank == armed:
                    trap.arm(where, divide)
                found[f"{where} {armed}"] = raised(lambda: step(pipe))
                trap.disarm()
        found["loss"] = raised(lambda: step(pipe, loss_fn=bad_loss))
        x = X.double() if rank == 0 else X
        found["batch"] = raised(lambda: pipe.train_step(x, target=Y, loss_fn=F.mse_loss))
        found["target"] = raised(lambda: step(pipe, target=Y[:3] if rank == 1 else Y))
        found["no inputs"] = raised(lambda: pipe.train_step(target=Y, loss_fn=F.mse_loss))
        found["no loss"] = raised(lambda: pipe.train_step(X))
        found["mixed"] = raised((lambda: step(pipe)) if rank == 0 else pipe.state_dict)
        pipe.train(rank == 1)
        found["modes"] = raised(lambda: step(pipe))
        pipe.train()
        with torch.set_grad_enabled(rank == 1):
            found["gradients"] = raised(lambda: pipe(X))
        assert all(p.grad is None for p in pipe.parameters())
        after = pipe.state_dict()
        assert [name for name in before if not torch.equal(before[name], after[name])] == []
        loss = step(pipe)
        # Random numbers depend on it, however many steps have failed before it, and where.
        found["number"] = "", str(pipe._runner.counts.trained), "", None
        gradients = {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None}
    found["closed"] = raised(lambda: step(pipe))
    with trapped(2, timeout=30) as pipe:
        if rank == 1:
            pipe.model[rank][2].arm("forward", lambda: sys.exit(7))
        try:
            found["exit"] = raised(lambda: step(pipe))
        except SystemExit as error:
            found["exit"] = "WorkerDied", f"{error.code}", "NoneType", (None, None)
    with trapped(2, timeout=1.0) as pipe:
        step(pipe)
        operations._GRACE = 1.0
        if rank == 1:
            time.sleep(4)
        found["late"] = raised(lambda: step(pipe))
    return found, loss, gradients


class Forked(nn.Module):
    """Takes another way where its input says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x > 50).any():
            x = x * 0.01
        x = self.first(x)
        return self.third(self.second(x).relu())


def forked(rank: int, plan: Any = None, **options: Any) -> Any:
    """Ways that only the rank with the inputs knows; a plan that rank 0 makes; no weights at first.

    Only rank 0 has inputs, and only rank 1 has targets.
    """
    asked: dict[str, Any] = {"num_microbatches": 2, "schedule": "1f1b", "cuts": ["second"]}
    asked = {"plan": plan} if plan else asked
    torch.manual_seed(8)
    with ps.Pipeline(Forked(), (X,), **asked, **options) as pipe:
        workers = pipe._runner.workers
        args: Any = ((X,), (100 * X,), (X,)) if workers.role.has_inputs else ((), (), ())
        rest = {"target": Y, "loss_fn": F.mse_loss} if workers.role.has_loss else {}
        with pipe.recording() as timelines:
            losses = [pipe.train_step(*inputs, **rest) for inputs in args]
        first = losses, grads(pipe), [sorted(e.action for e in t.events) for t in timelines]
        plan = pipe.plan.encode()
    torch.manual_seed(8)
    with ps.empty_weights():
        model = Forked()
    with ps.Pipeline(model, (X,), plan=pipe.plan, weights=ps.SeededWeights(3), **options) as pipe:
        loss = step(pipe)
        empty = sorted(n for n, p in pipe.named_parameters() if p.is_meta)
        return first, plan, (loss, grads(pipe), dict(pipe.state_dict())), empty


class SlowLinear(nn.Linear):
    """Takes longer than what clocks of two ranks on a busy machine are found to differ by."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same as that of any linear layer, after a while."""
        time.sleep(0.15)
        return super().forward(x)


def skewed(rank: int) -> Any:
    """Rank 1 is as if on another machine, whose clock is five seconds ahead."""
    if rank == 1:
        now = time.monotonic_ns

        def later() -> int:
            return now() + 5_000_000_000

        for module in (memory, clocks, steps):
            module.monotonic_ns = later  # type: ignore[attr-defined]
        time.monotonic_ns = later
        operations.machine = clocks.machine = lambda: "another"  # type: ignore[assignment]
    model = nn.Sequential(SlowLinear(6, 6), SlowLinear(6, 6))
    with ps.Pipeline(model, (X,), num_microbatches=2, schedule="1f1b", cuts=["1"]) as pipe:
        for _ in range(8):
            step(pipe)
        with pipe.recording() as timelines:
            step(pipe)
        ahead = pipe._workers._ranks.clock.ahead  # type: ignore[attr-defined]
        return timelines[0], ahead, pipe.accounts()[-1]


def profiled(rank: int) -> Any:
    """Every rank has torch.profiler look at a step; all write beside each other."""
    path = Path(sys.argv[2]) / "step.json"
    with ps.Pipeline(Forked(), (X,), num_microbatches=2, schedule="1f1b", cuts=["second"]) as pipe:
        step(pipe)
        with pipe.recording(profile=path) as timelines:
            step(pipe)
        timelines[0].save(path.with_name(f"{rank}.pftrace"))
    seen = json.loads(path.with_name(f"step-worker-{rank}.json").read_text())["traceEvents"]
    return [event["name"] for event in seen if "stage" in event["name"]]


class Warm(nn.Module):
    """Reads a number and a flag, in the first stage and in the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.early, self.late, self.flag = 1.0, 1.0, False

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x) / self.early
        x = x.relu() if self.flag else x.tanh()
        return self.last(x) / self.late


CHANGES: list[tuple[str, Any]] = [
    ("early", 2.0), ("early", 3.0), ("late", 2.0), ("late", 0.5), ("flag", True), ("flag", False),
]  # fmt: skip


def attributes(rank: int, everywhere: bool = False, **options: Any) -> Any:
    """Attributes that change: on rank 0 alone, on rank 1 alone, then on both.

    Args:
        rank: of this process.
        everywhere: change them on both at once, and nowhere alone.
        **options: of the pipeline.

    Returns:
        for every change the errors of the steps at which the ranks differed, and what remained of
        their gradients; the loss and the gradients when they did not.
    """
    torch.manual_seed(8)
    model, found = Warm(), []
    asked: dict[str, Any] = {"num_microbatches": 2, "schedule": "1f1b", "cuts": ["last"]}
    with ps.Pipeline(model, (X,), **asked, **options) as pipe:
        step(pipe)
        for name, value in CHANGES:
            errors, before = [], getattr(model, name)
            for alone in () if everywhere else (0, 1):
                pipe.zero_grad()
                setattr(model, name, value if rank == alone else before)
                errors.append((raised(lambda: step(pipe)), grads(pipe)))
            setattr(model, name, value)
            pipe.zero_grad()
            found.append((errors, step(pipe), grads(pipe)))
    return found


def attributes_everywhere(rank: int) -> Any:
    """The same, changed on all ranks at once."""
    return attributes(rank, everywhere=True)


def grads(pipe: ps.Pipeline) -> dict[str, torch.Tensor]:
    """The gradients that are here."""
    return {n: p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}


def number(rank: int) -> int:
    """The rank's own."""
    return rank


def sleeping(rank: int) -> None:
    """A rank that does not end."""
    time.sleep(3600)


def another_model(rank: int) -> Any:
    """A model on rank 1 that is not that of rank 0."""
    model = nn.Sequential(nn.Linear(6, 7 + rank), nn.ReLU(), nn.Linear(7 + rank, 6))
    return raised(lambda: ps.Pipeline(model, (X,), num_microbatches=2, schedule="gpipe"))


def end_by(number: int) -> None:
    """Send this process a signal; its threads do not run on until it comes."""
    os.kill(os.getpid(), number)
    time.sleep(1)


def killed(rank: int, victim: int) -> Any:
    """One rank is killed in the midst of a step."""
    pipe = trapped(3)
    step(pipe)
    if rank == victim:
        pipe.model[rank][2].arm("backward", lambda: end_by(signal.SIGKILL))
    first, again = raised(lambda: step(pipe)), raised(lambda: step(pipe))
    return first, again, pipe._runner.workers.all_alive()


def first_killed(rank: int) -> Any:
    """The one that gives the verdicts."""
    return killed(rank, 0)


def last_killed(rank: int) -> Any:
    """The one with the loss."""
    return killed(rank, 2)


def stopped(rank: int, victim: int) -> Any:
    """One rank is stopped in the midst of a step, with the timeouts that there are by default."""
    pipe = trapped(3)
    step(pipe)
    workers: Any = pipe._runner.workers
    pid = workers._launch.entries[victim].pid
    if rank == victim:
        pipe.model[rank][2].arm("backward", lambda: end_by(signal.SIGSTOP))
    found = raised(lambda: step(pipe))
    if rank == (victim + 1) % 3:
        time.sleep(3)  # the third rank looks once a second
        os.kill(pid, signal.SIGCONT)
    return workers._ranks.timeout, found, raised(lambda: step(pipe))


def first_stopped(rank: int) -> Any:
    """The one that gives the verdicts."""
    return stopped(rank, 0)


def last_stopped(rank: int) -> Any:
    """The one with the loss."""
    return stopped(rank, 2)


def far_stopped(rank: int) -> Any:
    """On another machine, whose kernel cannot be asked."""
    apart(rank)
    heartbeat._SILENT = 4.0
    return stopped(rank, 1)


def left_early(rank: int) -> Any:
    """One rank leaves the script, with an error of its own, and the others go on."""
    pipe = trapped(3)
    step(pipe)
    if rank == 1:
        raise SystemExit(3)
    return raised(lambda: step(pipe))


def patient_machines(rank: int) -> Any:
    """The same, with a timeout that does not matter: it is noticed that nobody answers."""
    return two_machines(rank, 1000)


def two_machines(rank: int, timeout: float = 4) -> Any:
    """Steps of several sizes on three ranks; then steps until the network is gone."""
    use_one_core(rank)
    pipe = trapped(3, timeout=timeout)
    losses = [
        pipe.train_step(X[:rows], target=Y[:rows], loss_fn=F.mse_loss) for rows in (11, 11, 9, 6)
    ]
    with torch.no_grad():
        losses.append(pipe(X))
    found = losses, {n: p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}
    sent = count_signals()
    step(pipe)
    step(pipe)
    sent.clear()
    step(pipe)
    signals = list(sent)
    Path(sys.argv[2], f"{rank}.ready").touch()
    error: Any = ("", "", "", None)
    start = time.monotonic()
    while not error[0] and time.monotonic() - start < 120:  # or it would outlive a test that failed
        error = raised(lambda: step(pipe))
    return found, signals, pipe.links, error, os.getpid()


def count_signals() -> list[tuple[bool, int, int]]:
    """Of every signal of a link to another machine: whether it has news, and what it says."""
    sent = []
    encode = process_group._encode

    def noted(message: Signal | Have) -> bytes:
        if isinstance(message, Signal) and message.size:
            sent.append(
                (bool(message.new_layout or message.plain), message.next_size, message.size)
            )
        return encode(message)

    process_group._encode = noted
    return sent


def checkpoints(rank: int) -> Any:
    """Saves, in the background too, goes on from them and from one of threads, and fails alike."""
    folder = Path(sys.argv[2])
    found: dict[str, Any] = {}
    run = Run(workers="torchrun")
    with run.pipe:
        run.go(2)
        run.save(folder / "ranks")
        run.go(1)
        save = run.save(folder / "ranks", background=True)
        run.go(3)
        save.wait()
        found["uninterrupted"] = run.state()
        found["not saved"] = raised(
            lambda: run.pipe.save(folder / "bad", position=iter([1]) if rank == 1 else 0)
        )
        if rank == 0:
            (folder / "file").write_text("")
        found["no folder"] = raised(lambda: run.save(folder / "file" / "a"))
        random.seed(rank)  # whatever else the ranks have done
        run.restore(folder / "ranks")
        run.go(3)
        found["resumed"] = run.state()
        run.restore(folder / "threads")
        run.go(3)
        found["from threads"] = run.state()
        found["missing"] = raised(lambda: ps.load(folder / "ranks").restore(run.pipe))
        run.save(folder / "at the end", background=True)
    return found


def averages(rank: int) -> Any:
    """Saves averages of weights, of which each rank moves those of its own stage; and gathers them.

    Only rank 0 writes them.
    """
    folder = Path(sys.argv[2]) / "averages"
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    options: dict[str, Any] = {"cuts": ["2"], "schedule": "1f1b", "num_microbatches": 2}
    with ps.Pipeline(model, (X,), **options) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        average = AveragedModel(model)
        for _ in range(3):
            step(pipe)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
        pipe.save(folder, average=average)
        gathered = copy.deepcopy(pipe.state_dict(of=average.module))
    found = ps.load(folder).state("average")
    return {name.removeprefix("module."): value for name, value in found.items()}, gathered


def slow_to_save(rank: int) -> Any:
    """A rank writes for longer than a pass may take."""

    def slowly(path: Path) -> None:
        time.sleep(4)
        folder.sync(path)

    if rank == 1:
        part.sync = slowly  # type: ignore[attr-defined]
    with small_pipe(workers="torchrun", timeout=2.0) as pipe:
        pipe.save(Path(sys.argv[2]) / "saved")
        pipe.save(Path(sys.argv[2]) / "saved", background=True).wait()
    return ps.load(Path(sys.argv[2]) / "saved").number


def autosaves(rank: int, what: str, *arguments: str) -> Any:
    """One of `tests.checkpoint.autosaving_ranks`."""
    return getattr(autosaving_ranks, what)(rank, *arguments)


def generates(rank: int, what: str, *arguments: str) -> Any:
    """One of `tests.generation.ranks`."""
    tolerate_missing_torchvision_operators()
    from tests.generation import ranks  # imports much

    return getattr(ranks, what)(rank, *arguments)


def has_sessions(rank: int, what: str, *arguments: str) -> Any:
    """One of `tests.sessions.ranks`."""
    from tests.sessions import ranks

    return getattr(ranks, what)(rank, *arguments)


def lightning(rank: int) -> Any:
    """What Lightning trains, and Fabric."""
    tolerate_missing_torchvision_operators()
    from tests.integrations import lightning_ranks  # imports much

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lightning_ranks.found(rank)
