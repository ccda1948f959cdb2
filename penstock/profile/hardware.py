"""Machines that one does not have, described in a file, so that one can plan for them.

    [[device]]
    name = "gpu"          # what stages call it
    count = 4             # default: 1
    like = "cpu"          # the measured kind that it is derived from; default: the first
    speed = 20.0          # times as fast as that; default: 1
    memory = "80GiB"      # default: that of the measured kind, where it is known

    [link]                # between any two; default: as measured
    bandwidth = "25GB/s"  # default: values are handed over for free
    latency = "10us"      # default: none

With several `[[link]]` tables, those with `from` and `to` are for such a pair, in both directions
unless the other has a table too. Pairs of which nothing is known are as slow as the slowest.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Callable, Collection, Mapping
from itertools import product
from typing import Any, TypeVar

import msgspec

from penstock.errors import InputError
from penstock.files import read_whole
from penstock.profile.data import DeviceProfile, Link, Profile
from penstock.units import parse_bytes, parse_seconds, parse_speed

_DEVICE = ("name", "count", "like", "speed", "memory")
_DEFAULT = "cpu"  # what is measured if nothing else is named
_LINK = ("from", "to", "bandwidth", "latency")

T = TypeVar("T")
_Table = Mapping[str, Any]
_Pair = tuple[str, str]


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Devices that are alike.

    Attributes:
        name: what stages call them.
        count: how many there are.
        like: the measured kind that they are derived from; `None` for the first.
        speed: how many times as fast they are.
        memory: bytes of each; `None` for that of the measured kind.
    """

    name: str
    count: int = 1
    like: str | None = None
    speed: float = 1.0
    memory: int | None = None


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """Devices and the links between them.

    Attributes:
        machines: the devices, in the order of the stages.
        link: between any two; `None` for what was measured.
        pairs: the links between sender and receiver that are others.
    """

    machines: tuple[Machine, ...]
    link: Link | None = None
    pairs: dict[_Pair, Link] = msgspec.field(default_factory=dict)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Hardware:
        """Read a file as it is described above.

        Raises:
            InputError: it cannot be read, or something in it has no meaning; the message says what.
        """
        try:
            return parse(read_whole(path, "hardware description").decode())
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise InputError(f"{path} is not TOML: {error}") from error
        except InputError as error:
            if str(path) in str(error):
                raise
            raise InputError(f"{path}: {error}") from None

    @property
    def measured(self) -> list[str]:
        """The devices to measure, the default first: a CPU, if any machine is like no other."""
        sources = [machine.like for machine in self.machines]
        default = [_DEFAULT] if None in sources else []
        return list(dict.fromkeys([*default, *(name for name in sources if name is not None)]))

    def apply(self, profile: Profile) -> Profile:
        """What the program would cost on these devices.

        Raises:
            InputError: a device is like one that was not measured.
        """
        sources = {m.name: m.like or profile.devices[0] for m in self.machines}
        for name, source in sources.items():
            if source not in profile.kinds:
                raise InputError(
                    f"the device {name!r} is like {source!r}, which was not measured; "
                    f"{_or(profile.kinds)} was"
                )
        kinds = {m.name: _faster(profile.on(sources[m.name]), m) for m in self.machines}
        known = {m.name: m.memory or profile.capacity.get(sources[m.name]) for m in self.machines}
        links = {}
        for sender, receiver in product(sources, sources):
            measured = profile.links.get(f"{sources[sender]}>{sources[receiver]}")
            link = self._between(sender, receiver) or measured
            if link is not None:
                links[f"{sender}>{receiver}"] = link
        return msgspec.structs.replace(
            profile,
            devices=tuple(m.name for m in self.machines for _ in range(m.count)),
            kinds=kinds,
            links=links,
            capacity={name: memory for name, memory in known.items() if memory is not None},
            threads=0,
        )

    def _between(self, sender: str, receiver: str) -> Link | None:
        other_way = self.pairs.get((receiver, sender), self.link)
        return self.pairs.get((sender, receiver), other_way)


