"""Values that cross to another process: every bit and stride, in memory that is reused."""

from __future__ import annotations

import gc
import os
import socket
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import nn

from penstock.links import shared_memory
from penstock.links.pickling import Inbox, Outbox, pack, unpack
from penstock.links.segment import Segment
from penstock.links.shared_memory import LinkSink, LinkSource, Receiver, Sender
from penstock.links.slots import Arrivals
from penstock.links.wire import Frame, Gone, Wire
from tests.support.interrupts import drop_interrupted

CPU = torch.device("cpu")


class Ends:
    """A sender and a receiver, as two processes have them."""

    def __init__(self) -> None:
        here, there = socket.socketpair()
        self.dispatch = 0
        self.wires = Wire(here), Wire(there)
        self.sender = Sender(self.wires[0], self)
        self.receiver = Receiver(self.wires[1], self, Arrivals(CPU))

    def across(self, *values: Any) -> tuple[Any, ...]:
        self.sender.put(values)
        return self.receiver.get()


@pytest.fixture
def ends() -> Ends:
    return Ends()


def odd() -> list[torch.Tensor]:
    """Tensors that are not simply contiguous."""
    image = torch.randn(2, 3, 4, 5)
    return [
        torch.randn(3, 4),
        torch.randn(4, 3).t(),
        image.to(memory_format=torch.channels_last),
        torch.randn(4, 1).expand(4, 6),
        torch.randn(8, 8)[:, 2:4],
        torch.randn(64)[3:20],
        torch.arange(5),
        torch.tensor(True),
        torch.empty(0, 3),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(7).to(torch.bfloat16),
        torch.tensor(2.0),
    ]


@pytest.mark.parametrize("tensor", odd(), ids=lambda t: f"{tuple(t.shape)}-{t.dtype}")
def test_a_tensor_arrives_as_it_was(ends: Ends, tensor: torch.Tensor) -> None:
    (arrived,) = ends.across(tensor)
    assert torch.equal(arrived, tensor)
    assert arrived.dtype == tensor.dtype
    if tensor.numel() and tensor.shape != (8, 2):
        assert arrived.stride() == tensor.stride()
        assert arrived.data_ptr() % 64 == tensor.data_ptr() % 64


def test_what_is_mostly_gaps_keeps_its_strides(ends: Ends) -> None:
    """Else attention gives other bits for the queries of a fused projection."""
    for view in (torch.randn(100, 100)[:, 0], torch.randn(2, 6, 96)[..., 32:64].transpose(0, 1)):
        (arrived,) = ends.across(view)
        assert arrived.stride() == view.stride()
        assert torch.equal(arrived, view)


def test_none_and_plain_values(ends: Ends) -> None:
    found = ends.across(None, "text", torch.ones(2), {"a": (1, 2.5)}, None)
    assert found[:2] == (None, "text")
    assert torch.equal(found[2], torch.ones(2))
    assert found[3:] == ({"a": (1, 2.5)}, None)


def test_requires_grad_arrives(ends: Ends) -> None:
    weight = nn.Parameter(torch.ones(3))
    arrived = ends.across(weight, weight * 2, weight.detach())
    assert [value.requires_grad for value in arrived] == [True, True, False]
    assert all(type(value) is torch.Tensor for value in arrived)


def test_a_slot_is_reused_once_nothing_refers_to_it(ends: Ends) -> None:
    first = ends.across(torch.zeros(1000))[0]
    view = first[10:20]
    second = ends.across(torch.ones(1000))[0]
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(view, torch.zeros(10))
    place = first.data_ptr()
    del first
    third = ends.across(torch.full((1000,), 3.0))[0]
    assert third.data_ptr() not in (place, second.data_ptr())  # the view holds it
    del view
    gc.collect()
    assert ends.across(torch.full((1000,), 4.0))[0].data_ptr() == place


