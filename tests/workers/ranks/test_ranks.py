"""Operations of several ranks, here threads: all get the same, whether it goes well or not."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.errors import WorkerDied
from penstock.links.local import Aborted
from penstock.links.wire import Gone, Wire
from penstock.workers.ranks import operations as module
from penstock.workers.ranks.operations import Ranks


class Company:
    """Three ranks."""

    def __init__(self, timeout: float = 5.0) -> None:
        names = [f"rank {k} (a thread)" for k in range(3)]
        pairs = {k: socket.socketpair() for k in (1, 2)}
        star = {k: Wire(here) for k, (here, _) in pairs.items()}
        self.ranks = [Ranks(0, names, star, timeout)]
        self.ranks += [Ranks(k, names, {0: Wire(pairs[k][1])}, timeout) for k in (1, 2)]

    def do(self, work: Callable[[Ranks], Any]) -> list[Any]:
        """What each returns or raises."""
        found: list[Any] = [None] * 3

        def run(ranks: Ranks) -> None:
            try:
                found[ranks.rank] = work(ranks)
            except BaseException as error:
                found[ranks.rank] = error

        threads = [threading.Thread(target=run, args=(ranks,)) for ranks in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return found


@pytest.fixture
def company(monkeypatch: pytest.MonkeyPatch) -> Iterator[Company]:
    monkeypatch.setattr(module, "_GRACE", 0.4)
    found = Company()
    yield found
    for ranks in found.ranks:
        ranks.close()


def settled(ranks: Ranks) -> Any:
    with ranks.operation("counting"):
        return ranks.end(ranks.rank)


def test_everybody_has_what_all_found(company: Company) -> None:
    assert company.do(settled) == [[0, 1, 2]] * 3
    assert company.do(settled) == [[0, 1, 2]] * 3


def test_tensors_arrive(company: Company) -> None:
    def work(ranks: Ranks) -> Any:
        with ranks.operation("a sum"):
            parts = ranks.end({"x": torch.full((200_000,), float(ranks.rank)), "none": None})
        return torch.stack([part["x"] for part in parts]).sum(0)

    for found in company.do(work):
        assert torch.equal(found, torch.full((200_000,), 3.0))


@pytest.mark.parametrize("teller", [0, 1])
def test_one_tells_the_others(company: Company, teller: int) -> None:
    def work(ranks: Ranks) -> Any:
        with ranks.operation("a step"):
            word = ranks.broadcast(("said by", ranks.rank), teller, "a word")
            ranks.end(None)
        return word

    assert company.do(work) == [("said by", teller)] * 3


@pytest.mark.parametrize("receiver", [0, 1])
def test_what_is_for_one_rank_goes_to_no_other(company: Company, receiver: int) -> None:
    """Only that one reads what others have; all hear that it has gone well."""

    def work(ranks: Ranks) -> Any:
        with ranks.operation("a pass"):
            found = ranks.end(torch.tensor([ranks.rank]), receiver)
        return [None if value is None else int(value) for value in found]

    wanted = [[value if rank == value else None for value in range(3)] for rank in range(3)]
    wanted[receiver] = [0, 1, 2]
    assert company.do(work) == wanted
    assert company.do(settled) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("teller", [0, 1])
def test_a_word_is_heard_though_its_teller_has_failed_since(company: Company, teller: int) -> None:
    """A rank that comes late reads both at once; what was said says what it is about."""
    heard: list[Any] = []

    def work(ranks: Ranks) -> Any:
        if ranks.rank == 2:
            time.sleep(0.2)
        with ranks.operation("a step"):
            word = ranks.broadcast("said", teller, "a word")
            if ranks.rank == 2:
                heard.append(word)
            if ranks.rank == teller:
                raise ps.InputError("and failed")
            return ranks.end(None)

    for found in company.do(work):
        assert type(found) is ps.InputError
    assert heard == ["said"]


@pytest.mark.parametrize("teller", [0, 2])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_is_raised_by_all(company: Company, teller: int, failing: int) -> None:
    def work(ranks: Ranks) -> Any:
        with ranks.operation("a step"):
            if ranks.rank == failing:
                raise ps.InputError("of another kind")
            ranks.broadcast(1, teller, "a word")
            return ranks.end(None)

    for found in company.do(work):
        assert type(found) is ps.InputError
        assert str(found) == "of another kind"
    assert company.do(settled) == [[0, 1, 2]] * 3  # and they can go on


def test_what_cannot_be_pickled_has_a_stand_in(company: Company) -> None:
    class OddError(Exception):
        def __init__(self) -> None:
            super().__init__("odd")
            self.lock = threading.Lock()

    def work(ranks: Ranks) -> Any:
        with ranks.operation("a step"):
            if ranks.rank == 2:
                raise OddError
            return ranks.end(None)

    one, other, origin = company.do(work)
    assert type(origin) is OddError
    assert "OddError: odd" in str(one)
    assert "OddError: odd" in str(other)


@pytest.mark.parametrize("who", [0, 1])
def test_a_link_that_only_its_end_sees_break(company: Company, who: int) -> None:
    """The link's own exception never gets out."""

    def work(ranks: Ranks) -> Any:
        with ranks.operation("a step"):
            if ranks.rank == who:
                raise Gone("the link to rank 2 broke")
            return ranks.end(None)

    for found in company.do(work):
        assert type(found) is WorkerDied
        assert f"rank {who} (a thread), which lost its connection" in str(found)
        assert "the link to rank 2 broke" in str(found)
    assert all(type(found) is ps.ClosedError for found in company.do(settled))


