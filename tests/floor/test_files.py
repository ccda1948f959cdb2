"""Files that are written whole, and folders that one process has for itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock.files import FolderLock, write_whole


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """`--output /dev/null`, as root, must not replace that for everybody."""
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    write_whole(pipe, b"new")
    reader.join(5)
    assert got == [b"new"]
    assert pipe.is_fifo()


def test_a_lock_ends_with_its_process_whatever_forks_there_are(tmp_path: Path) -> None:
    """A data loader's worker outlives a process that is killed, by seconds."""
    code = (
        "import os, sys, time; from penstock.files import FolderLock; "
        f"lock = FolderLock({str(tmp_path)!r}); fork = os.fork(); "
        "fork or (print('forked', flush=True), time.sleep(60)); time.sleep(60)"
    )
    held = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    )
    assert held.stdout is not None
    try:
        assert held.stdout.readline() == b"forked\n"
        with pytest.raises(BlockingIOError):
            FolderLock(tmp_path)
        held.kill()
        held.wait()
        lock = FolderLock(tmp_path)
        with pytest.raises(BlockingIOError):
            FolderLock(tmp_path)
        lock.release()
        lock.release()
        FolderLock(tmp_path).release()
    finally:
        os.killpg(held.pid, signal.SIGKILL)
        held.wait()
        held.stdout.close()
