"""A server: the pipeline of a model in the main thread, and HTTP in another."""

from __future__ import annotations

import math
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Literal

import torch
import uvicorn

from penstock.board.metrics import bound
from penstock.devices.choice import Devices
from penstock.devices.kinds import accelerator
from penstock.errors import InputError, PenstockError
from penstock.generation.generate import Generator, Job
from penstock.generation.groups import Group
from penstock.pipeline import Pipeline
from penstock.plan import Plan
from penstock.serving.app import Endpoints
from penstock.serving.completions import MOST_PROMPT, ONE_BEAM, Reader
from penstock.serving.connections import Connection
from penstock.serving.counting import Counts
from penstock.serving.engine import Engine, Work
from penstock.serving.predictor import Predictor
from penstock.serving.served import Served

Kind = Literal["auto", "threads", "processes"]

_ROWS = 8  # of an example that is made here, each a group, as sequences are served one by one
_LEAVING = 10.0  # seconds that the connections may take to close when everything is answered
_WARM = (1, 3, 5, 8)  # lengths of prompts that are generated before requests are taken
_WARM_TOKENS = 4
_PASS = 60.0  # seconds that a pass has at least, as Pipeline gives it: the first ones are slower


@dataclass(frozen=True)
class Settings:
    """How a model is served.

    Attributes:
        host, port: where; port 0 takes a free one.
        workers: as of `Pipeline`; `"auto"` is processes on CPUs, which are replaced if they end,
            and threads on GPUs.
        devices, plan, cuts, memory_limit, replicas: as of `Pipeline`.
        in_flight: sequences, or calls, that are under way at a time, for whose states the plan has
            room; `None` for as many as a plan that is given has, or one more than keep all stages
            busy.
        queue: how many may wait besides.
        kinds: how many kinds of inputs, such as other sizes, a model without `generate` may be
            called with besides the example's.
        timeout: seconds that a request may take, with its wait; a pass that takes longer, and more
            than a minute, is taken to hang.
        grace: seconds that requests may go on for when the server is stopped.
        max_tokens: the most tokens that a request may ask for, for each sequence.
        max_prompt: the most tokens that a prompt may have.
        origins: of pages that may use the server from elsewhere, such as `https://app.example`.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    workers: Kind = "auto"
    devices: Devices | None = None
    plan: Plan | None = None
    cuts: Sequence[str] | None = None
    memory_limit: str | None = None
    replicas: int = 1
    in_flight: int | None = None
    queue: int = 64
    kinds: int = 16
    timeout: float = 300.0
    grace: float = 30.0
    max_tokens: int = 1024
    max_prompt: int = MOST_PROMPT
    origins: Sequence[str] = ()


class Server:
    """Serves a model over HTTP.

    The thread that builds it has to be the one that calls `run`.

    Args:
        served: the model.
        settings: how.

    Attributes:
        pipe: the pipeline that runs the model.
        url: where it is served.

    Raises:
        InputError: the port is taken, or the model and the settings do not fit together.
    """

    def __init__(self, served: Served, settings: Settings) -> None:
        self._settings = settings
        with ExitStack() as stack:
            listener = stack.enter_context(_listening(settings.host, settings.port))
            self.pipe = stack.enter_context(_pipeline(served, settings))
            sessions = self.pipe._sessions
            width = settings.in_flight or sessions.most
            work: Work
            if served.generates:
                threads = self.pipe.threads_per_worker
                work = Generator(served.model, sessions, width, threads)
                _warm(work, served)
            else:
                work = Predictor(sessions, width, settings.kinds)
            most = width + settings.queue
            self._engine = Engine(work, most, sessions.drop, sessions.check)
            counts = Counts(self.pipe.status, lambda: self._engine.open, sessions.held)
            limits = settings.max_tokens, settings.max_prompt
            reader = Reader(served, *limits, self._engine.check_count)
            host, port = listener.getsockname()[:2]
            any_name = not ip_address(host).is_loopback
            allowed = any_name, settings.origins
            endpoints = Endpoints(served, self._engine, counts, settings.timeout, reader, *allowed)
            self._listener = listener
            self._http = uvicorn.Server(_config(endpoints, settings.grace))
            self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            self._stack = stack.pop_all()

    def run(self) -> int | None:
        """Serve until `stop` is called, or SIGTERM or SIGINT comes; then close everything.

        Returns:
            the signal, if it was one.

        Raises:
            Exception: what has made the pipeline useless.
        """
        serving = threading.Thread(target=self._serve, name="penstock-http", daemon=True)
        with self._stopping_at_signals() as signals:
            serving.start()
            try:
                self._engine.run()
            finally:
                self._http.should_exit = True
                serving.join(_LEAVING)
                self.close()
        return signals[0] if signals else None

    def stop(self, grace: float | None = None) -> None:
        """Take no more requests, and end when the present ones are over, or after a time of grace.

        It may be called from any thread, and by a signal handler.

        Args:
            grace: seconds after which requests that are not over are ended; by default
                `Settings.grace`.
        """
        self._http.should_exit = True
        self._engine.stop(self._settings.grace if grace is None else grace)

    def close(self) -> None:
        """Stop listening, and the workers."""
        self._stack.close()

    def _serve(self) -> None:
        """Answer requests; without this the engine has nothing to do."""
        try:
            self._http.run(sockets=[self._listener])
        finally:
            self._engine.stop(self._settings.grace)

    @contextmanager
    def _stopping_at_signals(self) -> Iterator[list[int]]:
        """Have the first signal stop the server, and a second one without grace.

        A signal does nothing else: passes that are under way come to their end.
        """
        came: list[int] = []

        def stop(number: int, frame: Any) -> None:
            came.append(number)
            self.stop(self._settings.grace if len(came) == 1 else 0.0)

        if threading.current_thread() is not threading.main_thread():
            yield came
            return
        before = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield came
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _pipeline(served: Served, settings: Settings) -> Pipeline:
    """The pipeline of a model."""
    served.model.eval()
    kind = settings.workers
    if kind == "auto":
        kind = "threads" if _uses_gpus(settings) else "processes"
    args, kwargs = served.example(_ROWS)
    is_own = not served.args and not served.kwargs
    options: dict[str, Any] = {
        "devices": settings.devices,
        "plan": settings.plan,
        "cuts": settings.cuts,
        "memory_limit": settings.memory_limit,
        "workers": kind,
        "timeout": None if served.pipeline.get("compile") else max(settings.timeout, _PASS),
        "on_failure": "replace" if kind == "processes" else "raise",
        "audit": None,
    }
    if settings.plan is None or settings.plan.inference:
        options |= {"inference": True, "in_flight": settings.in_flight}
    if settings.plan is None:
        options |= {"replicas": settings.replicas}
        options |= {"num_microbatches": _ROWS} if is_own else {}
    return Pipeline(served.model, args, kwargs, **{**options, **served.pipeline})


def _uses_gpus(settings: Settings) -> bool:
    devices = settings.plan.devices if settings.plan is not None else settings.devices
    if devices is None or isinstance(devices, int):
        return accelerator() is not None
    return any(torch.device(device).type != "cpu" for device in devices)


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that clients can connect to.

    Raises:
        InputError: there is no such address, or somebody else listens there.
    """
    try:
        listener = bound(host, port)
    except OSError as error:
        raise InputError(
            f"nothing can be served at {host}:{port}: {error.strerror}. Give another --port; 0 "
            "takes a free one"
        ) from error
    with listener:
        yield listener