def test_the_backward_holds_a_slot(ends: Ends) -> None:
    x = ends.across(torch.full((1000,), 2.0, requires_grad=True))[0]
    y = (x * x).sum()
    gradient = x.grad
    place = x.data_ptr()
    del x
    other = ends.across(torch.zeros(1000))[0]
    assert other.data_ptr() != place
    y.backward()
    assert gradient is None
    del y
    assert ends.across(torch.ones(1000))[0].data_ptr() == place


def test_changing_one_value_in_place_is_not_noticed_by_autograd_in_another(ends: Ends) -> None:
    a, b = ends.across(torch.ones(4), torch.full((4,), 3.0, requires_grad=True))
    product = b * b
    a.mul_(2)
    product.sum().backward()
    assert torch.equal(b.grad, torch.full((4,), 6.0))


def test_a_steady_state_sends_no_layout(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Frame] = []
    send = Wire.send
    monkeypatch.setattr(Wire, "send", lambda w, *a: (sent.append(Frame(*a[:2])), send(w, *a))[1])
    for _ in range(3):
        ends.across(torch.ones(4, 4), None)
    assert [len(frame.data) > 40 for frame in sent] == [True, False, False]
    assert [frame.fd >= 0 for frame in sent] == [True, False, False]


def test_messages_of_a_dispatch_that_was_given_up_are_thrown_away(ends: Ends) -> None:
    ends.sender.put((torch.zeros(10),))
    ends.dispatch = 1
    assert torch.equal(ends.across(torch.ones(10))[0], torch.ones(10))
    assert not any(slot.lent for slot in ends.sender._slots._slots[:1])


def test_a_link_is_two_ends() -> None:
    forward, back = Ends(), Ends()
    sink = LinkSink(forward.sender, back.receiver)
    source = LinkSource(forward.receiver, back.sender)
    x = torch.randn(3, requires_grad=True)
    roots = sink.send(0, (x * 2, torch.ones(2)))
    assert [root is not None for root in roots] == [True, False]
    values = source.receive(0)
    assert torch.equal(values[0], x * 2)
    source.send_gradients(0, (torch.ones(3), None))
    gradients = sink.receive_gradients(0)
    assert torch.equal(gradients[0], torch.ones(3))  # type: ignore[arg-type]
    assert gradients[1] is None


def test_the_other_end_is_gone(ends: Ends) -> None:
    ends.wires[0].close()
    with pytest.raises(Gone):
        ends.receiver.get()
    with pytest.raises(Gone):
        ends.wires[1].send(b"")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_segments_leave_nothing_behind() -> None:
    gc.collect()
    before = open_files()
    segment = Segment(1000)
    other = Segment(1000, os.dup(segment.fd))
    segment.base[:5] = 7
    assert torch.equal(other.base[:6], torch.tensor([7, 7, 7, 7, 7, 0], dtype=torch.uint8))
    kept = other.borrow()
    del segment, other
    gc.collect()
    assert int(kept[0]) == 7  # as long as a tensor is there, so is the memory
    del kept
    gc.collect()
    assert open_files() == before


class Custom:
    def __init__(self, value: Any) -> None:
        self.value = value


def test_a_ctrl_c_is_not_lost_when_what_was_borrowed_dies() -> None:
    segment = Segment(64)
    segment.lend()
    held = [torch.frombuffer(segment.borrow(), dtype=torch.uint8)]
    with pytest.raises(KeyboardInterrupt):
        drop_interrupted(held)
    assert not segment.lent


def test_a_fork_leaves_what_was_borrowed_to_the_original() -> None:
    segment = Segment(64)
    segment.lend()
    held = [torch.frombuffer(segment.borrow(), dtype=torch.uint8)]
    child = os.fork()
    if child == 0:
        held.clear()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert segment.lent
    held.clear()
    assert not segment.lent


