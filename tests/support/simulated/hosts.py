"""The threads that give work to devices, one at a time, in an order that a seed decides.

With the machine's seed this makes a whole run repeatable: the order in which work is given, when
memory is freed, and the order in which work is done.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty
from typing import Any

_PATIENCE = 30.0  # seconds until nobody is expected to go on


class Hosts:
    """Threads that wait for each other by these queues and conditions only; one goes on at a time.

    Args:
        seed: of the order.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.changed = threading.Condition()
        self.waiting: dict[str, Queue | _Notice] = {}
        self._in_turns = 0  # how many threads take turns
        self._whose = ""

    def queue(self) -> Queue:
        """Instead of a `queue.SimpleQueue`."""
        return Queue(self)

    def condition(self) -> Condition:
        """Instead of a `threading.Condition`."""
        return Condition(self)

    @contextmanager
    def in_turns(self, others: int) -> Iterator[None]:
        """While open, the calling thread and so many others, which wait at first, take turns."""
        with self.changed:
            if not self.changed.wait_for(lambda: len(self.waiting) == others, _PATIENCE):
                raise RuntimeError(f"{others} threads should wait, not {list(self.waiting)}")
            self._in_turns, self._whose = others + 1, threading.current_thread().name
        try:
            yield
        finally:
            with self.changed:
                self._in_turns = 0
                self.changed.notify_all()

    def gives_up(self, name: str) -> None:
        """A thread waits; another one goes on."""
        if self._whose == name:
            self._whose = ""
        if self._in_turns and not self._whose and len(self.waiting) == self._in_turns:
            able = sorted(name for name, what in self.waiting.items() if what.items)
            if able:
                self._whose = self._random.choice(able)
                self.changed.notify_all()

    def may_go_on(self, name: str) -> bool:
        """Whether it is a thread's turn."""
        return not self._in_turns or self._whose == name


class Queue:
    """As `queue.SimpleQueue`."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self.items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        with self._hosts.changed:
            self.items.append(item)
            self._hosts.changed.notify_all()

    def get(self, timeout: float | None = None) -> Any:
        hosts, name = self._hosts, threading.current_thread().name
        with hosts.changed:
            hosts.waiting[name] = self
            hosts.gives_up(name)
            hosts.changed.notify_all()
            try:
                able = hosts.changed.wait_for(lambda: self.items and hosts.may_go_on(name), timeout)
            finally:
                del hosts.waiting[name]
            if not able:
                raise Empty
            return self.items.popleft()


class _Notice:
    """That a thread waits to be notified; it has an item when it was."""

    def __init__(self) -> None:
        self.items: list[None] = []


class Condition:
    """As `threading.Condition`, of whose methods these are used."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._waiting: list[_Notice] = []

    def __enter__(self) -> None:
        self._hosts.changed.acquire()

    def __exit__(self, *_: object) -> None:
        self._hosts.changed.release()

    def wait(self) -> None:
        hosts, name, notice = self._hosts, threading.current_thread().name, _Notice()
        self._waiting.append(notice)
        hosts.waiting[name] = notice
        hosts.gives_up(name)
        hosts.changed.notify_all()
        try:
            hosts.changed.wait_for(lambda: notice.items and hosts.may_go_on(name))
        finally:
            del hosts.waiting[name]

    def notify_all(self) -> None:
        for notice in self._waiting:
            notice.items.append(None)
        self._waiting = []
        self._hosts.changed.notify_all()
