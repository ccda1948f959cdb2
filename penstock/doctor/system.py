"""The machine: cores, memory, limits, network, and what the environment says. No torch here."""

from __future__ import annotations

import difflib
import mmap
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

from penstock.board.metrics import VARIABLE as METRICS
from penstock.board.metrics import address
from penstock.board.runs import find, new_board
from penstock.devices.interfaces import interface_addresses
from penstock.devices.machine import processor
from penstock.doctor.findings import Finding, size
from penstock.errors import InputError
from penstock.files import anonymous_memory

_GIB = 1 << 30
_CGROUP = Path("/sys/fs/cgroup")
_SHM = Path("/dev/shm")
_LEAST_SHM = 256 << 20  # bytes; Docker's default is 64 MiB
_FILES = 1024  # descriptors
_PROCESSES = 256
_PINNING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT")
_SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies")
_DNS = 3.0  # seconds for the name of this machine
_INTERFACE = "GLOO_SOCKET_IFNAME"
_LISTEN = "PENSTOCK_LISTEN"
_LAUNCHERS = ("torchrun", "mpirun", "srun", "ray")

OWN = ("PENSTOCK_CACHE", _LISTEN, METRICS)
"""The environment variables that only Penstock reads."""

READ = {
    "PENSTOCK_CACHE": "where profiles are kept",
    _LISTEN: "the address on which a rank listens to other machines",
    METRICS: "where metrics are served",
    "XDG_CACHE_HOME": "where profiles are kept, if PENSTOCK_CACHE is not set",
    "XDG_RUNTIME_DIR": "where penstock top finds runs",
    _INTERFACE: "the network interface of gloo",
    "RANK": "the number of this rank",
    "WORLD_SIZE": "how many ranks there are",
    "LOCAL_RANK": "which of this machine's ranks it is",
    "LOCAL_WORLD_SIZE": "how many ranks this machine has",
    "MASTER_ADDR": "where rank 0 is",
    "MASTER_PORT": "where rank 0 is",
    "TORCHELASTIC_RUN_ID": "whether torchrun has started this",
    "TORCHELASTIC_USE_AGENT_STORE": "whether torchrun lends its store",
    **dict.fromkeys(
        (
            *("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID"),
            *("JSM_NAMESPACE_RANK", "FLUX_TASK_RANK", "HOROVOD_RANK"),
        ),
        "the number of this rank, by its launcher",
    ),
    "OMPI_COMM_WORLD_SIZE": "whether Open MPI has started this",
    "PMI_SIZE": "whether MPICH has started this",
    "MV2_COMM_WORLD_SIZE": "whether MVAPICH has started this",
    "SLURM_STEP_NUM_TASKS": "whether srun has started this",
    "JSM_NAMESPACE_SIZE": "whether jsrun has started this",
    "FLUX_JOB_SIZE": "whether Flux has started this",
    "HOROVOD_SIZE": "whether Horovod has started this",
    "GROUP_RANK": "the number of torchrun's agent",
    "RAY_ADDRESS": "the Ray cluster",
}
"""The environment variables that Penstock reads, and what for."""


# -- processor and memory -------------------------------------------------------------------------


def system() -> Iterator[Finding]:
    """The operating system and Python."""
    is_linux = sys.platform.startswith("linux")
    yield Finding(
        "system",
        "ok" if is_linux else "warning",
        f"{platform.system()} {platform.release()}, {platform.machine()}",
        "" if is_linux else "Penstock is developed and tested on Linux; use it there",
    )
    version = platform.python_version()
    is_known = sys.version_info >= (3, 11)
    yield Finding(
        "Python",
        "ok" if is_known else "problem",
        f"{version} ({sys.executable})",
        "" if is_known else "Penstock needs Python 3.11 or newer",
    )


def cores() -> Iterator[Finding]:
    """The cores that this process may use, and who else does."""
    allowed, every = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota = cpu_quota()
    found = f"{processor()}: {allowed} of {every} cores may be used"
    if quota is not None and quota < allowed - 0.01:
        least = max(1, int(quota))
        yield Finding(
            "cores",
            "warning",
            f"{found}, but the container gets the time of {quota:g}",
            f"plans count {allowed} cores; start the script by taskset -c 0-{least - 1} "
            f"python train.py, or give devices={least}",
        )
    else:
        yield Finding("cores", "ok", found)
    load = os.getloadavg()[0]
    is_busy = load > 0.5 * allowed + 0.5
    yield Finding(
        "load",
        "warning" if is_busy else "ok",
        f"{load:.1f} processes ran or waited to run in the last minute",
        "calls are measured while others use the cores; plan, profile and compare on an idle "
        "machine"
        if is_busy
        else "",
    )