def test_a_link_that_breaks_where_rank_0_is_silent(company: Company) -> None:
    """Neither then."""

    def work(ranks: Ranks) -> Any:
        ranks.timeout = 0.2
        if ranks.rank == 0:
            return time.sleep(2)
        with ranks.operation("a step"):
            raise Aborted

    for found in company.do(work)[1:]:
        assert type(found) is ps.WorkerTimeout
        assert "No answer from rank 0 (a thread)" in str(found)


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_one_does_not_come(company: Company, silent: int) -> None:
    def work(ranks: Ranks) -> Any:
        ranks.timeout = 0.2
        return time.sleep(2) if ranks.rank == silent else settled(ranks)

    for rank, found in enumerate(company.do(work)):
        if rank != silent:
            assert type(found) is ps.WorkerTimeout
            assert f"rank {silent} (a thread)" in str(found)


@pytest.mark.parametrize("leaving", [0, 1])
def test_one_leaves(company: Company, leaving: int) -> None:
    def work(ranks: Ranks) -> Any:
        return ranks.close() if ranks.rank == leaving else settled(ranks)

    found = company.do(work)
    for rank in {0, 1, 2} - {leaving}:
        assert type(found[rank]) is WorkerDied
        assert f"rank {leaving} (a thread), which closed its pipeline" in str(found[rank])


@pytest.mark.parametrize("who", [0, 2])
def test_ctrl_c_on_one_is_an_error_on_the_others(company: Company, who: int) -> None:
    def work(ranks: Ranks) -> Any:
        with ranks.operation("a step"):
            if ranks.rank == who:
                raise KeyboardInterrupt
            return ranks.end(None)

    found = company.do(work)
    assert type(found.pop(who)) is KeyboardInterrupt
    for error in found:
        assert type(error) is WorkerDied
        assert "was ended by KeyboardInterrupt" in str(error)


def test_different_operations(company: Company) -> None:
    def work(ranks: Ranks) -> Any:
        with ranks.operation("state_dict" if ranks.rank == 1 else "train_step"):
            ranks.broadcast(1, 0, "a word")
            return ranks.end(None)

    for found in company.do(work):
        assert type(found) is ps.InputError
        assert {"rank 1", "rank 0", "state_dict", "train_step"} <= set(_words(str(found)))
    assert company.do(settled) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("apart", [0, 1])
