"""The store of actors on several machines listens where they listen, and nowhere else."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from penstock.workers.ray.jobs import store_on


def test_on_one_address_alone() -> None:
    store = store_on("127.0.0.1")
    with socket.create_server(("127.0.0.2", store.port)):  # in use if the store were on all
        client = TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=20))
        client.set("key", "value")
        assert store.get("key") == b"value"