def test_objects_travel_with_their_tensors() -> None:
    shared = torch.randn(5)
    data, tensors = pack({"a": shared, "b": [shared, Custom(torch.ones(2))], "f": lambda x: x + 1})
    assert len(tensors) == 2
    found = unpack(data, tensors)
    assert found["a"] is found["b"][0]
    assert found["f"](1) == 2
    assert torch.equal(found["b"][1].value, torch.ones(2))


def test_what_was_sent_before_is_the_same_object() -> None:
    weight = nn.Parameter(torch.ones(2))
    known = {id(weight): 4}
    outbox = Outbox(lambda tensor: known.get(id(tensor)))
    inbox = Inbox({4: weight}.__getitem__)
    module = nn.Linear(2, 2)
    module.weight = weight
    first = inbox.unpack(outbox.pack([module]))
    second = inbox.unpack(outbox.pack({"again": module}))
    assert first[0] is second["again"]
    assert first[0].weight is weight
    assert first[0].bias is not module.bias


def test_what_is_there_is_had_without_waiting(ends: Ends) -> None:
    assert ends.receiver.get_nowait() is None
    ends.sender.put((torch.zeros(2),))
    ends.dispatch = 1
    assert ends.receiver.get_nowait() is None  # of a dispatch that was given up
    ends.sender.put((torch.ones(2),))
    found = ends.receiver.get_nowait()
    assert found is not None
    assert torch.equal(found[0], torch.ones(2))
    ends.wires[0].close()
    with pytest.raises(Gone):
        ends.receiver.get_nowait()


def test_functions_that_read_context_variables() -> None:
    """As the hooks do that collect what modules of transformers return."""
    empty: ContextVar[int] = ContextVar("empty")
    default = ContextVar("default", default=3)
    given = ContextVar("given", default=3)
    given.set(4)
    read = unpack(*pack(lambda: (empty.get(None), default.get(), given.get())))
    assert read() == (None, 3, 4)


@pytest.mark.timeout(20)
def test_a_sender_does_not_wait_until_it_is_read(ends: Ends) -> None:
    """Whatever it sends: two that send to each other before either reads would wait for ever."""
    large, many = bytes(1 << 20), [torch.full((1,), float(k)) for k in range(20_000)]
    for _ in range(2):
        ends.sender.put([large, torch.ones(3), None])
        ends.sender.put(many)  # of which the layout is long
        ends.sender.put([1])
        found, ones, nothing = ends.receiver.get()
        assert found == large
        assert torch.equal(ones, torch.ones(3))
        assert nothing is None
        assert torch.equal(torch.cat(ends.receiver.get()), torch.cat(many))
        assert ends.receiver.get_nowait() == (1,)


def test_what_is_pickled_apart_is_of_its_own_message(ends: Ends) -> None:
    """Also if that one is given up."""
    ends.sender.put([bytes(1 << 16)])
    ends.dispatch += 1
    ends.sender.put(["next"])
    assert ends.receiver.get() == ("next",)
    ends.sender.put(["x" * (1 << 16), "y"])
    assert ends.receiver.get() == ("x" * (1 << 16), "y")


def test_nothing_that_is_expanded_beside_something(ends: Ends) -> None:
    nothing = torch.zeros(1, 1, 3).expand(4, 0, 3)
    found, three = ends.across(nothing, torch.ones(3))
    assert found.shape == nothing.shape
    assert torch.equal(three, torch.ones(3))


def test_layouts_are_forgotten_if_shapes_always_change(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By both processes; and numbers that were used before stand for other layouts."""
    monkeypatch.setattr(shared_memory, "MOST_LAYOUTS", 5)
    for size in (*range(1, 18), *range(1, 18)):
        value = torch.arange(float(size)).reshape(1, size)
        for _ in range(2):
            (found,) = ends.across(value)
            assert torch.equal(found, value)
            del found
    assert len(ends.sender._layouts) <= 5
    assert len(ends.receiver._borrower._layouts) <= 5
