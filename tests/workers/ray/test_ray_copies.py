"""Copies of what actors have: what is sent and taken, who has them, and what they give."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from penstock.capture.places import MISSING
from penstock.errors import InputError, WorkerDied
from penstock.links.local import Aborted
from penstock.links.pickling import portable
from penstock.workers.members import Member
from penstock.workers.pool import Dispatch, JobResult
from penstock.workers.ray import copying as copying_module
from penstock.workers.ray.copies import (
    EVERYTHING,
    GRADIENT,
    MEMORY,
    PART,
    STATE,
    UNSENT,
    VALUE,
    ActorCopies,
    Change,
    Copy,
    Shelf,
    Taken,
)
from penstock.workers.ray.copying import Copying, Gathered, buddies_of, is_done, may_be_done
from penstock.workers.ray.model import DriverModel
from penstock.workers.ray.pickled import pickled, unpickled
from penstock.workers.ray.rewinding import Rewinding, SentAttributes
from penstock.workers.redo import Work
from penstock.workers.remembering import ModuleMemory


def members(nodes: str, replicas: int = 1) -> list[Member]:
    """A member on each of these nodes."""
    each = len(nodes) // replicas
    return [
        Member(k, torch.device("cpu"), k % each, k // each, 1, "host", "actor", 0, node)
        for k, node in enumerate(nodes)
    ]


@pytest.mark.parametrize(
    ("nodes", "buddies"),
    [
        ("aa", [1, 0]),
        ("aaa", [1, 2, 0]),
        ("aabb", [2, 3, 0, 1]),
        ("aab", [2, 2, 0]),
        ("abc", [1, 2, 0]),
    ],
)
def test_a_buddy_is_on_another_node_and_has_as_little_as_can_be(
    nodes: str, buddies: list[int]
) -> None:
    assert buddies_of(members(nodes)) == buddies


# -- shelves --------------------------------------------------------------------------------------


def test_a_shelf_has_the_safe_copy_and_those_after_it() -> None:
    shelf = Shelf()
    assert shelf.put(Change(1, 0, None, {("value", 0): "a", ("value", 1): "b"}, []))
    assert shelf.put(Change(2, 1, 1, {("value", 0): "c"}, [("value", 1)]))  # is given up
    assert shelf.put(Change(3, 1, 1, {("value", 0): "d"}, []))
    assert shelf.copy(1) == {("value", 0): "a", ("value", 1): "b"}
    assert shelf.copy(2) == {("value", 0): "c"}
    assert shelf.copy(3) == {("value", 0): "d", ("value", 1): "b"}
    assert shelf.put(Change(4, 3, 3, {}, []))
    assert shelf.copy(1) is None
    assert shelf.copy(4) == shelf.copy(3)


def test_a_change_of_a_copy_that_is_not_there_is_refused() -> None:
    shelf = Shelf()
    assert not shelf.put(Change(5, 4, 4, {("value", 0): "a"}, []))
    assert shelf.copy(5) is None


# -- what is sent ---------------------------------------------------------------------------------


class Buddy:
    """Stands for the handle of an actor; it takes what it is sent unless it is told otherwise."""

    def __init__(self, *answers: Any) -> None:
        self.hold = self
        self.sent: list[Change] = []
        self.answers = list(answers)

    def options(self, **_: Any) -> Buddy:
        return self

    def remote(self, membership: int, worker: int, packed: Any) -> Any:
        answer = self.answers.pop(0) if self.answers else True
        if isinstance(answer, Exception):
            raise answer
        self.sent.append(unpickled(packed))
        return answer


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "get", lambda found: found)
    monkeypatch.setattr(
        ray, "wait", lambda refs, timeout: ([], refs) if refs == ["late"] else (refs, [])
    )


def worker() -> Any:
    """As much of an actor's state as is copied: a layer, and its part of an optimizer."""
    layer = nn.Linear(2, 2)
    tensors = dict(enumerate(layer.parameters()))
    optimizer = torch.optim.Adam(layer.parameters())
    own = SimpleNamespace(tensors=tensors, optimizers={7: optimizer}, memory=ModuleMemory([], {}))
    numbers = {id(tensor): number for number, tensor in tensors.items()}
    own.remembered = lambda _: {numbers[id(p)]: s for p, s in optimizer.state.items()}
    own.replaced = dict
    own.step = lambda: (layer(torch.ones(1, 2)).sum().backward(), optimizer.step())
    return own


