"""Sends messages to whatever listens in a job, as fast as it is told to."""

from __future__ import annotations

import heapq
import itertools
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from tests.fuzz.messages import Delivery, Hostile
from tests.fuzz.sockets import Listening, family_of, listening

_MOST = 400  # messages that are under way at once
_LOOK = 0.1  # seconds from look to look at which sockets there are


class Attack:
    """Strangers, all in this thread.

    Args:
        pid: of the job's first process.
        folder: where its Unix sockets are.
        hostile: what is known.
        seed: of the first message.
        rate: messages a second.
        name: says what a socket is for.

    Attributes:
        sent: how many messages were sent to each, by what it is for.
        kinds: how many of each kind.
    """

    def __init__(
        self,
        pid: int,
        folder: Path,
        hostile: Hostile,
        seed: int,
        rate: float,
        name: Callable[[Listening], str],
    ) -> None:
        self._pid, self._folder, self._hostile, self._rate = pid, folder, hostile, rate
        self._name, self._seeds = name, itertools.count(seed)
        self.sent: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self._under_way: list[tuple[float, int, socket.socket, Delivery]] = []
        self._targets: dict[str, list[Listening]] = {}
        self._looked = 0.0

    def go_on(self, is_over: Callable[[], bool], enough: Callable[[str], bool]) -> None:
        """Send messages until it is over, one after the other to each kind of socket.

        Args:
            is_over: whether it is.
            enough: whether no more are wanted of what is for this.
        """
        due = time.monotonic()
        while not is_over():
            now = time.monotonic()
            if now - self._looked > _LOOK:
                self._look()
            due = max(due, now - 0.1)
            while due <= now and len(self._under_way) < _MOST:
                due += 1 / self._rate
                self._begin(now, {n: t for n, t in self._targets.items() if not enough(n)})
            self._deliver(now)
            time.sleep(0.002)

    def end(self) -> None:
        """Let go of all that is under way."""
        for *_, sock, delivery in self._under_way:
            delivery.close()
            sock.close()
        self._under_way = []

    def _look(self) -> None:
        self._looked = time.monotonic()
        self._targets = {}
        for one in listening(family_of(self._pid)):
            self._targets.setdefault(self._name(one), []).append(one)

    def _begin(self, now: float, targets: Mapping[str, list[Listening]]) -> None:
        if not targets:
            return
        name = min(targets, key=lambda each: self.sent[each])
        seed = next(self._seeds)
        try:
            sock = random.Random(seed).choice(targets[name]).connect(self._folder)
        except OSError:  # it listens no more
            self._looked = 0.0
            return
        kind, deliver = self._hostile.message(seed)
        self.sent[name] += 1
        self.kinds[kind] += 1
        heapq.heappush(self._under_way, (now, seed, sock, deliver(sock)))

    def _deliver(self, now: float) -> None:
        while self._under_way and self._under_way[0][0] <= now:
            _, seed, sock, delivery = heapq.heappop(self._under_way)
            try:
                pause = next(delivery)
            except (StopIteration, OSError):  # all is said, or it was turned away
                with suppress(OSError):
                    sock.close()
                continue
            heapq.heappush(self._under_way, (now + pause, seed, sock, delivery))
