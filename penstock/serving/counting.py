"""What a server counts, and the metrics of it and of its pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder

from penstock.board.metrics import Collector
from penstock.board.status import Status

Outcome = Literal["done", "refused", "failed", "timeout", "gone"]
"""How a request has ended: well; not accepted; by an error; too late; or its client went away."""

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class _States:
    """What prometheus-client asks for the states of sequences at every scrape."""

    def __init__(self, states: Callable[[], Mapping[int, int]]) -> None:
        self._states = states

    def describe(self) -> list[Any]:
        """Nothing: it is asked at every scrape."""
        return []

    def collect(self) -> Iterator[Any]:
        """The bytes of each stage."""
        family = GaugeMetricFamily(
            "penstock_serving_state_bytes",
            "Caches and other states of sequences that a stage holds.",
            labels=["stage"],
        )
        for stage, size in self._states().items():
            family.add_metric([str(stage)], size)
        yield family


class Counts:
    """Numbers of requests and tokens, and times.

    Args:
        status: of the pipeline.
        open_jobs: how many sequences or calls there are, those that wait included.
        states: the bytes of the states that workers hold, by stage.
    """

    def __init__(
        self,
        status: Callable[[], Status],
        open_jobs: Callable[[], int],
        states: Callable[[], Mapping[int, int]],
    ) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(Collector(status))
        registry.register(_States(states))
        name = "penstock_serving"
        self._requests = Counter(
            f"{name}_requests", "Requests by how they ended.", ["outcome"], registry=registry
        )
        self._tokens = Counter(f"{name}_tokens", "Tokens that were generated.", registry=registry)
        self._seconds = Histogram(
            f"{name}_request_seconds",
            "From a request to its end, of those that were done.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._first = Histogram(
            f"{name}_first_token_seconds",
            "From a request to its first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        gauge = Gauge(f"{name}_open", "Sequences that run or wait.", registry=registry)
        gauge.set_function(open_jobs)

    def ended(self, outcome: Outcome, since: float) -> None:
        """Count a request.

        Args:
            outcome: how it has ended.
            since: when it had come, of `time.monotonic()`.
        """
        self._requests.labels(outcome).inc()
        if outcome == "done":
            self._seconds.observe(time.monotonic() - since)

    def came(self, tokens: int, since: float | None = None) -> None:
        """Count tokens.

        Args:
            tokens: that have come.
            since: when the request had come, if these are its first.
        """
        self._tokens.inc(tokens)
        if since is not None:
            self._first.observe(time.monotonic() - since)

    def page(self, accept: str) -> tuple[bytes, str]:
        """All metrics, and their media type.

        Args:
            accept: the media types that the client takes.
        """
        encode, kind = choose_encoder(accept)
        return encode(self._registry), kind