def threads() -> Iterator[Finding]:
    """What the environment says of threads."""
    given = {name: os.environ[name] for name in _THREADS if name in os.environ}
    pinned = {name: os.environ[name] for name in _PINNING if name in os.environ}
    if pinned:
        yield Finding(
            "threads",
            "warning",
            _settings(pinned),
            "this may pin the threads of all workers to the same cores: unset it",
        )
    elif "OMP_THREAD_LIMIT" in given:
        yield Finding(
            "threads",
            "warning",
            _settings(given),
            "OMP_THREAD_LIMIT holds for all workers of a process together: unset it",
        )
    else:
        found = _settings(given) or "nothing in the environment limits them"
        more = "; workers get their share of the cores all the same" if given else ""
        yield Finding("threads", "ok", found + more)


def memory() -> Iterator[Finding]:
    """Memory, and what the container may have of it."""
    fields = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) << 10
    available, total = fields["MemAvailable"], fields["MemTotal"]
    limit, used = memory_limit()
    found = f"{size(available)} of {size(total)} are available"
    if limit is not None and limit < total:
        available = min(available, max(0, limit - used))
        found = f"{size(available)} are available, of {size(limit)} that the container may have"
    is_little = available < _GIB
    yield Finding(
        "memory",
        "warning" if is_little else "ok",
        found,
        "each worker process needs about 0.4 GiB besides its part of the model: use threads, or "
        "end other programs"
        if is_little
        else "",
    )
    policy = Path("/proc/sys/vm/overcommit_memory")
    if policy.exists() and policy.read_text().strip() == "2":
        yield Finding(
            "overcommit",
            "warning",
            "vm.overcommit_memory=2: memory that is only reserved counts as used",
            "sysctl vm.overcommit_memory=0, if starting a worker fails for want of memory",
        )


def shared_memory() -> Iterator[Finding]:
    """Memory that processes share: Penstock's own has no name, data loaders use /dev/shm."""
    try:
        descriptor = anonymous_memory(1 << 20)
        try:
            with mmap.mmap(descriptor, 1 << 20) as shared:
                shared[-1] = 1
        finally:
            os.close(descriptor)
    except OSError as error:
        yield Finding(
            "shared memory",
            "problem",
            f"memory to share with worker processes cannot be had: {error.strerror}",
            'allow memfd_create (a seccomp profile may forbid it), or use workers="threads"',
        )
    else:
        yield Finding(
            "shared memory", "ok", "memory without a name can be shared with worker processes"
        )
    if not _SHM.is_dir():
        yield Finding(
            "/dev/shm",
            "warning",
            "there is none, so data loaders with num_workers > 0 will fail",
            "mount it: mount -t tmpfs tmpfs /dev/shm",
        )
        return
    usage = shutil.disk_usage(_SHM)
    is_little = usage.free < _LEAST_SHM
    yield Finding(
        "/dev/shm",
        "warning" if is_little else "ok",
        f"{size(usage.free)} of {size(usage.total)} are free, for data loaders and Ray; Penstock's "
        "own shared memory is not there",
        "enlarge it: docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm"
        if is_little
        else "",
    )


# -- limits and files -----------------------------------------------------------------------------


