"""What was measured before is read; nothing that is wrong with a cache is an error."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import InputError
from penstock.profile import cache as cache_module
from penstock.profile.cache import (
    ProfileCache,
    cache_directory,
    cache_key,
    cached_profiles,
)
from tests.support.models import mlp

X = torch.randn(8, 4)


def program(model: nn.Module | None = None, x: torch.Tensor = X) -> ps.Program:
    return ps.capture(model or mlp(4, 4, 4), (x,))


def measured(of: ps.Program, directory: Path, **changes: Any) -> tuple[ps.Profile, bool]:
    asked: dict[str, Any] = {"devices": ["cpu"], "threads": 1, "num_microbatches": 1, **changes}
    choices = [(asked.pop("devices"), asked.pop("threads"))]
    (found,), was_kept = cached_profiles(
        of, choices=choices, cache=ProfileCache(directory), **asked
    )
    return found, was_kept


def test_what_was_measured_is_read(tmp_path: Path) -> None:
    first, was_kept = measured(program(), tmp_path)
    told: list[tuple[int, int, str]] = []
    second, is_kept = measured(program(), tmp_path, progress=lambda *a: told.append(a))
    assert (was_kept, is_kept) == (False, True)
    assert second == type(second).load(next(tmp_path.iterdir()))
    assert second.labels == first.labels
    assert told == [(1, 1, "profiled before, kept in the cache")]


def test_lists_of_devices_are_measured_together(tmp_path: Path) -> None:
    """A part of them that was measured alone, or with others, does not do."""
    both: list[tuple[list[str], int]] = [(["cpu"], 2), (["cpu", "cpu"], 1)]

    def asked(
        choices: list[tuple[list[str], int]], **options: Any
    ) -> tuple[list[ps.Profile], bool]:
        own = ProfileCache(tmp_path)
        return cached_profiles(program(), choices=choices, num_microbatches=1, cache=own, **options)

    assert [asked([one])[1] for one in both] == [False, False]
    first, were_kept = asked(both)
    assert were_kept is False
    assert [(c.devices, c.threads) for c in first] == [(("cpu",), 2), (("cpu", "cpu"), 1)]
    second, were_kept = asked(both)
    assert were_kept is True
    assert [(c.devices, c.threads) for c in second] == [(("cpu",), 2), (("cpu", "cpu"), 1)]
    assert asked(both, fresh=True)[1] is False


def test_what_was_measured_for_longer_does_as_well(tmp_path: Path) -> None:
    def asked(seconds: float, longer: float) -> bool:
        own, devices = ProfileCache(tmp_path), [(["cpu"], 1)]
        return cached_profiles(
            program(),
            choices=devices,
            num_microbatches=1,
            seconds=seconds,
            longer=longer,
            cache=own,
        )[1]

    assert asked(2.0, 0.0) is False
    assert asked(1.0, 0.0) is False
    assert asked(0.5, 3.0) is False
    assert asked(0.25, 2.0) is True
    assert asked(2.0, 1.0) is True


def test_a_fresh_one_replaces_what_was_kept(tmp_path: Path) -> None:
    measured(program(), tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes().replace(b'"labels": ["0"', b'"labels": ["old"'))
    assert measured(program(), tmp_path)[0].labels[0] == "old"
    assert measured(program(), tmp_path, fresh=True)[1] is False
    assert measured(program(), tmp_path)[0].labels[0] == "0"


@pytest.mark.parametrize(
    "changes",
    [
        {"num_microbatches": 2},
        {"devices": ["cpu", "cpu"]},
        {"threads": 2},
        {"seconds": 31.0},
        {"args": (torch.randn(6, 4),)},
    ],
)
def test_another_question_is_measured(tmp_path: Path, changes: dict[str, Any]) -> None:
    measured(program(), tmp_path)
    assert measured(program(), tmp_path, **changes)[1] is False


def _key(model: nn.Module, x: torch.Tensor = X) -> str:
    return cache_key(program(model, x), [x], ["cpu"])


def _frozen() -> nn.Module:
    model = mlp(4, 4, 4)
    model[0].requires_grad_(False)
    return model


def test_another_model_has_another_key() -> None:
    """These have programs alike, and take another time."""
    images = torch.randn(2, 3, 8, 8)
    convolutions = [nn.Sequential(nn.Conv2d(3, 4, k, padding=k // 2)) for k in (3, 5)]
    dilated = nn.Sequential(nn.Conv2d(3, 4, 3, padding=2, dilation=2))
    keys = [_key(model, images) for model in (*convolutions, dilated)]
    keys += [_key(mlp(4, 4, 4)), _key(_frozen())]
    assert len(set(keys)) == len(keys)
    assert _key(mlp(4, 4, 4)) == _key(mlp(4, 4, 4))


class Deep(nn.Module):
    """One call that a recording cannot look into, of any length."""

    def __init__(self, depth: int, function: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.depth, self.function = depth, function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.depth):
            x = self.function(x @ self.weight)
        return x


class Deeper(Deep):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


def test_what_a_closed_module_does_is_in_the_key() -> None:
    closed = [Deep(1, torch.relu), Deep(9, torch.relu), Deep(1, torch.tanh), Deeper(1, torch.relu)]
    models = [nn.Sequential(nn.Linear(4, 4), module) for module in closed]
    programs = [ps.capture(model, (X,), keep_closed=["1"]) for model in models]
    keys = {cache_key(program, [X], ["cpu"]) for program in programs}
    assert len(keys) == len(models)


def test_autocast_is_in_the_key() -> None:
    """What is measured under it takes another time."""
    same = program()
    outside = cache_key(same, [X], ["cpu"])
    with torch.autocast("cpu", torch.bfloat16):
        assert cache_key(same, [X], ["cpu"]) != outside


def test_other_values_have_the_same_key() -> None:
    assert _key(mlp(4, 4, 4), X) == _key(mlp(4, 4, 4), X + 1)


def test_another_machine_or_version_has_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _key(mlp(4, 4, 4))
    monkeypatch.setattr(cache_module, "_machine", lambda: "another")
    other = _key(mlp(4, 4, 4))
    monkeypatch.setattr(torch, "__version__", "0.1")
    third = _key(mlp(4, 4, 4))
    monkeypatch.setattr(cache_module, "_MEASURED", ("seconds",))
    assert len({before, other, third, _key(mlp(4, 4, 4))}) == 4


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"version": 0}'])
def test_a_broken_file_is_measured_again_and_replaced(tmp_path: Path, content: bytes) -> None:
    measured(program(), tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(content)
    assert measured(program(), tmp_path)[1] is False
    assert measured(program(), tmp_path)[1] is True
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_that_cannot_be_is_no_error(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("here first")
    for _ in range(2):
        assert measured(program(), occupied / "cache")[1] is False
    assert occupied.read_text() == "here first"


def test_the_files_used_last_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_MOST_FILES", 2)
    kept, costs = ProfileCache(tmp_path), measured(program(), tmp_path / "other")[0]
    for name in (others := ("a note.txt", "settings.json", "profile-1.json")):
        (tmp_path / name).write_text("not ours")
        os.utime(tmp_path / name, (100, 100))
    a, b, c = (letter * 32 for letter in "abc")
    for age, key in ((200, a), (300, b)):
        kept.put(key, costs)
        os.utime(tmp_path / f"{key}.json", (age, age))
    assert kept.get(a) is not None  # and so it is newer than b
    kept.put(c, costs)
    assert [key for key in (a, b, c) if kept.get(key)] == [a, c]
    assert all((tmp_path / name).exists() for name in others)


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", "/p")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setenv("HOME", "/h")
    assert cache_directory() == Path("/p/profiles")
    monkeypatch.delenv("PENSTOCK_CACHE")
    assert cache_directory() == Path("/x/penstock/profiles")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path("/h/.cache/penstock/profiles")


def test_nobody_has_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "cache_directory", lambda: None)
    for _ in range(2):
        choices = [(["cpu"], 1)]
        assert cached_profiles(program(), choices=choices, num_microbatches=1)[1] is False


def test_a_batch_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the example that was captured had"):
        measured(program(), tmp_path, args=(torch.randn(8, 5),))
    with pytest.raises(InputError, match="num_microbatches=9, but the batch has 8 rows"):
        measured(program(), tmp_path, num_microbatches=9)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "settings",
    [
        lambda: torch.backends.mkldnn.flags(enabled=False),
        lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        torch.autograd.detect_anomaly,
    ],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:TF32 acceleration")
def test_settings_of_torch_are_in_the_key(settings: Callable[[], Any]) -> None:
    same = program()
    outside = cache_key(same, [X], ["cpu"])
    with settings():
        assert cache_key(same, [X], ["cpu"]) != outside
    assert cache_key(same, [X], ["cpu"]) == outside


def test_the_layout_in_memory_is_in_the_key() -> None:
    """Convolutions with their channels last take another time."""
    images = torch.randn(2, 3, 8, 8)
    last = images.to(memory_format=torch.channels_last)

    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3))

    keys = {_key(model(), images), _key(model(), last)}
    keys.add(_key(model().to(memory_format=torch.channels_last), images))
    assert len(keys) == 3
