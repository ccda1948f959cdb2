"""The times that workers need besides their calls, measured once on a machine and kept."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import torch
from msgspec.structs import replace as replace_fields

from penstock.planning.pass_overhead import flow_overhead, pass_overhead
from penstock.profile import Profile
from penstock.profile.cache import ProfileCache, hashed
from penstock.profile.data import Link
from penstock.workers.probe import LinkProbe, with_links


class Overheads(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept; the fields are `Profile`'s."""

    links: dict[str, Link]
    overhead_seconds: float
    adding_seconds: float
    overlap: bool


def with_overheads(
    profile: Profile,
    devices: Sequence[torch.device],
    where: LinkProbe,
    *,
    fresh: bool = False,
    cache: ProfileCache | None = None,
) -> Profile:
    """The profile of calls, with the times of links, actions and passes.

    The times of links and actions are measured, unless the cache has them for this machine, kind of
    workers and pairs of devices.

    Args:
        profile, devices, where: as of `with_links`.
        fresh: measure in any case, and replace what is in the cache.
        cache: where the times are kept; the user's cache by default.

    Raises:
        WorkerTimeout: a worker does not answer.
    """
    kept, key = cache or ProfileCache(), _key(devices, where.kind, profile.threads)
    found = None if fresh else _read(kept, key)
    if found is None:
        measured = with_links(profile, devices, where)
        found = Overheads(**{n: getattr(measured, n) for n in Overheads.__struct_fields__})
        kept.write(key, msgspec.json.encode(found))
    passes = flow_overhead if profile.inference else pass_overhead
    seconds = passes(len(devices))
    return replace_fields(profile, **msgspec.structs.asdict(found), pass_seconds=seconds)


def are_known(devices: Sequence[torch.device], kind: str, threads: int) -> bool:
    """Whether nothing has to be measured with workers; the arguments are those of a pipeline.

    Args:
        devices: of its workers.
        kind: theirs, as of `LinkProbe`.
        threads: intra-op threads of each CPU worker.
    """
    on_cpus = any(device.type == "cpu" for device in devices)
    key = _key(devices, kind, threads if on_cpus else 0)  # as a profile has them
    return len(devices) < 2 or _read(ProfileCache(), key) is not None


def _key(devices: Sequence[torch.device], kind: str, threads: int) -> str:
    pairs = sorted({f"{one}>{other}" for one, other in pairwise(devices)})
    return hashed(["overheads", kind, pairs, threads])


def _read(cache: ProfileCache, key: str) -> Overheads | None:
    """What is kept under this key, if it is whole."""
    data = cache.read(key)
    if data is None:
        return None
    try:
        return msgspec.json.decode(data, type=Overheads)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
