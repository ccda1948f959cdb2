"""The state of a pipeline as OpenMetrics, served over HTTP, for Prometheus and the like."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from penstock.board.runs import Run
from penstock.board.served import STATE, state_of
from penstock.board.status import Status, status_here
from penstock.errors import InputError

VARIABLE = "PENSTOCK_METRICS"
"""The environment variable that says where, if the script does not."""

LOOPBACK = "127.0.0.1"


_PATIENCE = 5.0  # seconds


class Address(NamedTuple):
    """Where metrics are served.

    Attributes:
        host: the address of an interface of this machine.
        port: 0 takes a free one.
        is_asked_for: whether the script says so, and not the environment.
    """

    host: str
    port: int
    is_asked_for: bool


def address(given: int | str | None) -> Address | None:
    """Where to serve; `None` for nowhere.

    Args:
        given: a port, of this machine alone, or `"HOST:PORT"`; `None` leaves it to the environment
            variable `PENSTOCK_METRICS`.

    Raises:
        InputError: it is neither.
    """
    value = os.environ.get(VARIABLE) if given is None else given
    if value in (None, ""):
        return None
    host, _, port = str(value).rpartition(":")
    if isinstance(value, bool) or not port.isdecimal() or not 0 <= int(port) < 1 << 16:
        name = "metrics" if given is not None else VARIABLE
        raise InputError(
            f'{name}={value!r} is no place to serve metrics: give a port, such as 9100, or "HOST:'
            'PORT" to be reached from other machines, such as "0.0.0.0:9100"'
        )
    return Address(host or LOOPBACK, int(port), given is not None)


class Server:
    """Serves the state of a pipeline at `http://HOST:PORT/metrics`.

    Args:
        host: the address of an interface of this machine.
        port: 0 takes a free one.
        run: whose state is served, at `/metrics` and as JSON at `/state`.

    Attributes:
        url: where.
        port: of it.

    Raises:
        InputError: prometheus-client is not installed, or the port is not free.
    """

    def __init__(self, host: str, port: int, run: Run) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ModuleNotFoundError as error:
            raise InputError(
                "metrics= needs prometheus-client: pip install 'penstock[metrics]'"
            ) from error
        registry = CollectorRegistry()
        registry.register(_Collector(lambda: status_here(run)))
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise InputError(
                f"metrics cannot be served at {host}:{port}: {error.strerror}. Give another port; "
                "0 takes a free one, and Pipeline.metrics says which"
            ) from error
        self._server.set_app(_with_state(self._server.get_app(), run))
        self.port: int = self._server.server_port
        self.url = f"http://{host}:{self.port}/metrics"
        self._process, self._is_closed = os.getpid(), False

    def close(self) -> None:
        """Stop listening, if it has not stopped."""
        if self._is_closed:
            return
        self._is_closed = True
        if os.getpid() != self._process:  # a fork of it, which has not the thread
            self._server.server_close()
        elif threading.current_thread() is self._thread:  # which collects garbage
            threading.Thread(target=self._stop, daemon=True).start()
        else:
            self._stop()

    def _stop(self) -> None:
        self._server.shutdown()
        self._thread.join(_PATIENCE)
        self._server.server_close()


def _with_state(metrics: Any, run: Run) -> Any:
    """An application of WSGI that serves the state of a run, and leaves the rest to another."""

    def serve(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] != STATE or environ["REQUEST_METHOD"] != "GET":
            return metrics(environ, start)  # type: ignore[no-any-return]
        found = state_of(run)
        length = str(len(found))
        start("200 OK", [("Content-Type", "application/json"), ("Content-Length", length)])
        return [found]

    return serve


class _Collector:
    """What prometheus-client asks at every scrape."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status

    def describe(self) -> Iterable[Any]:
        """Nothing: the names are known when there is a state."""
        return []

    def collect(self) -> Iterable[Any]:
        """All series."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        status = self._status()
        totals = {
            "steps": (status.steps, "Training steps."),
            "evaluation_passes": (status.evaluations, "Passes without gradients."),
            "samples": (status.rows, "Rows of the batches of all steps."),
            "tokens": (status.tokens, "Tokens of the batches of all steps."),
        }
        for name, (count, help_text) in totals.items():
            yield CounterMetricFamily(f"penstock_{name}", help_text, value=count)
        times = {
            "step": (status.step_seconds, "Median time of the latest steps' passes."),
            "predicted_step": (status.predicted_seconds, "Time of a step, by the plan."),
        }
        for name, (seconds, help_text) in times.items():
            if seconds is not None:
                yield GaugeMetricFamily(f"penstock_{name}_seconds", help_text, value=seconds)
        labels = ("worker", "device", "replica")
        worked = CounterMetricFamily(
            "penstock_worker_worked_seconds", "Time that a worker worked in passes.", labels=labels
        )
        waited = CounterMetricFamily(
            "penstock_worker_waited_seconds", "Time that it waited for others.", labels=labels
        )
        held = GaugeMetricFamily(
            "penstock_worker_memory_bytes", "Memory of its device or process.", labels=labels
        )
        runs = GaugeMetricFamily(
            "penstock_worker_up", "1 if it runs, 0 if it is stopped or gone.", labels=labels
        )
        for worker in status.workers:
            if worker.state == "elsewhere":
                continue
            values = (str(worker.number), worker.device, str(worker.replica))
            worked.add_metric(values, worker.worked_seconds)
            waited.add_metric(values, worker.waited_seconds)
            held.add_metric(values, worker.memory)
            runs.add_metric(values, float(worker.state == "running"))
        yield from (worked, waited, held, runs)