def with_buddy(buddy: Buddy, has_twins: bool = False) -> ActorCopies:
    copies = ActorCopies()
    copies.have_buddy(3, 0, buddy, 1, has_twins)
    return copies


def never() -> bool:
    return False


def sent(copies: ActorCopies, own: Any, what: Copy) -> Change:
    copies.make(own, what)
    copies.send(what, never)
    found: Change = copies._buddy.sent[-1]
    return found


def copy(number: int, safe: int = 0, timeout: float = 10.0) -> Copy:
    return Copy(number, safe, timeout)


def test_what_has_changed_is_sent_and_no_more() -> None:
    own = worker()
    copies = with_buddy(Buddy())
    kinds = {(VALUE, 0), (VALUE, 1), (PART, 7), (MEMORY,)}
    assert set(sent(copies, own, copy(1)).changed) == kinds
    own.step()
    second = sent(copies, own, copy(2, 1))
    assert second.base == 1
    assert {VALUE, GRADIENT, STATE} <= {key[0] for key in second.changed}
    again = sent(copies, own, copy(3, 2)).changed
    assert not any(isinstance(value, torch.Tensor) for value in again.values())
    own.tensors[0].grad = None
    with torch.no_grad():
        own.tensors[1].data.zero_()  # of which autograd has no version
        own.tensors[0].data.neg_()
    change = sent(copies, own, copy(4, 3))
    assert (GRADIENT, 0) in change.gone
    assert {(VALUE, 0), (VALUE, 1)} <= set(change.changed)


def test_the_first_copy_has_everything() -> None:
    own = worker()
    own.step()
    change = sent(with_buddy(Buddy()), own, copy(1))
    assert {key[0] for key in change.changed} == set(EVERYTHING)


def test_zeros_with_another_sign_and_another_layout_are_changes() -> None:
    own = worker()
    own.tensors = {0: torch.zeros(3), 1: torch.zeros(2, 2), 2: torch.full((1,), torch.nan)}
    own.tensors[3] = torch.ones(2, dtype=torch.complex64)
    copies = with_buddy(Buddy())
    sent(copies, own, copy(1))
    again = set(sent(copies, own, copy(2, 1)).changed)
    assert again & {(VALUE, k) for k in own.tensors} == set()
    own.tensors[0] = -own.tensors[0]
    own.tensors[1] = own.tensors[1].t()
    own.tensors[3] = own.tensors[3] * 1j
    changed = set(sent(copies, own, copy(3, 2)).changed)
    assert changed & {(VALUE, k) for k in own.tensors} == {(VALUE, 0), (VALUE, 1), (VALUE, 3)}


def test_a_copy_is_of_its_moment() -> None:
    own, buddy = worker(), Buddy()
    copies = with_buddy(buddy)
    before = own.tensors[0].detach().clone()
    copies.make(own, copy(1))
    own.step()
    copies.send(copy(1), never)
    assert torch.equal(buddy.sent[0].changed[VALUE, 0], before)
    found = copies.copy_of(0, 1)
    assert found is not None
    assert torch.equal(found[VALUE, 0], before)


def test_a_buffer_that_a_forward_has_replaced() -> None:
    own = worker()
    own.replaced = lambda: {1: torch.full((2,), 5.0)}
    assert sent(with_buddy(Buddy()), own, copy(1)).changed[VALUE, 1].tolist() == [5.0, 5.0]


def test_replicas_send_what_only_one_of_them_has() -> None:
    own = worker()
    own.step()
    change = sent(with_buddy(Buddy(), has_twins=True), own, copy(1))
    assert {key[0] for key in change.changed} == {PART, STATE, MEMORY}


def test_what_was_made_and_not_sent_comes_with_the_next_copy() -> None:
    own, buddy = worker(), Buddy()
    copies = with_buddy(buddy)
    sent(copies, own, copy(1))
    own.step()
    copies.make(own, copy(2, 1))  # of a pass that fails elsewhere
    change = sent(copies, own, copy(3, 1))
    assert change.base == 1
    assert {VALUE, GRADIENT, STATE} <= {key[0] for key in change.changed}


