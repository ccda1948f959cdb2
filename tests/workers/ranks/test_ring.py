"""The sum that goes around a ring while backwards run: its order of events, and its bits."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import pytest
import torch
from torch import nn

from penstock.engine.span import MicroBatch, Span
from penstock.engine.stage import Before
from penstock.links.link import edges
from penstock.links.shared_memory import Receiver, Sender
from penstock.links.slots import Arrivals
from penstock.links.wire import Wire
from penstock.plan.shares import blocks
from penstock.workers.ranks import ring
from penstock.workers.ranks.ring import ChainedSum, Ring, RingStage
from tests.support.training import halve

WIDTH, PATIENCE = 6, 20.0
Build = Callable[[], list[Span]]


class Post:
    """A connection from one replica to the next; notes what is sent."""

    def __init__(self, log: list[Any]) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._log = log

    def put(self, values: Sequence[Any]) -> None:
        self._log.append(values[0])
        self._queue.put([v.clone() if isinstance(v, torch.Tensor) else v for v in values])

    def get(self) -> Any:
        return self._queue.get(timeout=PATIENCE)

    def get_nowait(self) -> Any:
        try:
            return self._queue.get_nowait()
        except Empty:
            return None


class Part(nn.Module):
    """What a span runs; says when the backward comes to its beginning."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.log: list[Any] = []

    def forward(self, sizes: Any, key: Any, x: torch.Tensor) -> tuple[torch.Tensor]:
        first, *rest = self.layers
        x = first(x)
        if x.requires_grad:
            x.register_hook(lambda _: self.log.append("beginning"))
        for layer in rest:
            x = layer(x)
        return (x,)


class Nested(torch.autograd.Function):
    """Its backward runs another one, which adds to `.grad`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            torch.autograd.backward(x.detach() * weight, gradients[0])
        return gradients[0] * weight, None


class Hiding(torch.autograd.Function):
    """The same, but one cannot see it."""

    forward = Nested.forward

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return getattr(Nested, "".join(("back", "ward")))(ctx, *gradients)


class Scaling(nn.Module):
    """Multiplies by a weight, in such a function."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(WIDTH)), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function.apply(x, self.weight)