def _faster(kind: DeviceProfile, machine: Machine) -> DeviceProfile:
    def scaled(table: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(seconds / machine.speed for seconds in line) for line in table)

    return msgspec.structs.replace(
        kind,
        kind=machine.name,
        forward=scaled(kind.forward),
        backward=scaled(kind.backward),
        weight=scaled(kind.weight),
        halving=tuple(seconds / machine.speed for seconds in kind.halving),
        added_per_second=kind.added_per_second * machine.speed,
        launching=0.0,  # of another CPU
    )


def parse(text: str) -> Hardware:
    """The hardware that a TOML text describes.

    Raises:
        InputError: something in it has no meaning.
        tomllib.TOMLDecodeError: it is not TOML.
    """
    content = _known("the file", tomllib.loads(text), ("device", "link"))
    tables = content.get("device", [])
    if not isinstance(tables, list) or not tables:
        raise InputError("there is no [[device]] table; give one for each kind of device")
    machines = tuple(_machine(f"[[device]] {n}", table) for n, table in enumerate(tables, start=1))
    names = [machine.name for machine in machines]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise InputError(f"two devices are called {_or(twice)}; use count, or another name")
    found = content.get("link", [])
    links = [_link(table, names) for table in (found if isinstance(found, list) else [found])]
    pairs = dict(links)
    if len(pairs) < len(links):
        raise InputError("two [[link]] tables are for the same pair of devices")
    return Hardware(machines=machines, link=pairs.pop(None, None), pairs=_without_none(pairs))


def _without_none(pairs: Mapping[_Pair | None, Link]) -> dict[_Pair, Link]:
    return {pair: link for pair, link in pairs.items() if pair is not None}


def _machine(where: str, table: Any) -> Machine:
    _known(where, table, _DEVICE)
    name = table.get("name")
    if not isinstance(name, str) or not name or ">" in name:
        raise InputError(f'{where} needs a name such as "gpu", without ">" in it, not {name!r}')
    where = f"[[device]] {name!r}"
    return Machine(
        name=name,
        count=_read(where, table, "count", _count, 1),
        like=_read(where, table, "like", _text, None),
        speed=_read(where, table, "speed", _factor, 1.0),
        memory=_read(where, table, "memory", lambda v: parse_bytes(str(v)), None),
    )


def _link(table: Any, names: Collection[str]) -> tuple[_Pair | None, Link]:
    _known("[link]", table, _LINK)
    ends = [table[end] for end in ("from", "to") if end in table]
    for end in ends:
        if end not in names:
            raise InputError(f"[link] names the device {end!r}, which is none of {_or(names)}")
    if len(ends) == 1:
        raise InputError("[link] has one of from and to; a special pair needs both")
    link = Link(
        latency_seconds=_read("[link]", table, "latency", lambda v: parse_seconds(str(v)), 0.0),
        bytes_per_second=_read("[link]", table, "bandwidth", lambda v: parse_speed(str(v)), 0.0),
    )
    return (ends[0], ends[1]) if ends else None, link


def _known(where: str, table: object, keys: Collection[str]) -> _Table:
    """The table, none of whose keys is unknown."""
    if not isinstance(table, dict):
        raise InputError(f"{where} is not a table of {_or(keys)}, but {table!r}")
    for key in table:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it can have {_or(keys)}"
            raise InputError(f"{where} has the unknown key {key!r}; {hint}")
    return table


def _read(where: str, table: _Table, key: str, parsed: Callable[[Any], T], default: Any) -> T:
    if key not in table:
        return default  # type: ignore[no-any-return]
    try:
        return parsed(table[key])
    except InputError as error:
        raise InputError(f"{where}, {key}: {error}") from None


def _count(value: object) -> int:
    if type(value) is not int or value < 1:
        raise InputError(f"{value!r} is not a number of devices; give 1 or more")
    return value


def _factor(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise InputError(f"{value!r} is not a factor; 20.0 means 20 times as fast")
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise InputError(f'{value!r} is not a name; write it like "cpu"')
    return value


def _or(names: Collection[str]) -> str:
    return " or ".join(map(repr, sorted(names)))