def test_a_copy_that_was_lost_on_the_way_is_sent_again() -> None:
    buddy = Buddy(RuntimeError("lost"), True)
    assert sent(with_buddy(buddy), worker(), copy(1)).number == 1
    assert len(buddy.sent) == 1


@pytest.mark.parametrize(
    ("answer", "timeout", "why"),
    [
        (False, 10.0, "it belongs to other members"),
        ("late", 0.0, "it does not answer"),
        (RuntimeError("full"), 0.1, "full"),
    ],
)
def test_a_copy_that_is_not_taken(answer: Any, timeout: float, why: str) -> None:
    copies = with_buddy(Buddy(*[answer] * 9))
    copies.make(worker(), copy(1))
    with pytest.raises(WorkerDied, match=rf"worker 1 has not taken copy 1 of .* 0 has \({why}"):
        copies.send(copy(1, timeout=timeout), never)


def test_a_buddy_that_has_died() -> None:
    import ray

    buddy = Buddy(ray.exceptions.RayActorError())
    copies = with_buddy(buddy)
    copies.make(worker(), copy(1))
    with pytest.raises(WorkerDied, match="worker 1 has not taken copy 1 of what worker 0 has"):
        copies.send(copy(1), never)
    assert buddy.sent == []


@pytest.mark.parametrize("answers", [["late"], [RuntimeError("lost")]])
def test_a_wait_for_the_buddy_is_given_up(answers: list[Any]) -> None:
    copies = with_buddy(Buddy(*answers))
    copies.make(worker(), copy(1))
    looks = iter([False, True, True])
    with pytest.raises(Aborted, match=UNSENT):
        copies.send(copy(1), lambda: next(looks))


# -- what is taken --------------------------------------------------------------------------------


def test_a_copy_of_other_members_is_refused() -> None:
    change = pickled(Change(9, 0, None, {(VALUE, 0): torch.ones(2)}, []))
    copies = ActorCopies()
    assert not copies.hold(1, 4, change)  # there are no members yet
    copies.have_buddy(2, 0, None, 1, False)
    assert not copies.hold(1, 4, change)
    assert copies.copy_of(4, 9) is None
    assert copies.hold(2, 4, change)
    found = copies.copy_of(4, 9)
    assert found is not None
    assert torch.equal(found[VALUE, 0], torch.ones(2))


# -- what copies give -----------------------------------------------------------------------------


def test_what_copies_give_when_some_have_died() -> None:
    part: dict[Any, Any] = {(VALUE, 0): "w", (PART, 7): True, (STATE, 7, 0, None): ["b", "a"]}
    part |= {(STATE, 7, 0, "a"): 1, (STATE, 7, 0, "b"): 2}
    other = {(VALUE, 1): "v", (GRADIENT, 1): "g", (PART, 7): True}
    found = Gathered.of(members("ab"), {1: other}, {0: part})
    assert found.values == {0: "w", 1: "v"}
    assert found.gradients == {1: "g"}
    assert found.states == {(7, 0): {0: {"b": 2, "a": 1}}, (7, 1): {}}
    assert list(found.states[7, 0][0]) == ["b", "a"]
    assert found.lost == []
    assert Gathered.of(members("ab"), {1: other}, {}).lost == [0]


def test_what_replicas_have_is_left_with_one_of_them() -> None:
    part: dict[Any, Any] = {(PART, 7): True, (STATE, 7, 0, None): ["a"], (STATE, 7, 0, "a"): 1}
    part |= {(MEMORY,): {"calls": 3}}
    whole = {(VALUE, 0): "w", (PART, 7): True, (MEMORY,): {"calls": 5}}
    found = Gathered.of(members("ab", replicas=2), {1: whole}, {0: part})
    assert found.values == {0: "w"}
    assert found.memories == [{"calls": 3}, {"calls": 5}]  # of each its own
    assert found.states == {(7, 0): {0: {"a": 1}}, (7, 1): {}}
    assert found.lost == []
    assert Gathered.of(members("ab", replicas=2), {1: whole}, {}).lost == [0]