def test_different_operations_that_would_wait_for_each_other(
    company: Company, apart: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has done its part, and waits for the others, who wait for its word."""
    monkeypatch.setattr(module, "_LONG", 0.1)

    def work(ranks: Ranks) -> Any:
        ranks.timeout = 600.0
        if ranks.rank == apart:
            with ranks.operation("state_dict"):
                return ranks.end(None)
        with ranks.operation("train_step"):
            ranks.broadcast(1, apart, "a word")
            return ranks.end(None)

    for found in company.do(work):
        assert type(found) is ps.InputError
        assert {"rank 0", "state_dict", "train_step"} <= set(_words(str(found)))
    assert company.do(settled) == [[0, 1, 2]] * 3


def test_nobody_goes_on_before_the_one_in_another_operation(
    company: Company, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they send then would be taken for what it waits for."""
    monkeypatch.setattr(module, "_LONG", 0.1)
    order: list[str] = []
    late = company.ranks[1]
    listen, ask = late._listen, late._received

    def slowly(*args: Any) -> None:
        listen(*args)
        if late._has_reported:
            time.sleep(0.2)  # it computes, say

    def reported(mine: Any) -> Any:
        order.append("reported")
        monkeypatch.setattr(late, "_listen", listen)
        return ask(mine)

    monkeypatch.setattr(late, "_listen", slowly)
    monkeypatch.setattr(late, "_received", reported)

    def work(ranks: Ranks) -> None:
        try:
            with ranks.operation("train_step" if ranks is late else "state_dict"):
                if ranks is late:
                    ranks.broadcast(1, 0, "a word")
        finally:
            order.append(f"rank {ranks.rank}")

    assert all(type(found) is ps.InputError for found in company.do(work))
    assert order[0] == "reported", order


def test_what_is_waited_for_is_said(company: Company) -> None:
    def work(ranks: Ranks) -> Any:
        ranks.timeout = 0.2
        with ranks.operation("save"):
            value = time.sleep(1) if ranks.rank == 0 else None
            return ranks.broadcast(value, 0, "the decision")

    for found in company.do(work)[1:]:
        assert type(found) is ps.WorkerTimeout
        assert "it is waiting for the decision of rank 0 (a thread)" in str(found)


def _words(text: str) -> list[str]:
    return [w for w in ("rank 0", "rank 1", "rank 2", "state_dict", "train_step") if w in text]


def test_an_operation_within_another_is_a_part_of_it(company: Company) -> None:
    def work(ranks: Ranks) -> Any:
        with ranks.operation("outer"), ranks.operation("inner"):
            return ranks.end(ranks.number)

    assert company.do(work) == [[1, 1, 1]] * 3


@pytest.mark.parametrize("half", [b"\0" * 10, bytes([41]) + b"\0" * 47])
def test_a_rank_that_stops_in_the_midst_of_a_message(
    company: Company, monkeypatch: pytest.MonkeyPatch, half: bytes
) -> None:
    """Of the header, or of what it announces: nobody waits for the rest for good."""
    monkeypatch.setattr(module, "_REST", 0.2)

    def work(ranks: Ranks) -> Any:
        if ranks.rank != 1:
            return settled(ranks)
        ranks._wires[0]._socket.send(half)
        return None

    first, _, last = company.do(work)
    for error in (first, last):
        assert isinstance(error, WorkerDied)
        assert "rank 1 (a thread), which stopped in the midst of a message" in str(error)


def test_a_rank_that_says_nothing_of_its_failure_wakes_the_others(company: Company) -> None:
    """The link of one broke, and another one waits for its word."""

    def work(ranks: Ranks) -> Any:
        ranks.timeout = 8.0
        with ranks.operation("train_step"):
            if ranks.rank == 1:
                raise Aborted
            if ranks.rank == 2:
                ranks.broadcast(None, 1, "a word")
            return ranks.end(None)

    assert all(isinstance(found, ps.WorkerDied) for found in company.do(work))


def test_who_is_told_to_give_up_is_waited_for(company: Company) -> None:
    """It may begin later than ranks that have failed by themselves have to stop."""

    def work(ranks: Ranks) -> Any:
        if ranks.rank == 2:
            time.sleep(1.0)
        with ranks.operation("train_step"):
            raise module.GivenUp

    assert all(isinstance(found, module.GivenUp) for found in company.do(work))
    assert company.do(settled) == [[0, 1, 2]] * 3
