"""Two machines: two network namespaces that a virtual cable joins."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.workers.ranks.launching import environment, free_port

NAMES = [f"pst{os.getpid()}{side}" for side in "ab"]
IPS = ["10.213.7.1", "10.213.7.2"]


@contextmanager
def two_machines(names: Sequence[str] = NAMES, ips: Sequence[str] = IPS) -> Iterator[None]:
    """They are there in the context; a test is skipped where they cannot be made.

    Args:
        names: of their network namespaces.
        ips: their addresses.
    """
    if shutil.which("ip") is None:
        pytest.skip("there is no ip command to make network namespaces with")
    with ExitStack() as stack:
        try:
            for name in names:
                _ip("netns", "add", name)
                stack.callback(_ip, "netns", "del", name)
            _ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
            for name, address in zip(names, ips, strict=True):
                _ip("link", "set", name, "netns", name)
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
                _ip("-n", name, "link", "set", name, "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield


def cut_the_cable() -> None:
    """From now on the machines do not reach each other."""
    _ip("-n", NAMES[0], "link", "set", NAMES[0], "down")


def torchrun(
    ranks: Sequence[int], script: Sequence[str], **options: Any
) -> list[subprocess.Popen[str]]:
    """A torchrun on each of the machines.

    Args:
        ranks: how many each of them has.
        script: and its arguments.
        options: for `Popen`; those in a list are for one machine each.
    """
    port = free_port()  # here, and so in the new namespaces, where nobody listens yet
    started = []
    for number, (name, count) in enumerate(zip(NAMES, ranks, strict=True)):
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", str(count)]
        command += ["--master-addr", IPS[0], "--master-port", str(port)]
        command += ["--monitor-interval", "30", *script]
        own = {k: v[number] if isinstance(v, list) else v for k, v in options.items()}
        env = {**environment(), "GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
        started.append(subprocess.Popen(command, env=env, start_new_session=True, text=True, **own))
    return started


def _ip(*words: str) -> None:
    """Run `ip`, which needs to be root."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