def test_a_state_dict_does_not_have_every_buffer() -> None:
    """One that forwards change stays as the workers have it, and the rest is replaced."""
    model = nn.Linear(2, 2)
    model.register_buffer("calls", torch.zeros(()), persistent=False)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    driver = DriverModel(model)
    driver.deliveries([[*model.parameters(), *model.buffers()]])
    driver.has_changed([*model.parameters(), *model.buffers()])
    with torch.no_grad():
        model.weight.fill_(1.0)
    with pytest.raises(InputError, match="had older values"):
        driver.check()
    model.load_state_dict(state)
    (change,) = driver.changes(1)
    assert len(change.values) == 2
    assert driver.current() == [model.weight, model.bias]


def test_what_the_script_has_done_is_noted_once() -> None:
    model = nn.Linear(2, 2)
    driver = DriverModel(model)
    driver.deliveries([list(model.parameters())])
    weight, bias = model.weight, model.bias
    driver.changes(1)
    assert not driver.take_noted()
    with torch.no_grad():
        bias.fill_(3.0)
    driver.changes(1)
    assert not driver.take_noted().is_simple
    assert not driver.take_noted()  # it is kept now
    driver.resend()  # or is not: the work failed that it came with
    driver.changes(1)
    assert driver.take_noted()
    driver.confirm()
    weight.grad, bias.grad = torch.ones(2, 2), torch.ones(2)
    driver.changes(1)
    assert not driver.take_noted().is_simple
    driver.confirm()
    weight.grad.zero_()
    bias.grad = None
    driver.changes(1)
    noted = driver.take_noted()
    assert noted.is_simple
    weight.grad, bias.grad = torch.ones(2, 2), torch.ones(2)
    noted.redo()
    assert torch.equal(weight.grad, torch.zeros(2, 2))
    assert bias.grad is None
    driver.changes(1)
    driver.take_noted()
    bias.requires_grad_(False)
    driver.changes(1)
    assert not driver.take_noted().is_simple


