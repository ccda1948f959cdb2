"""What `penstock top` shows besides the pipelines of this user: an address, or a run's folder."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from penstock.account.history import History, read_run
from penstock.board.process import is_alive
from penstock.board.runs import Run, find
from penstock.board.served import Remote, others_of, url_of
from penstock.cadence import wait_until
from penstock.errors import InputError

_OFTEN = 10.0  # seconds after which other ranks are looked for again


class Served:
    """The pipeline that is served at an address, with all ranks of its job that can be reached.

    Args:
        text: `HOST:PORT`, or a URL.

    Raises:
        InputError: it is no address, or no pipeline is served there.
    """

    def __init__(self, text: str) -> None:
        self._first = Remote(url_of(text))
        self._others: dict[str, Remote] = {}
        self._tried = 0.0
        self._first.wait()

    def find(self) -> Sequence[Remote]:
        """The ranks that answer; none if the pipeline has gone."""
        if not self._first.is_alive:
            return []
        self._look_for_others()
        job = self._first.description.job
        answering = [r for r in self._others.values() if r.is_alive]
        return [self._first, *(r for r in answering if r.description.job == job)]

    def wait_for_others(self) -> None:
        """Wait, for a second at most, until each other rank has answered or failed to."""
        self._look_for_others()
        others = self._others.values()
        wait_until(
            lambda: all(other.is_alive or other.problem for other in others), seconds=1, pause=0.02
        )

    def close(self) -> None:
        """Ask no more."""
        for each in (self._first, *self._others.values()):
            each.close()

    def _look_for_others(self) -> None:
        if self._tried and time.monotonic() - self._tried < _OFTEN:
            return
        self._tried = time.monotonic()
        for url in others_of(self._first):
            if url not in self._others:
                self._others[url] = Remote(url)

    @property
    def nothing(self) -> str:
        """Why there is nothing to be seen."""
        return f"the pipeline is gone: {self._first.problem}"


class Written:
    """The pipeline that writes a run's folder now.

    Args:
        folder: given as `Pipeline(run=...)`.

    Raises:
        InputError: it is none, or no pipeline of this user on this machine writes it now.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if not self.find():
            raise InputError(self.nothing)

    def find(self) -> Sequence[Run]:
        """The pipeline, or the ranks of it that are here; none if it has ended."""
        about = read_run(self._folder).about.description
        if about.job:
            return [run for run in find() if run.description.job == about.job]
        return [run for run in find(about.pid) if run.description.began == about.began]

    @property
    def nothing(self) -> str:
        """Why there is nothing to be seen."""
        history = read_run(self._folder)
        about = history.about.description
        report = f"`penstock report {self._folder}` shows what there is"
        if about.host != os.uname().nodename:
            return (
                f"{self._folder} is written on {about.host}: call penstock top there, or give the "
                f"address of its metrics; {report}"
            )
        ended = "was closed" if is_alive(about.pid, about.started) else "has ended"
        return (
            f"the pipeline of {self._folder} (process {about.pid}) {ended}, its latest news are of "
            f"{_latest(history)}; {report}"
        )


def _latest(history: History) -> str:
    times = [step.at for step in history.steps] + [event.at for event in history.events]
    latest = max(times, default=history.about.description.began)
    return datetime.fromtimestamp(latest).astimezone().strftime("%Y-%m-%d %H:%M:%S")