def limits() -> Iterator[Finding]:
    """The limits of the shell."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_low = 0 <= soft < _FILES
    raised = f"ulimit -n {_FILES if hard < 0 else min(hard, 1 << 16)} before the script starts"
    if 0 <= hard < _FILES:
        raised = "raise the hard limit: docker run --ulimit nofile=65536, or limits.conf"
    yield Finding(
        "open files",
        "warning" if is_low else "ok",
        f"{_limit(soft)} at once, up to {_limit(hard)} may be asked for",
        f"{raised}; every worker needs a few for each of the others" if is_low else "",
    )
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    is_low = 0 <= soft < _PROCESSES
    yield Finding(
        "processes",
        "warning" if is_low else "ok",
        f"{_limit(soft)} processes and threads of this user",
        f"ulimit -u {_PROCESSES * 16}: each worker has several threads" if is_low else "",
    )
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft >= 0:
        yield Finding(
            "address space",
            "warning",
            f"{size(soft)} for each process",
            "ulimit -v unlimited: torch and shared weights reserve more than they use",
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    fabric = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    is_low = bool(fabric) and 0 <= soft < _GIB
    yield Finding(
        "locked memory",
        "warning" if is_low else "ok",
        f"{_limit(soft, is_size=True)}{', with ' + ', '.join(fabric) if fabric else ''}",
        "ulimit -l unlimited: NCCL and MPI lock memory for RDMA" if is_low else "",
    )


def folders() -> Iterator[Finding]:
    """The folder for temporary files, and where `penstock top` finds runs."""
    temporary = Path(tempfile.gettempdir())
    free = shutil.disk_usage(temporary).free
    is_little = free < 64 << 20
    yield Finding(
        "temporary files",
        "warning" if is_little else "ok",
        f"{temporary}, {size(free)} are free",
        "make room, or set TMPDIR to another folder" if is_little else "",
    )
    board = new_board(1)
    try:
        path = board.path
    finally:
        board.close()
    running = len(find())
    if path is None:
        yield Finding(
            "running pipelines",
            "warning",
            "there is no private folder for their boards, so penstock top will not find them",
            "set XDG_RUNTIME_DIR to a folder of yours that nobody else can read (chmod 700)",
        )
    else:
        yield Finding("running pipelines", "ok", f"{running} of this user, in {path.parent}")


def allocator() -> Iterator[Finding]:
    """The C library, and what replaces its allocator."""
    library = " ".join(platform.libc_ver()).strip() or "unknown"
    preloaded = os.environ.get("LD_PRELOAD", "")
    other = next((n for n in ("jemalloc", "tcmalloc", "mimalloc") if n in preloaded), "")
    tuned = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"
    }
    maps = Path("/proc/self/maps")
    if preloaded and other and maps.exists() and other not in maps.read_text():
        yield Finding(
            "allocator",
            "warning",
            f"LD_PRELOAD={preloaded}, but {other} is not loaded",
            "give the path of the library that is installed, or unset LD_PRELOAD",
        )
    elif other:
        yield Finding(
            "allocator",
            "info",
            f"{other}, by LD_PRELOAD, which keeps freed memory by its own settings; "
            'Pipeline(allocator="keep") has no effect on it',
        )
    elif "glibc" not in library:
        yield Finding(
            "allocator",
            "warning",
            f"the C library is {library}, which cannot be told to keep freed memory",
            "steps on CPUs may be slower; with glibc, Penstock tells it to keep freed memory",
        )
    else:
        more = f"; also {_settings(tuned)}" if tuned else ""
        yield Finding("allocator", "ok", f"{library}, told to keep freed memory{more}")


def clock() -> Iterator[Finding]:
    """The clock that calls are measured with."""
    path = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    source = path.read_text().strip() if path.exists() else "unknown"
    start, reads = time.perf_counter(), 1000
    for _ in range(reads):
        time.perf_counter()
    cost = (time.perf_counter() - start) / reads
    is_slow = source in _SLOW_CLOCKS
    yield Finding(
        "clock",
        "warning" if is_slow else "ok",
        f"{source}, {cost * 1e9:.0f} ns to read",
        "tiny calls are measured as longer than they are; boot with clocksource=tsc, if the "
        "machine has it"
        if is_slow
        else "",
    )


# -- network and environment ----------------------------------------------------------------------


def network() -> Iterator[Finding]:
    """The interfaces, and which of them ranks on other machines would reach."""
    addresses = interface_addresses()
    listed = ", ".join(f"{name} {found or 'without IPv4'}" for name, found in addresses.items())
    yield Finding("network interfaces", "info", listed or "none")
    chosen = os.environ.get(_INTERFACE, "")
    if chosen:
        names = [name.lstrip("=^") for name in chosen.split(",")]
        missing = [name for name in names if not any(n.startswith(name) for n in addresses)]
        yield Finding(
            "address of ranks",
            "problem" if missing else "ok",
            f"{_INTERFACE}={chosen}"
            + (f": there is no interface {', '.join(missing)}" if missing else ""),
            f"choose one of {', '.join(addresses)}, or unset it" if missing else "",
        )
    else:
        yield _by_name(addresses)
    host = os.environ.get(_LISTEN, "")
    if host:
        yield _listening(host)


def _by_name(addresses: dict[str, str]) -> Finding:
    """Where gloo listens if nothing is set: at the address of this machine's name."""
    name, found = socket.gethostname(), list[str]()

    def look() -> None:
        try:
            found.append(socket.gethostbyname(name))
        except OSError as error:
            found.append(f"?{error}")

    thread = Thread(target=look, daemon=True)
    thread.start()
    thread.join(_DNS)
    others = [each for each, ip in addresses.items() if ip and not ip.startswith("127.")]
    to_do = (
        f"for ranks on several machines set {_INTERFACE}={others[0]}"
        if others
        else "this machine cannot be part of a job of several machines"
    )
    address = found[0] if found else "?no answer within 3 s"
    if address.startswith("?"):
        detail = f"the name of this machine, {name}, has no address: {address[1:]}"
        return Finding("address of ranks", "warning", detail, f"add it to /etc/hosts, or {to_do}")
    if address.startswith("127."):
        detail = f"{name} is {address}, which other machines cannot reach"
        return Finding("address of ranks", "warning" if others else "info", detail, to_do)
    interface = next((name for name, own in addresses.items() if own == address), "")
    detail = f"{name} is {address}{f', on {interface}' if interface else ''}"
    if not interface:
        return Finding(
            "address of ranks", "warning", f"{detail}, which no interface here has", to_do
        )
    return Finding("address of ranks", "ok", detail)


