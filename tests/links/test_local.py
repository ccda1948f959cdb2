"""The link between threads: in order, by reference, and never waiting in vain."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.links.local import Aborted, LocalLink

CPU = torch.device("cpu")


@pytest.fixture
def link() -> LocalLink:
    return LocalLink(CPU, CPU)


def test_values_are_handed_over_as_they_are(link: LocalLink) -> None:
    value = torch.randn(2, requires_grad=True) * 2
    (root, none) = link.send(0, (value, torch.arange(3)))
    received, _ = link.receive(0)
    assert received is value
    assert root is not None
    assert root.node is value.grad_fn
    assert none is None


def test_both_directions_keep_their_order(link: LocalLink) -> None:
    for microbatch in range(5):
        link.send(microbatch, (torch.tensor(microbatch),))
        link.send_gradients(microbatch, [torch.tensor(10 + microbatch)])
    assert [int(link.receive(k)[0]) for k in range(5)] == [0, 1, 2, 3, 4]
    assert [int(link.receive_gradients(k)[0]) for k in range(5)] == [10, 11, 12, 13, 14]


@pytest.mark.parametrize("wait", [LocalLink.receive, LocalLink.receive_gradients])
def test_an_abort_wakes_whoever_waits_now_and_later(
    link: LocalLink, wait: Callable[..., Any]
) -> None:
    outcome: list[BaseException] = []

    def receive() -> None:
        try:
            wait(link, 0)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    time.sleep(0.05)
    assert thread.is_alive()
    link.abort()
    thread.join(2)
    assert not thread.is_alive()
    assert isinstance(outcome[0], Aborted)
    for _ in range(3):
        with pytest.raises(Aborted):
            wait(link, 0)


def test_a_reset_throws_everything_away(link: LocalLink) -> None:
    link.send(0, (torch.zeros(1),))
    link.send_gradients(0, [None])
    link.abort()
    link.reset()
    link.send(0, (torch.ones(1),))
    link.send_gradients(0, [torch.ones(2)])
    assert link.receive(0)[0].item() == 1
    assert link.receive_gradients(0)[0].shape == (2,)  # type: ignore[union-attr]


def test_another_device_gets_a_copy_that_asks_for_gradients_too() -> None:
    link = LocalLink(CPU, torch.device("meta"))
    value = torch.randn(2, 3, requires_grad=True) * 2
    link.send(0, (value, 7))
    copy, number = link.receive(0)
    assert copy.device.type == "meta"
    assert copy.requires_grad
    assert copy.grad_fn is None
    assert number == 7
