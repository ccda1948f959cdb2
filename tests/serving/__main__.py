"""Many requests of random lengths, of which some are cancelled, while two workers are killed.

python -m tests.serving [--requests 10000] [--seconds 3600]

Every request has to end with its right tokens or a named error, no state may be left with the
workers, and memory has to be flat.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from penstock.serving import Served
from penstock.serving.server import Server, Settings
from tests.serving.expected import numbers, tokens_of
from tests.serving.models import WORDS, gpt2

KINDS = 200  # different requests
CLIENTS = 8
CANCELLED = 0.1


@dataclass(frozen=True)
class Kind:
    """A request, and the text that it has to get."""

    body: dict[str, Any]
    text: str


@dataclass
class Soak:
    """What has come of the requests so far.

    Attributes:
        left: how many are to be made.
        until: when to begin no more, of `time.monotonic()`.
        found: numbers of requests by how they ended.
        wrong: what was not as it has to be.
        memory: bytes of the server and of its workers, from time to time.
        kills: when workers are killed, in requests.
    """

    server: Server
    kinds: list[Kind]
    left: int
    until: float
    kills: list[int]
    found: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)
    done: int = 0

    def run(self) -> None:
        """Make the requests, then stop the server."""
        try:
            asyncio.run(self._all())
        except Exception as error:
            self.wrong.append(f"the clients failed: {error!r}")
        finally:
            self.server.stop()

    async def _all(self) -> None:
        every = max(1, self.left // 10)
        async with httpx.AsyncClient(base_url=self.server.url, timeout=300) as client:
            clients = [self._client(client, random.Random(k), every) for k in range(CLIENTS)]
            await asyncio.gather(*clients)
            while (await client.get("/health")).json()["open"]:
                await asyncio.sleep(0.05)

    async def _client(self, client: httpx.AsyncClient, random: random.Random, every: int) -> None:
        while self.left and time.monotonic() < self.until:
            self.left -= 1
            await self._request(client, random)
            self.done += 1
            if self.kills and self.done >= self.kills[0]:
                self.kills.pop(0)
                member = random.choice(list(self.server.pipe.members))
                os.kill(member.pid, signal.SIGKILL)
            if self.done % every == 0:
                pids = [member.pid for member in self.server.pipe.members]
                self.memory.append((resident(os.getpid()), sum(map(resident, pids))))
                print(f"{self.done}: {dict(self.found)}, MB {megabytes(self.memory[-1])}")
                sys.stdout.flush()

    async def _request(self, client: httpx.AsyncClient, random: random.Random) -> None:
        kind = random.choice(self.kinds)
        if random.random() < CANCELLED:
            await self._cancelled(client, random, kind)
            return
        while True:
            answer = await client.post("/v1/completions", json=kind.body)
            if answer.status_code != 429:
                break
            self.found["429, tried again"] += 1
            await asyncio.sleep(random.random())
        if answer.status_code == 200:
            text = answer.json()["choices"][0]["text"]
            self.found["right" if text == kind.text else "wrong"] += 1
            if text != kind.text:
                self.wrong.append(f"{kind.body}: {text!r}, not {kind.text!r}")
        else:
            error = answer.json()["error"]
            self.found[f"error {error['code']}"] += 1
            if not error["code"]:
                self.wrong.append(f"an error without a name: {error}")

    async def _cancelled(
        self, client: httpx.AsyncClient, random: random.Random, kind: Kind
    ) -> None:
        """Leave in the midst of a stream, or before there is an answer."""
        self.found["cancelled"] += 1
        if random.random() < 0.5:
            body = {**kind.body, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as stream:
                async for _ in stream.aiter_lines():
                    break
            return
        try:
            post = client.post("/v1/completions", json=kind.body)
            await asyncio.wait_for(post, random.random() * 0.05)
        except TimeoutError:
            pass


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def megabytes(memory: tuple[int, int]) -> str:
    """Of the server and of the workers."""
    return " + ".join(f"{each / 1e6:.0f}" for each in memory)


def kinds() -> list[Kind]:
    """The different requests."""
    model, drawn = gpt2(), random.Random(0)
    found = []
    for _ in range(KINDS):
        prompt = [drawn.randrange(1, WORDS) for _ in range(drawn.randrange(1, 8))]
        most, seed = drawn.randrange(1, 14), drawn.randrange(1000)
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": most, "seed": seed}
        options: dict[str, Any] = {}
        if drawn.random() < 0.5:
            options = {"do_sample": True, "temperature": 0.9, "top_p": 0.95}
            body |= {"temperature": 0.9, "top_p": 0.95}
        text = numbers(tokens_of(model, prompt, most=most, seed=seed, **options))
        found.append(Kind(body, text))
    return found


def main() -> int:
    """Run it; 1 if anything is not as it has to be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=10000)
    parser.add_argument("--seconds", type=float, default=3600.0)
    options = parser.parse_args()
    settings = Settings(
        port=0, devices=["cpu", "cpu"], cuts=["transformer.h.1"], workers="processes", queue=4
    )
    server = Server(Served.of(gpt2(), "gpt2"), settings)
    began = time.monotonic()
    count = options.requests
    soak = Soak(server, kinds(), count, began + options.seconds, [count // 3, 2 * count // 3])
    left: dict[int, Any] = {}

    thread = threading.Thread(target=soak.run, daemon=True)
    thread.start()
    sessions = server.pipe._sessions
    close = server.close

    def closing() -> None:
        """Look what states the workers still have, when everything is over."""
        sessions.drop()
        left.update(server.pipe._workers.fetch_states(range(sessions._kept)))
        close()

    server.close = closing  # type: ignore[method-assign]
    server.run()
    thread.join(60)
    took = time.monotonic() - began
    print(f"{soak.done} requests in {took:.0f} s: {dict(soak.found)}")
    print(f"memory in MB: {', '.join(map(megabytes, soak.memory))}")
    print(f"workers killed: {2 - len(soak.kills)}; states left with workers: {len(left)}")
    for line in soak.wrong[:20]:
        print(line)
    return int(bool(soak.wrong or left))


if __name__ == "__main__":
    sys.exit(main())