def _listening(host: str) -> Finding:
    """Whether a rank can listen at `host`, the value of `PENSTOCK_LISTEN`."""
    try:
        info = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        family, kind, _, _, there = info[0]
        with socket.socket(family, kind) as probe:
            probe.bind(there)
    except OSError as error:
        return Finding(
            _LISTEN,
            "problem",
            f"a rank cannot listen on {host!r}: {error.strerror or error}",
            "set it to an address of this machine, see the network interfaces, or unset it",
        )
    return Finding(_LISTEN, "ok", f"ranks can listen on {host}")


def environment() -> Iterator[Finding]:
    """What Penstock reads from the environment."""
    given = {name: os.environ[name] for name in READ if name in os.environ}
    yield Finding("environment", "info", _settings(given) or "sets nothing that Penstock reads")
    for name in sorted(os.environ):
        if name.startswith("PENSTOCK_") and name not in READ:
            close = difflib.get_close_matches(name, OWN, 1, 0.6)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(OWN)}"
            yield Finding(name, "warning", "is set, but nothing reads it", hint)
    try:
        where = address(None)
    except InputError as error:
        yield Finding(METRICS, "problem", str(error), "correct it, or unset it")
    else:
        if where is not None:
            yield Finding(METRICS, "ok", f"metrics are served on {where.host}:{where.port}")


def launchers() -> Iterator[Finding]:
    """The launchers that are installed."""
    beside = str(Path(sys.executable).parent)
    path = f"{os.environ.get('PATH', '')}{os.pathsep}{beside}"
    found = {name: shutil.which(name, path=path) for name in _LAUNCHERS}
    there = [name for name, where in found.items() if where]
    missing = [name for name, where in found.items() if not where]
    text = ", ".join(there) or "none"
    more = f"; not {', '.join(missing)}" if missing else ""
    if "torchrun" in there:
        yield Finding("launchers", "ok", text + more)
    else:
        to_do = "python -m torch.distributed.run does what torchrun does"
        yield Finding("launchers", "warning", text + more, to_do)


CHECKS = (
    *(system, cores, threads, memory, shared_memory, limits, folders, allocator, clock, network),
    *(environment, launchers),
)


# -- control groups -------------------------------------------------------------------------------


def cpu_quota(root: Path = _CGROUP) -> float | None:
    """The cores whose time the container gets; `None` without a limit."""
    found = []
    for folder in _groups(root, "cpu"):
        if (path := folder / "cpu.max").exists():
            quota, period = path.read_text().split()
            if quota != "max":
                found.append(int(quota) / int(period))
        elif (path := folder / "cpu.cfs_quota_us").exists():
            limit = int(path.read_text())
            if limit > 0:
                found.append(limit / int((folder / "cpu.cfs_period_us").read_text()))
    return min(found, default=None)


def memory_limit(root: Path = _CGROUP) -> tuple[int | None, int]:
    """The memory limit of the container in bytes, or `None`, and the bytes in use under it."""
    found = []
    for folder in _groups(root, "memory"):
        for limit, usage in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            if (folder / limit).exists():
                text = (folder / limit).read_text().strip()
                if text != "max" and int(text) < 1 << 60:
                    found.append((int(text), int((folder / usage).read_text())))
    return min(found, default=(None, 0))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control group and those above it."""
    own = Path("/proc/self/cgroup")
    lines = own.read_text().splitlines() if own.exists() else []
    seen = set()
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        home = root / controller if names else root
        for part in (Path(path), *Path(path).parents):
            folder = home / str(part).lstrip("/")
            if folder not in seen and folder.is_dir():
                seen.add(folder)
                yield folder
    if root not in seen:
        yield root


def _settings(given: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in given.items())


def _limit(value: int, is_size: bool = False) -> str:
    if value == resource.RLIM_INFINITY:
        return "unlimited"
    return size(value) if is_size else str(value)
