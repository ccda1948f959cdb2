"""Starts ranks in processes that need not import anything: forks of one that has.

It reads lines `SCENARIO DIRECTORY RANKS PORT` and answers each when all ranks have ended, with
their exit codes. The environment of the ranks is that of torchrun.
"""

from __future__ import annotations

import os
import sys
import traceback

from tests.workers.ranks import script


def fork(rank: int, ranks: str, port: str, scenario: str, directory: str) -> int:
    """Start a rank; returns the number of its process."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=ranks,
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            TORCHELASTIC_RUN_ID="test",
        )
        sys.argv[1:] = [scenario, directory]
        script.main()
        code = 0
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main() -> None:
    """Serve."""
    for line in sys.stdin:
        scenario, directory, ranks, port = line.split()
        pids = [fork(k, ranks, port, scenario, directory) for k in range(int(ranks))]
        print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids), flush=True)


if __name__ == "__main__":
    main()