class Labelled(nn.Module):
    """A layer with attributes of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.rate, self.names, self.scale = 0.5, ["a"], torch.ones(2)
        self.tied = [self.layer, self.layer.weight]


def test_attributes_as_they_were_sent() -> None:
    model = Labelled()
    sent = SentAttributes(model)
    model.lock = threading.Lock()  # type: ignore[assignment]
    sent.have(sent.packed({0: model}))
    model.rate = 0.1
    model.names.append("b")
    model.more = 1  # type: ignore[assignment]
    names = dict.fromkeys(["rate", "names", "scale", "tied", "more", "lock"])
    (found,) = sent.as_sent({0: names}).values()
    assert (found["rate"], found["names"], found["more"]) == (0.5, ["a"], MISSING)
    assert found["scale"] is model.scale  # a tensor of the model, whose values are sent as such
    assert "lock" not in found  # nobody knows it, and it was there
    assert found["tied"][0] is model.layer
    assert found["tied"][1] is model.layer.weight
    as_now = sent.packed({0: model})
    model.rate = 0.2
    sent.have(as_now)
    assert sent.as_sent({0: {"rate": None}, 5: {"rate": None}}) == {0: {"rate": 0.1}}


def test_the_model_is_as_it_was_and_then_as_the_script_has_made_it() -> None:
    model = Labelled()
    weight, bias = model.layer.weight, model.layer.bias
    driver, sent = DriverModel(model), SentAttributes(model)
    driver.deliveries([list(model.parameters())])
    sent.have(sent.packed({0: model}))
    driver.changes(1)
    driver.confirm()
    weight.grad, bias.grad = torch.ones(2, 2), torch.ones(2)
    driver.changes(1)
    driver.confirm()
    driver.has_changed([weight])  # by a step
    assert [t is bias for t in driver.current()] == [True]
    weight.grad.zero_()
    bias.grad = None
    with torch.no_grad():
        bias.fill_(5.0)
    weight.requires_grad_(False)
    model.rate, model.names = 0.1, ["a", "b"]
    copied = Gathered(
        values={0: torch.full((2, 2), 7.0), 1: torch.full((2,), 7.0)},
        gradients={0: torch.full((2, 2), 2.0), 1: torch.full((2,), 2.0)},
    )
    since = driver.changes(1)
    changed = {0: {"rate": 0.1, "names": model.names}}
    rewound = Rewinding(driver, copied, since, [model], changed, sent)
    for k in range(2):  # those who take over may fail
        with rewound():
            assert model.names == (["brought"] if k else ["a"])
            model.names = ["brought"]  # what forwards have left
            assert [t.mean().item() for t in (weight, bias, weight.grad, bias.grad)] == [7, 7, 2, 2]
            assert (model.rate, weight.requires_grad) == (0.5, True)
            weight.grad.zero_()
            bias.grad = None
            bias.data.zero_()
        assert torch.equal(weight, copied.values[0])
        assert torch.equal(weight.grad, torch.zeros(2, 2))
        assert (bias.grad, bias.tolist()) == (None, [5.0, 5.0])
        assert (model.rate, model.names, weight.requires_grad) == (0.1, ["a", "b"], False)


# -- copies while work goes on, and the log -------------------------------------------------------


def test_a_copy_is_sent_while_work_goes_on() -> None:
    arrived, buddy, own = threading.Event(), Buddy(), worker()
    take = buddy.remote
    buddy.remote = lambda *given: arrived.wait(10) and take(*given)  # type: ignore[method-assign]
    copies = with_buddy(buddy)
    copies.make(own, copy(1))
    copies.send_meanwhile(copy(1))
    own.step()
    assert copies.taken.number == -1
    copies.make(own, copy(2))
    with pytest.raises(Aborted, match=UNSENT):  # the one before is still under way
        copies.send(copy(2), lambda: True)
    arrived.set()
    copies.send(copy(2), never)
    assert copies.taken.number == 2
    assert copies.taken.seconds > 0
    assert [change.number for change in buddy.sent] == [1, 2]
    assert GRADIENT not in {key[0] for key in buddy.sent[0].changed}


def test_what_was_not_taken_is_said_before_the_next_work() -> None:
    copies = with_buddy(Buddy(False))
    copies.make(worker(), copy(1))
    copies.send_meanwhile(copy(1))
    assert copies._sender is not None
    copies._sender.join()
    with pytest.raises(WorkerDied, match="worker 1 has not taken copy 1"):
        copies.check()


def test_a_copy_that_cannot_be_sent_is_said_before_the_next_work() -> None:
    own = worker()
    own.optimizers = {7: object()}
    own.remembered = lambda _: {0: {"lock": LockOnceCopied()}}
    copies = with_buddy(Buddy())
    copies.make(own, copy(1))
    copies.send_meanwhile(copy(1))
    assert copies._sender is not None
    copies._sender.join()
    with pytest.raises(InputError, match="worker 0 has cannot be copied for its buddy: TypeError"):
        copies.check()


class LockOnceCopied:
    """Can be copied, and not be pickled."""

    def __deepcopy__(self, memo: Any) -> Any:
        return threading.Lock()


def test_copies_are_sent_in_order_though_work_was_given_up_between_them() -> None:
    go, buddy = threading.Event(), Buddy()
    take = buddy.remote

    def late(*given: Any) -> Any:
        assert go.wait(10)
        return take(*given)

    buddy.remote = late  # type: ignore[method-assign]
    copies = with_buddy(buddy)
    for number in (1, 2):
        copies.make(worker(), copy(number))
        copies.send_meanwhile(copy(number))
    go.set()
    assert copies._sender is not None
    copies._sender.join(10)
    assert [change.number for change in buddy.sent] == [1, 2]
    assert copies.taken.number == 2


def test_nobody_hears_of_a_copy_that_was_sent_for_members_that_are_gone() -> None:
    copies = with_buddy(Buddy(*[RuntimeError("lost")] * 99))
    copies.make(worker(), copy(1))
    copies.send_meanwhile(copy(1))
    copies.close()
    assert copies._sender is not None
    copies._sender.join(10)
    copies.check()
    assert copies.taken.number == -1


def log_of(pool: Any) -> Copying:
    pool.copies, pool.taken, pool.pair = 0, {0: Taken(), 1: Taken()}, lambda *_: None
    return Copying(members("ab"), pool, 1.0, 1.0, 10)


def work(nbytes: int = 0, order: Any = None) -> Work:
    return Work(lambda workers: None, order, nbytes)


def test_what_is_done_between_copies_is_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = SimpleNamespace()
    copying = log_of(pool)
    first = copying.protect(True, True)
    assert first.before is None
    assert first.after is not None  # before it nobody has a copy of anything
    copying.done(first, None)
    assert copying.works == []
    pool.taken = dict.fromkeys(pool.taken, Taken(1, 3.0))
    early, late, later = work(), work(), work()
    protection = copying.protect(True, True)
    assert (protection.before, protection.after) == (None, None)  # the last one is not long ago
    for _ in range(2):  # a Ctrl-C comes in the midst of it
        copying.done(protection, early)
    monkeypatch.setattr(copying_module, "_SHARE", math.inf)
    protection = copying.protect(True, True)
    assert protection.before is not None
    assert copying.protect(True, True).before is None  # one is on its way
    copying.done(protection, late)
    pool.taken[0] = Taken(2, 3.0)
    assert copying.works == [early, late]
    pool.taken[1] = Taken(2, 3.0)
    assert copying.works == [late]
    copying.done(copying.protect(True, False), later)
    assert copying.works == [late, later]
    copying.undone(later)
    assert copying.works == [late]
    whole = copying.protect(False, True)  # what cannot be in the log
    copying.done(whole, None)
    assert whole.after is not None
    assert copying.works == []


def test_a_copy_of_which_nobody_knows_who_has_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying_module, "_SHARE", math.inf)
    pool = SimpleNamespace()
    copying = log_of(pool)
    copying.done(copying.protect(False, False), None)
    pool.taken = dict.fromkeys(pool.taken, Taken(1, 1.0))
    done = work()
    copying.done(copying.protect(True, False), done)
    copying.protect(True, True)  # the pass fails
    copying.give_up()
    pool.taken[0] = Taken(2, 1.0)
    other = copying.protect(True, True)
    assert other.before is not None
    pool.taken[1] = Taken(3, 1.0)
    assert copying.works == [done]
    pool.taken[0] = Taken(3, 1.0)
    assert copying.works == []


def test_a_log_that_is_large_ends_with_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying_module, "_SHARE", 0.0)
    monkeypatch.setattr(copying_module, "_LOG", 5)
    copying = log_of(pool := SimpleNamespace())
    copying.done(copying.protect(False, False), None)
    pool.taken = dict.fromkeys(pool.taken, Taken(1, 1.0))
    for _ in range(2):  # as many bytes as the model has are kept
        protection = copying.protect(True, True)
        assert (protection.before, protection.after) == (None, None)
        copying.done(protection, work(6))
    assert copying.protect(True, False).after is not None  # where none can be made before it
    assert copying.protect(True, True).before is not None
    assert copying.protect(True, True).after is not None  # while the other one is on its way


def test_whether_the_log_has_the_forward_of_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying_module, "_SHARE", math.inf)
    copying = log_of(pool := SimpleNamespace())
    copying.done(copying.protect(False, False), None)
    pool.taken = dict.fromkeys(pool.taken, Taken(1, 1.0))

    def passes(what: str) -> Work:
        return work(order=SimpleNamespace(what=what, number=4, training=True))

    copying.done(copying.protect(True, False), passes("forward"))
    assert copying.has_forward(4, True)
    assert not copying.has_forward(4, False)
    assert not copying.has_forward(5, True)
    copying.done(copying.protect(True, False), passes("backward"))
    assert not copying.has_forward(4, True)  # that forward is gone
    copying.done(copying.protect(True, False), passes("forward"))
    assert copying.has_forward(4, True)
    copying.done(copying.protect(True, True), work())  # a copy is made after the forward
    assert not copying.has_forward(4, True)


# -- what was interrupted -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "error", "may_be"),
    [
        ([None, Aborted()], KeyboardInterrupt(), True),
        ([portable(Aborted(UNSENT)), Aborted()], KeyboardInterrupt(), True),
        ([Aborted(), Aborted()], KeyboardInterrupt(), False),
        ([ValueError(), Aborted()], ValueError(), False),
        (None, KeyboardInterrupt(), True),
        (None, ValueError(), False),
    ],
)
def test_whether_work_that_was_interrupted_may_be_done(
    ends: list[BaseException | None] | None, error: BaseException, may_be: bool
) -> None:
    current = None if ends is None else Dispatch(0)
    if current is not None:
        current.results = {k: JobResult(None, end) for k, end in enumerate(ends or ())}
    assert may_be_done(current, error) is may_be
    assert current is None or not is_done(current, 2)