def _config(endpoints: Endpoints, grace: float) -> uvicorn.Config:
    return uvicorn.Config(
        endpoints.app(),
        loop="asyncio",
        http=Connection,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(grace + _LEAVING / 2),
    )


def _warm(work: Generator, served: Served) -> None:
    """Generate a little, so that the first requests need not wait for recordings.

    Raises:
        InputError: the model's `generate` is not like that of transformers.
        PenstockError: the pipeline cannot run it.
    """
    padding = getattr(getattr(served.model, "generation_config", None), "pad_token_id", None)
    jobs = []
    for length in _WARM:
        ids = torch.ones(1, length, dtype=torch.long)
        arguments = {
            "attention_mask": torch.ones_like(ids),
            "min_new_tokens": _WARM_TOKENS,
            "max_new_tokens": _WARM_TOKENS,
            "pad_token_id": 0 if padding is None else padding,
            **ONE_BEAM,
        }
        jobs.append(Job(Group(range(1), (ids,), arguments), seed=0, streams=True))
        work.add(jobs[-1])
    while not work.is_idle:
        work.step()
    for job in jobs:
        if isinstance(job.error, PenstockError):
            raise job.error
        if job.error is not None:
            raise InputError(
                f"{type(served.model).__name__}.generate() does not take what transformers' does: "
                f"{type(job.error).__name__}: {job.error}. A model without generate() is called by "
                "/predict"
            ) from job.error
