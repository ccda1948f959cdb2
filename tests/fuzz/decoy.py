"""Listens as the server of metrics does, but in no job: strangers who talk to it cost as much."""

from __future__ import annotations

import socket
import sys

from penstock.board.server import Server


def _nothing(said: bytes) -> None:
    """What is asked for."""


def main() -> None:
    """Serve until the input ends."""
    server = Server(socket.create_server(("127.0.0.1", 0)), _nothing, str.encode, "decoy")
    print("listening", flush=True)
    sys.stdin.read()
    server.close()


if __name__ == "__main__":
    main()