class Rare(nn.Module):
    """Uses its weight for some micro-batches only."""

    def __init__(self, uses: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.uses = nn.Parameter(torch.ones(WIDTH)), uses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight if self.uses(x) else x * 0.5


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def plain() -> list[Span]:
    """One span of three layers."""
    return [Span(Part(linear(), linear(), linear()))]


def recomputed() -> list[Span]:
    """Three spans, two of which are recomputed, with a weight in two of them."""
    one, two = linear(), linear()
    two.weight = one.weight
    parts = [Part(linear(), one), Part(two, linear()), Part(linear())]
    return [Span(part, recompute=k < 2) for k, part in enumerate(parts)]


def wholly_recomputed() -> list[Span]:
    """One span, which is recomputed: the loss is apart."""
    return [Span(Part(linear(), linear()), recompute=True)]


def partial() -> list[Span]:
    """Weights that are frozen, or have no gradient in some micro-batches or in all of them."""
    rare = [Rare(lambda x: x.sum() > 0), Rare(lambda x: x.sum() < 0), Rare(lambda x: x.sum() != 0)]
    never = Rare(lambda x: torch.tensor(False))
    return [Span(Part(linear(), *rare, never, linear().requires_grad_(False), linear()))]


def hooked() -> list[Span]:
    """With hooks on weights, which see one micro-batch after the other."""
    spans = plain()
    assert isinstance(spans[0].module, Part)
    one, two, _ = spans[0].module.layers
    one.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    two.weight.register_post_accumulate_grad_hook(halve)
    return spans


def sparse() -> list[Span]:
    """A table with sparse gradients."""
    table = nn.Embedding(4, WIDTH, sparse=True)
    shift = lambda x: (x.sum(-1) > 0).long()  # noqa: E731
    first = nn.Sequential(table)
    first.register_forward_pre_hook(lambda module, args: (shift(args[0]),))
    return [Span(Part(first, linear(), linear()))]


def nested() -> list[Span]:
    return [Span(Part(linear(), Scaling(Nested), linear()))]


def hiding() -> list[Span]:
    return [Span(Part(linear(), Scaling(Hiding), linear()))]


@dataclass
class Here:
    """A replica, which is the source and the sink of its only stage as well."""

    inputs: Sequence[torch.Tensor]
    spans: list[Span]
    log: list[Any] = field(default_factory=list)

    def join(self, number: int, of: int, onward: Post, back: Post, share: Sequence[int]) -> None:
        self.share = share
        self.parameters = parameters_of(self.spans)
        self.total = ChainedSum(Ring(number, of, onward, back), lambda: self.parameters)
        self.stage = RingStage(0, self, self, self.total)  # type: ignore[arg-type]
        self.stage.ways.append(self.spans)
        for span in self.spans:
            span.module.log = self.log  # type: ignore[attr-defined]

    def receive(self, microbatch: int) -> Any:
        return (self.inputs[microbatch],)

    def send(self, microbatch: int, results: Any) -> Any:
        return edges([results[0].square().sum()])

    def receive_gradients(self, microbatch: int) -> Any:
        return [torch.ones(())]

    def send_gradients(self, microbatch: int, gradients: Any) -> None:
        pass

    def run(self) -> None:
        """Forwards and backwards; the sum is not waited for."""
        stage = self.stage
        self.total.begin()
        stage.begin([MicroBatch({}, (0, 0))] * len(self.inputs), None, Before(), self.share)  # type: ignore[arg-type]
        for microbatch in self.share:
            stage.await_values(microbatch)
            stage.forward(microbatch)
        for microbatch in self.share:
            stage.await_gradients(microbatch)
            stage.backward(microbatch)
        self.log.append("ended")


def parameters_of(spans: Sequence[Span]) -> list[nn.Parameter]:
    modules = nn.ModuleList(span.module for span in spans)  # type: ignore[misc]
    return list(modules.parameters())


def alone(spans: Sequence[Span], inputs: Sequence[torch.Tensor], times: int) -> list[Any]:
    """The gradients of one device, added up over some steps; spans are cut off from each other."""
    for x in list(inputs) * times:
        entered, left = [x], []
        for span in spans:
            (result,) = span.module(None, None, entered[-1])  # type: ignore[arg-type]
            left.append(result)
            entered.append(result.detach().requires_grad_())
        left[-1].square().sum().backward()
        for k in reversed(range(len(spans) - 1)):
            left[k].backward(entered[k + 1].grad)
    return [p.grad for p in parameters_of(spans)]


def built(build: Build) -> list[Span]:
    """The same every time; a copy would have no hooks."""
    torch.manual_seed(0)
    return build()


def replicas(build: Build, inputs: Sequence[torch.Tensor], of: int) -> list[Here]:
    """Replicas of a stage, connected in a ring."""
    found = [Here(inputs, built(build)) for _ in range(of)]
    posts = [Post(each.log) for each in found]
    for k, (each, share) in enumerate(zip(found, blocks(len(inputs), (1,) * of), strict=True)):
        each.join(k, of, posts[k], posts[k - 1], share)
    return found


def batch(count: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(3, WIDTH) for _ in range(count)]


@pytest.fixture(autouse=True)
def buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight has one of its own."""
    monkeypatch.setattr(ring, "BUCKET", 1)


OVERLAPPING = [plain, recomputed, wholly_recomputed, partial, sparse]
WAITING = [hooked, nested]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("of", [2, 3])
@pytest.mark.parametrize("build", [*OVERLAPPING, *WAITING])
def test_the_bits_of_one_device(build: Build, of: int, count: int) -> None:
    inputs = batch(count)
    found = replicas(build, inputs, of)

    def run(each: Here) -> None:
        for _ in range(2):
            each.run()
            each.total.finish()

    with ThreadPoolExecutor() as pool:
        list(pool.map(run, found))
    expected = alone(built(build), inputs, 2)
    for each in found:
        for parameter, gradient in zip(each.parameters, expected, strict=True):
            assert (parameter.grad is None) == (gradient is None)
            if gradient is not None:
                assert parameter.grad is not None
                assert parameter.grad.layout == gradient.layout
                assert parameter.grad.stride() == gradient.stride() if not gradient.is_sparse else 1
                assert torch.equal(parameter.grad.to_dense(), gradient.to_dense())
            assert not parameter._backward_hooks or build is hooked
            assert not parameter._post_accumulate_grad_hooks or build is hooked


@pytest.mark.parametrize("build", OVERLAPPING)
def test_buckets_go_on_while_the_last_backward_runs(build: Build) -> None:
    """On every replica, as those before have sent theirs; the last sends what all have in all."""
    found = replicas(build, batch(6), 3)
    for each in found:
        each.run()
        beginnings = [k for k, event in enumerate(each.log) if event == "beginning"]
        before = each.log[: beginnings[-1]]
        assert sum(event != "beginning" for event in before) >= 2, each.log
        half = len(beginnings) // 2  # the first of two micro-batches
        assert each.log[:half] == ["beginning"] * half
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda each: each.total.finish(), found))
    assert not any(each.total._kept for each in found)  # none was caught twice


def test_a_weight_of_two_spans_goes_on_after_the_second() -> None:
    first, *_ = found = replicas(recomputed, batch(2), 2)
    first.run()
    of_tied = first.total._number[id(first.parameters[2])]
    assert first.log.index((False, of_tied)) > first.log.index("beginning")
    sent = first.log[: first.log.index("ended")]
    assert {event for event in sent if event != "beginning"} == {(False, k) for k in range(9)}
    found[1].run()
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda each: each.total.finish(), found))


@pytest.mark.parametrize("build", [*WAITING, hiding])
def test_nothing_goes_on_before_it_is_final(build: Build) -> None:
    """Where a hook needs its turn, or a backward may run another one."""
    first = replicas(build, batch(2), 2)[0]
    first.run()
    last = len(first.log) - first.log[::-1].index("beginning")
    assert set(first.log[:last]) == {"beginning"}


def test_nothing_goes_on_where_sending_waits_for_the_device() -> None:
    first = replicas(plain, batch(2), 2)[0]
    first.total._ring.waits = True
    first.run()
    assert set(first.log) == {"beginning", "ended"}


def test_what_several_stages_use_goes_on_in_the_end() -> None:
    first = replicas(plain, batch(2), 2)[0]
    begin = first.total.begin
    first.total.begin = lambda: begin(first.parameters[:1])  # type: ignore[method-assign]
    first.run()
    assert len(first.total._to_send) == 1


def test_there_are_never_many_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "BUCKET", 4 << 20)
    many = [nn.Parameter(torch.zeros(1 << 18)) for _ in range(100)]  # 1 MiB each
    assert len(ring.buckets_of(many)) == 25
    for width in (1, 7, 1000):  # far more than 4 MiB for each
        large = [nn.Parameter(torch.empty(width << 20, device="meta")) for _ in range(300)]
        found = ring.buckets_of(large)
        assert len(found) <= 64
        assert [p for bucket in found for p in bucket] == large[::-1]


class Handing:
    """A connection that has no room: whoever sends waits until it was received."""

    def __init__(self) -> None:
        self._given: SimpleQueue[Any] = SimpleQueue()
        self._taken: SimpleQueue[None] = SimpleQueue()

    def put(self, values: Sequence[Any]) -> None:
        self._given.put(values)
        self._taken.get(timeout=PATIENCE)

    def get(self) -> Any:
        values = self._given.get(timeout=PATIENCE)
        self._taken.put(None)
        return values

    def get_nowait(self) -> Any:
        raise AssertionError


@pytest.mark.parametrize("count", [2, 3, 5])
def test_all_have_what_all_have_though_no_link_has_room(count: int) -> None:
    links = [Handing() for _ in range(count)]
    rings = [Ring(k, count, links[k], links[k - 1]) for k in range(count)]
    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(lambda own: own.all_gather("names", [own.replica, "x"]), rings))
    assert found == [[[k, "x"] for k in range(count)]] * count


class Owner:
    dispatch = 0


def until(is_ready: Callable[[], bool]) -> Callable[[], None]:
    """Waits for that, but not for ever."""

    def wait() -> None:
        end = time.monotonic() + PATIENCE / 4
        while not is_ready():
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(1e-4)

    return wait


def narrow() -> list[Wire]:
    """The ends of a socket that has room for a message or two."""
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel takes its least
    return [Wire(end) for end in ends]


@pytest.mark.parametrize("of", [2, 3, 5])
def test_nobody_waits_for_ever_though_sockets_hold_few_messages(of: int) -> None:
    wires = [narrow() for _ in range(of)]

    def added(k: int) -> list[torch.Tensor | None]:
        parameters = [nn.Parameter(torch.zeros(2)) for _ in range(64)]
        (out, _), (_, come) = wires[k], wires[k - 1]
        sender = Sender(out, Owner(), until(out.has_room))
        receiver = Receiver(come, Owner(), Arrivals(torch.device("cpu")), until(come.ready))
        total = ChainedSum(Ring(k, of, sender, receiver), lambda: parameters)
        total.add(0, [[(p, torch.full((2,), k + 1.0)) for p in parameters]])
        total.finish()
        return [p.grad for p in parameters]

    with ThreadPoolExecutor(of) as pool:
        found = list(pool.map(added, range(of)))
    expected = torch.full((2,), of * (of + 1) / 2)
    for gradients in found:
        assert all(g is not None and torch.equal(g, expected) for g in gradients)


def test_sparse_gradients_travel_as_the_tensors_that_they_are_made_of() -> None:
    added = _sparse([[1, 3]]).coalesce()
    several = _sparse([[1, 1]])
    gradients = [None, added, torch.ones(2), several]
    about, *values = ring._packed(gradients)
    assert all(v is None or v.layout is torch.strided for v in values)
    found = ring._unpacked([about, *values])
    assert found[0] is None
    assert torch.equal(found[2], torch.ones(2))
    for one, other in ((found[1], added), (found[3], several)):
        assert one.is_coalesced() == other.is_coalesced()
        assert torch.equal(one._indices(), other._indices())
        assert torch.equal(one._values(), other._values())
        assert one.shape == other.shape
    assert ring._packed([None, torch.ones(1)])[0] is None


def _sparse(indices: list[list[int]]) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, torch.ones(2, 3), (5, 3), check_invariants=False)
