"""`penstock doctor` finds what is wrong, says what to do, and comes back."""

from __future__ import annotations

import json
import re
import resource
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import penstock
from penstock.cli import main
from penstock.doctor import Finding, devices, packages, system
from penstock.doctor.findings import made, size
from penstock.doctor.looking import findings_of
from penstock.doctor.trial import trial
from penstock.errors import PenstockError
from penstock.workers.ranks.rendezvous import _LAUNCHERS

SOURCES = Path(penstock.__file__).parent


def found(findings: Iterator[Finding], name: str) -> Finding:
    """The only one of that name."""
    (one,) = [each for each in findings if each.name == name]
    return one


# -- the machine ----------------------------------------------------------------------------------


@pytest.mark.parametrize("check", system.CHECKS, ids=lambda check: check.__name__)
def test_every_check_of_the_machine_comes_back(check: Any) -> None:
    findings = list(check())
    assert findings
    for each in findings:
        assert each.found
        assert (each.state in ("ok", "info")) or each.to_do


@pytest.mark.parametrize(
    ("check", "name", "value", "finding", "state", "said"),
    [
        ("network", "PENSTOCK_LISTEN", "203.0.113.9", "PENSTOCK_LISTEN", "problem", "203.0.113.9"),
        ("network", "PENSTOCK_LISTEN", "nonsense", "PENSTOCK_LISTEN", "problem", "nonsense"),
        ("network", "PENSTOCK_LISTEN", "127.0.0.1", "PENSTOCK_LISTEN", "ok", "127.0.0.1"),
        ("network", "GLOO_SOCKET_IFNAME", "eth99", "address of ranks", "problem", "eth99"),
        ("network", "GLOO_SOCKET_IFNAME", "lo", "address of ranks", "ok", "lo"),
        ("environment", "PENSTOCK_CACH", "/a", "PENSTOCK_CACH", "warning", "nothing reads it"),
        ("environment", "PENSTOCK_METRICS", "abc", "PENSTOCK_METRICS", "problem", "abc"),
        ("environment", "PENSTOCK_METRICS", "9100", "PENSTOCK_METRICS", "ok", "9100"),
        ("environment", "RANK", "3", "environment", "info", "RANK=3"),
        ("threads", "OMP_PROC_BIND", "true", "threads", "warning", "OMP_PROC_BIND"),
        ("threads", "OMP_THREAD_LIMIT", "1", "threads", "warning", "OMP_THREAD_LIMIT"),
        ("threads", "OMP_NUM_THREADS", "1", "threads", "ok", "OMP_NUM_THREADS=1"),
        ("allocator", "LD_PRELOAD", "/a/libjemalloc.so", "allocator", "warning", "not loaded"),
        ("allocator", "MALLOC_ARENA_MAX", "2", "allocator", "ok", "MALLOC_ARENA_MAX=2"),
        ("launchers", "PATH", "", "launchers", "ok", "torchrun"),
    ],
)
def test_what_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
    check: str,
    name: str,
    value: str,
    finding: str,
    state: str,
    said: str,
) -> None:
    for other in (*system.READ, "OMP_PROC_BIND", "OMP_THREAD_LIMIT", "OMP_NUM_THREADS"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    one = found(getattr(system, check)(), finding)
    assert one.state == state
    assert said in one.found
    assert bool(one.to_do) == (state in ("warning", "problem"))


def test_a_misspelt_variable_gets_the_name_that_was_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACH", "/a")
    assert "PENSTOCK_CACHE" in found(system.environment(), "PENSTOCK_CACH").to_do


def test_every_variable_that_penstock_reads_is_known() -> None:
    pattern = re.compile(r"environ(?:\.get\(|\.pop\(|\[)\s*\"([A-Z_]+)\"")
    assert {name for pair in _LAUNCHERS for name in pair} <= set(system.READ)
    others = {"COLUMNS", "PATH", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES", "PYTHONPATH"}
    for path in SOURCES.rglob("*.py"):
        if "bench" not in path.parts:
            assert set(pattern.findall(path.read_text())) - others <= set(system.READ), path


@pytest.mark.parametrize(
    ("limit", "finding", "value"),
    [
        (resource.RLIMIT_NOFILE, "open files", 256),
        (resource.RLIMIT_NPROC, "processes", 64),
        (resource.RLIMIT_AS, "address space", 1 << 30),
    ],
)
def test_low_limits(monkeypatch: pytest.MonkeyPatch, limit: int, finding: str, value: int) -> None:
    def low(which: int) -> tuple[int, int]:
        return (value, 1 << 20) if which == limit else (resource.RLIM_INFINITY,) * 2

    monkeypatch.setattr(system.resource, "getrlimit", low)
    one = found(system.limits(), finding)
    assert one.state == "warning"
    assert "ulimit" in one.to_do


def test_a_hard_limit_that_is_too_low(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system.resource, "getrlimit", lambda _: (200, 200))
    assert "hard limit" in found(system.limits(), "open files").to_do


def test_a_container_that_gets_less_time_than_it_sees_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text(f"{1 << 29}\n")
    (tmp_path / "memory.current").write_text(f"{1 << 28}\n")
    assert system.cpu_quota(tmp_path) == 1.5
    assert system.memory_limit(tmp_path) == (1 << 29, 1 << 28)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert system.cpu_quota(tmp_path) is None
    assert system.memory_limit(tmp_path) == (None, 0)
    monkeypatch.setattr(system, "cpu_quota", lambda: 1.5)
    monkeypatch.setattr(system, "memory_limit", lambda: (1 << 29, 1 << 28))
    monkeypatch.setattr(system.os, "sched_getaffinity", lambda _: set(range(8)))
    cores = found(system.cores(), "cores")
    assert cores.state == "warning"
    assert "taskset -c 0-0" in cores.to_do
    memory = found(system.memory(), "memory")
    assert memory.state == "warning"
    assert "256.0 MiB" in memory.found


def test_too_little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(free=1 << 20, total=64 << 20)
    monkeypatch.setattr(system.shutil, "disk_usage", lambda _: usage)
    assert found(system.shared_memory(), "/dev/shm").state == "warning"
    assert found(system.folders(), "temporary files").state == "warning"


def test_memory_that_cannot_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(system, "anonymous_memory", refused)
    one = found(system.shared_memory(), "shared memory")
    assert one.state == "problem"
    assert "not permitted" in one.found


@pytest.mark.parametrize(
    ("address", "state"), [("127.0.1.1", "warning"), ("203.0.113.9", "warning"), ("10.0.0.5", "ok")]
)
def test_the_address_of_the_name(monkeypatch: pytest.MonkeyPatch, address: str, state: str) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(
        system, "interface_addresses", lambda: {"lo": "127.0.0.1", "eth7": "10.0.0.5"}
    )
    monkeypatch.setattr(system.socket, "gethostbyname", lambda _: address)
    one = found(system.network(), "address of ranks")
    assert one.state == state
    assert "eth7" in one.to_do + one.found


def test_a_name_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(system, "_DNS", 0.05)
    monkeypatch.setattr(system.socket, "gethostbyname", lambda _: time.sleep(1))
    assert "no answer" in found(system.network(), "address of ranks").found


# -- what is installed ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "bounds", "expected"),
    [
        ("2.13.0+cpu", ">=2.13,<3", True),
        ("2.12.1", ">=2.13,<3", False),
        ("3.0", "<3,>=2.13", False),
        ("1.26", ">=1.26.0", True),
        ("8.1.0rc1", ">=8.1", True),
        ("5", "", True),
    ],
)
def test_versions(version: str, bounds: str, expected: bool) -> None:
    assert packages.fits(version, bounds) is expected


def test_missing_and_old_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    required = [
        "numpy>=999",
        "surely-not-there>=1",
        "msgspec>=0.19",
        "nowhere>=2; extra == 'report'",
        "numpy>=999; extra == 'trace'",
        "pytest; extra == 'test'",
    ]
    monkeypatch.setattr(packages.metadata, "requires", lambda _: required)
    states = {each.name: each for each in packages.packages()}
    assert states["numpy"].state == states["surely-not-there"].state == "problem"
    assert "pip install 'surely-not-there>=1'" in states["surely-not-there"].to_do
    assert states["msgspec"].state == "ok"
    assert states["extra report"].state == "info"
    assert "penstock[report]" in states["extra report"].to_do
    assert states["extra trace"].state == "warning"
    assert "extra test" not in states


def test_every_extra_for_users_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((SOURCES.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = [f"{name}; extra == '{extra}'" for extra in extras for name in extras[extra]]
    monkeypatch.setattr(packages.metadata, "requires", lambda _: required)
    names = {each.name for each in packages.packages()}
    assert names == {"penstock", *(f"extra {name}" for name in extras)} - {
        *("extra browser", "extra docs", "extra test")
    }
    assert "penstock" not in found(packages.packages(), "extra serve").found


# -- torch and devices ----------------------------------------------------------------------------


@pytest.mark.parametrize("check", devices.CHECKS, ids=lambda check: check.__name__)
def test_every_check_of_torch_comes_back(check: Any) -> None:
    for each in check():
        assert each.found
        assert (each.state in ("ok", "info")) or each.to_do


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a machine that is made up: two of different kinds that cannot reach each other."""
    names = {0: "A", 1: "B"}
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_arch_list": lambda: ["sm_90"],
        "get_device_properties": lambda k: SimpleNamespace(major=9 - 2 * k.index, minor=0),
        "mem_get_info": lambda k: (1 << 30, 2 << 30),
        "can_device_access_peer": lambda a, b: False,
        "get_device_name": lambda k: names[k.index],
    }.items():
        monkeypatch.setattr(devices.torch.cuda, name, value)
    findings = {each.name: each for each in devices.accelerators()}
    assert findings["cuda:0"].state == "ok"
    assert "1.0 GiB of 2.0 GiB" in findings["cuda:0"].found
    assert findings["cuda:1"].state == "problem"
    assert "sm_70" in findings["cuda:1"].to_do
    assert "0-1" in findings["peer access"].found
    assert findings["kinds of GPU"].state == "warning"


def test_a_driver_without_a_build_of_torch_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices.torch.version, "cuda", None)
    assert found(devices.accelerators(), "devices").state == "warning"
    monkeypatch.setattr(devices.torch.version, "cuda", "13.0")
    assert found(devices.accelerators(), "devices").state == "problem"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert found(devices.accelerators(), "devices").state == "info"


def test_kernels_that_do_not_give_the_same_bits_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    grad, count = torch.autograd.grad, iter(range(10))

    def drifting(*args: Any, **kwargs: Any) -> Any:
        k = next(count)
        return tuple(each + k for each in grad(*args, **kwargs))

    monkeypatch.setattr(devices.torch.autograd, "grad", drifting)
    assert found(devices.numerics(), "exactness on cpu").state == "warning"


def test_launchers_that_every_rank_would_train_alone_under(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    one = found(devices.distributed(), "launched by")
    assert one.state == "warning"
    assert "torchrun" in one.to_do


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    assert found(devices.cache(), "profile cache").state == "ok"
    (tmp_path / "profiles").write_text("a file")
    assert found(devices.cache(), "profile cache").state == "warning"


# -- workers, and processes that look -------------------------------------------------------------


def test_workers_start_and_are_exact() -> None:
    (one,) = trial("threads")
    assert one.state == "ok", one.found
    (other,) = findings_of("workers", ["penstock.doctor.trial", "processes"], 100)
    assert other.state == "ok", other.found


def test_workers_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    train_step = penstock.Pipeline.train_step

    def drifting(pipe: penstock.Pipeline, *args: Any, **kwargs: Any) -> None:
        train_step(pipe, *args, **kwargs)
        next(pipe.model.parameters()).grad.mul_(1 + 1e-6)  # type: ignore[union-attr]

    monkeypatch.setattr(penstock.Pipeline, "train_step", drifting)
    (one,) = trial("threads")
    assert one.state == "problem"
    assert "other bits" in one.found

    def refused(*_: Any, **__: Any) -> None:
        raise PenstockError("no workers today")

    monkeypatch.setattr(penstock.Pipeline, "train_step", refused)
    (one,) = trial("threads")
    assert one.state == "problem"
    assert "no workers today" in one.found


def test_what_hangs_is_ended_with_all_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hangs.py").write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (one,) = findings_of("torch", ["hangs"], 2)
    assert one.state == "problem"
    assert "no answer within 2 s" in one.found
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 20
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit('libcudart.so: cannot open')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (one,) = findings_of("torch", ["fails"], 30)
    assert one.state == "problem"
    assert "cannot open" in one.found


def test_a_check_that_fails_does_not_end_the_others() -> None:
    def broken_check() -> Iterator[Finding]:
        raise ZeroDivisionError("nothing")

    findings = list(made("machine", [broken_check, lambda: [Finding("next", "ok", "there")]]))
    assert [each.state for each in findings] == ["warning", "ok"]
    assert "ZeroDivisionError: nothing" in findings[0].found


def test_sizes() -> None:
    assert [size(n) for n in (5, 1536, 3 << 30, 2 << 40)] == [
        "5 B",
        "1.5 KiB",
        "3.0 GiB",
        "2.0 TiB",
    ]


# -- the command ----------------------------------------------------------------------------------


def test_the_command() -> None:
    result = CliRunner().invoke(main, ["doctor", "--quick", "--json"])
    data = json.loads(result.stdout)
    states = {each["state"] for each in data["findings"]}
    assert states <= {"ok", "info", "warning", "problem"}
    assert data["ok"] == ("problem" not in states)
    assert result.exit_code == (0 if data["ok"] else 1)
    names = {each["name"] for each in data["findings"]}
    assert {"cores", "/dev/shm", "torch", "torch.distributed", "exactness on cpu"} <= names
    assert not any(name.startswith("workers") for name in names)


def test_the_text_fits_and_problems_are_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    import penstock.doctor

    monkeypatch.delenv("COLUMNS", raising=False)
    findings = [
        Finding("a name that is long enough for two lines", "problem", "x" * 200, "do " * 60),
        Finding("two\x1b[31m", "warning", "words " * 40, "see"),
        Finding("three", "ok", "[bold]as it is[/bold]"),
    ]
    monkeypatch.setattr(penstock.doctor, "examine", lambda *_: iter(findings))
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "1 problem, 1 warning" in result.stdout
    assert "\x1b" not in result.stdout
    assert "[bold]as it is[/bold]" in result.stdout
    monkeypatch.setattr(penstock.doctor, "examine", lambda *_: iter(findings[1:]))
    assert CliRunner().invoke(main, ["doctor"]).exit_code == 0
