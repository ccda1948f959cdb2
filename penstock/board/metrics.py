"""The state of a pipeline as OpenMetrics, served over HTTP, for Prometheus and the like."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.board.browsers import is_on_purpose
from penstock.board.control import Answers, Known
from penstock.board.runs import Run
from penstock.board.served import ASKED, STATE, state_of
from penstock.board.server import Server
from penstock.board.status import Status, status_here
from penstock.errors import InputError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

VARIABLE = "PENSTOCK_METRICS"
"""The environment variable that says where, if the script does not."""

LOOPBACK = "127.0.0.1"

METRICS = "/metrics"
"""The path of the metrics."""

FORBIDDEN = "forbidden"
"""A request that is refused, as a stranger's page may have had somebody's browser send it."""

OPEN_METRICS = "application/openmetrics-text"
"""The media type of OpenMetrics; clients that do not accept it get the older Prometheus format."""


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
    host = host.removeprefix("[").removesuffix("]")  # of IPv6
    return Address(host or LOOPBACK, int(port), given is not None)


class MetricsServer:
    """Serves the state of a pipeline at `http://HOST:PORT/metrics`.

    Args:
        host: the address of an interface of this machine.
        port: 0 takes a free one.
        run: gives that whose state is served, at `/metrics` and as JSON at `/state`.
        known: what is answered at the paths `ASKED` of `penstock.board.served`.

    Attributes:
        url: where.
        port: of it.

    Raises:
        InputError: prometheus-client is not installed, or the port is not free.
    """

    def __init__(self, host: str, port: int, run: Callable[[], Run], known: Known) -> None:
        try:
            from prometheus_client import CollectorRegistry
        except ModuleNotFoundError as error:
            raise InputError(
                "metrics= needs prometheus-client: pip install 'penstock[metrics]'"
            ) from error
        registry = CollectorRegistry()
        registry.register(Collector(lambda: status_here(run())))
        try:
            listener = bound(host, port)
            self.port: int = listener.getsockname()[1]
            pages = _Pages(run, registry, known)
            self._server = Server(listener, requested, pages, "penstock-metrics")
        except OSError as error:
            raise InputError(
                f"metrics cannot be served at {host}:{port}: {error.strerror}. Give another port; "
                "0 takes a free one, and Pipeline.metrics says which"
            ) from error
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop listening, if it has not stopped."""
        self._server.close()


def bound(host: str, port: int) -> socket.socket:
    """A socket that can listen there.

    Raises:
        OSError: there is no such address, or somebody else listens there.
    """
    family, kind, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family, kind)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(where)
        found.listen()  # or another could take the port before this one does
    except OSError:
        found.close()
        raise
    return found


def requested(received: bytes) -> str | None:
    """What a request of HTTP asks for: a path, or for metrics `OPEN_METRICS` if that is accepted.

    Returns:
        `None` if the request is not whole yet; an empty text if it is malformed, or of a method
        that is not served there; `FORBIDDEN` if a page of a stranger may have sent it. The path of
        a POST request, which does more than read, has `"POST "` before it.
    """
    head, end, _ = received.partition(b"\r\n\r\n")
    if not end:
        return None
    first, *headers = head.decode("latin-1").split("\r\n")
    method, _, rest = first.partition(" ")
    target, _, version = rest.partition(" ")
    if method not in ("GET", "POST") or not version.startswith("HTTP/1."):
        return ""
    path = target.partition("?")[0]
    fields: dict[str, str] = {}
    for name, _, value in (header.partition(":") for header in headers):
        name, before = name.strip().lower(), fields.get(name.strip().lower(), "")
        fields[name] = f"{before},{value.strip()}" if before else value.strip()
    asked = path if method == "GET" else f"POST {path}"
    if asked in ASKED:
        return asked if is_on_purpose(fields) else FORBIDDEN
    if method == "POST":
        return ""
    if path not in ("/", METRICS):
        return path
    return OPEN_METRICS if OPEN_METRICS in fields.get("accept", "") else METRICS


class _Pages:
    """Gives the responses of HTTP.

    Args:
        run: gives that whose state is served.
        registry: of its metrics.
        known: what is answered besides.
    """

    def __init__(self, run: Callable[[], Run], registry: CollectorRegistry, known: Known) -> None:
        self._run, self._registry, self._answers = run, registry, Answers(known)

    def __call__(self, what: str) -> bytes:
        """The response to what is `asked` for."""
        if what == STATE:
            return _response("200 OK", "application/json", state_of(self._run()))
        if what in (METRICS, OPEN_METRICS):
            return self._metrics(what)
        if what in ASKED:
            return _response("200 OK", "application/json", self._answers(ASKED[what]))
        if what == FORBIDDEN:
            return _response("403 Forbidden", "text/plain", b"penstock top is answered\n")
        if what:
            return _response("404 Not Found", "text/plain", b"/metrics and /state are served\n")
        return _response("400 Bad Request", "text/plain", b"GET is answered\n")

    def _metrics(self, what: str) -> bytes:
        from prometheus_client.exposition import choose_encoder

        encode, kind = choose_encoder(OPEN_METRICS if what == OPEN_METRICS else "")
        return _response("200 OK", kind, encode(self._registry))


def _response(status: str, kind: str, content: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n"
        "X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + content


class Collector:
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
            "bound_step": (status.bound_seconds, "The least time of a step, by the plan."),
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
        most = GaugeMetricFamily(
            "penstock_worker_peak_memory_bytes", "The most of it that was in use.", labels=labels
        )
        limit = GaugeMetricFamily(
            "penstock_worker_memory_limit_bytes",
            "What it may hold, if that was given.",
            labels=labels,
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
            most.add_metric(values, worker.most_memory)
            if worker.limit:
                limit.add_metric(values, worker.limit)
            runs.add_metric(values, float(worker.state == "running"))
        yield from (worked, waited, held, most, limit, runs)
