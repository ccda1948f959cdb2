"""Machines that one does not have: what their descriptions mean, and what cannot be meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import penstock as ps
from penstock.errors import InputError
from penstock.profile.data import DeviceProfile, Link
from penstock.profile.hardware import Hardware, Machine

CLUSTER = """
[[device]]
name = "gpu"
count = 3
speed = 20
memory = "80GiB"

[[device]]
name = "old"
like = "cuda:0"
speed = 0.5

[[link]]
bandwidth = "25GB/s"
latency = "10us"

[[link]]
from = "gpu"
to = "gpu"
bandwidth = "300 GB/s"
"""


def profile(**changes: Any) -> ps.Profile:
    kind = DeviceProfile(
        kind="cpu",
        rows=(1, 2),
        forward=((1.0, 2.0), (2.0, 4.0)),
        backward=((2.0, 4.0), (4.0, 8.0)),
        weight=((1.0, 2.0), (2.0, 0.0)),
        halving=(0.5, 1.0),
        spread=0.1,
    )
    found = ps.Profile(
        fingerprint="f",
        batch_size=2,
        devices=("cpu", "cuda:0"),
        kinds={"cpu": kind, "cuda:0": msgspec.structs.replace(kind, kind="cuda:0")},
        labels=("a", "b"),
        weights=(1, 2),
        boundary=(1.0, 1.0, 1.0),
        forbidden={},
        capacity={"cuda:0": 7},
        links={"cpu>cpu": Link(latency_seconds=1.0), "cpu>cuda:0": Link(latency_seconds=2.0)},
    )
    return msgspec.structs.replace(found, **changes)


def loaded(tmp_path: Path, text: str) -> Hardware:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return Hardware.load(path)


def test_a_file_is_read(tmp_path: Path) -> None:
    assert loaded(tmp_path, CLUSTER) == Hardware(
        machines=(
            Machine(name="gpu", count=3, speed=20.0, memory=80 << 30),
            Machine(name="old", like="cuda:0", speed=0.5),
        ),
        link=Link(bytes_per_second=25e9, latency_seconds=10 * 1e-6),
        pairs={("gpu", "gpu"): Link(bytes_per_second=300e9)},
    )


def test_a_profile_for_it(tmp_path: Path) -> None:
    costs = loaded(tmp_path, CLUSTER).apply(profile())
    assert costs.devices == ("gpu", "gpu", "gpu", "old")
    assert costs.kinds["gpu"].kind == "gpu"
    assert costs.kinds["gpu"].forward == ((0.05, 0.1), (0.1, 0.2))
    assert costs.kinds["gpu"].backward == ((0.1, 0.2), (0.2, 0.4))
    assert costs.kinds["gpu"].weight == ((0.05, 0.1), (0.1, 0.0))
    assert costs.kinds["gpu"].halving == (0.025, 0.05)
    assert costs.kinds["old"].forward == ((2.0, 4.0), (4.0, 8.0))
    assert costs.capacity == {"gpu": 80 << 30, "old": 7}  # as large as what it is like
    assert costs.links["gpu>gpu"] == Link(bytes_per_second=300e9)
    slow = Link(bytes_per_second=25e9, latency_seconds=10 * 1e-6)
    assert [costs.links[k] for k in ("gpu>old", "old>gpu", "old>old")] == [slow] * 3


def test_without_links_it_has_those_that_were_measured(tmp_path: Path) -> None:
    text = '[[device]]\nname = "a"\n[[device]]\nname = "b"\nlike = "cuda:0"\n'
    links = loaded(tmp_path, text).apply(profile()).links
    assert links == {"a>a": Link(latency_seconds=1.0), "a>b": Link(latency_seconds=2.0)}


def test_a_single_link_is_for_all_and_a_pair_for_both_directions(tmp_path: Path) -> None:
    devices = '[[device]]\nname = "a"\n[[device]]\nname = "b"\n'
    single = loaded(tmp_path, devices + '[link]\nlatency = "1s"').apply(profile()).links
    assert single == dict.fromkeys(("a>a", "a>b", "b>a", "b>b"), Link(latency_seconds=1.0))
    pair = '[[link]]\nfrom = "a"\nto = "b"\nlatency = "3s"'
    links = loaded(tmp_path, devices + pair).apply(profile()).links
    assert links["a>b"] == links["b>a"] == Link(latency_seconds=3.0)
    assert links["a>a"] == Link(latency_seconds=1.0)  # measured


def test_a_device_like_none_that_was_measured_is_an_error(tmp_path: Path) -> None:
    hardware = loaded(tmp_path, '[[device]]\nname = "a"\nlike = "tpu"')
    with pytest.raises(InputError, match="'a' is like 'tpu', which was not measured; 'cpu' or"):
        hardware.apply(profile())


A = '[[device]]\nname = "a"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"there is no \[\[device\]\] table"),
        ("[device]\nname = 'a'", r"there is no \[\[device\]\] table"),
        ("device = [1]", r"\[\[device\]\] 1 is not a table of .*'speed', but 1"),
        ("[[devices]]", "the file has the unknown key 'devices'; did you mean 'device'"),
        ("[[device]]\ncount = 1", r"\[\[device\]\] 1 needs a name such as"),
        ('[[device]]\nname = "a>b"', 'without ">" in it'),
        (A + "sped = 2", r"\[\[device\]\] 1 has the unknown key 'sped'; did you mean 'speed'"),
        (A + "xyz = 2", "unknown key 'xyz'; it can have 'count' or 'like'"),
        (A + "count = 0", r"\[\[device\]\] 'a', count: 0 is not a number of devices"),
        (A + "count = true", "count: True is not a number of devices"),
        (A + 'speed = "fast"', "speed: 'fast' is not a factor"),
        (A + "speed = 0", "speed: 0 is not a factor"),
        (A + "like = 3", "like: 3 is not a name"),
        (A + 'memory = "80 gallons"', "memory: '80 gallons' is not a size; write it like 8GiB"),
        (A + "memory = -1", "memory: '-1' is not a size"),
        (A + A, "two devices are called 'a'"),
        (A + '[link]\nbandwidth = "9 GB/h"', r"\[link\], bandwidth: '9 GB/h' is not a speed"),
        (A + '[link]\nlatency = "9 m"', r"\[link\], latency: '9 m' is not a time"),
        (A + '[link]\nspeed = "1GB/s"', r"\[link\] has the unknown key 'speed'"),
        (A + "link = 3", "has the unknown key 'link'"),
        (A + '[link]\nfrom = "a"', "one of from and to"),
        (A + '[link]\nfrom = "a"\nto = "c"', "names the device 'c', which is none of 'a'"),
        (A + "[[link]]\n[[link]]\n", "for the same pair"),
        ("[[device", "is not TOML"),
    ],
)
def test_what_has_no_meaning_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        loaded(tmp_path, text)
    assert "cluster.toml" in str(caught.value)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read the hardware description .*No such file"):
        Hardware.load(tmp_path / "none.toml")


def test_the_description_in_the_documentation_is_valid() -> None:
    from penstock.profile import hardware

    example = "\n".join(
        line.strip() for line in (hardware.__doc__ or "").splitlines() if line.startswith("    ")
    )
    (gpu,) = hardware.parse(example).machines
    assert (gpu.count, gpu.speed, gpu.memory) == (4, 20.0, 80 << 30)
