"""What is installed, without importing it. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata

from penstock.doctor.findings import Finding, State

_REQUIREMENT = re.compile(r"^([\w.-]+)(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?$")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([\w-]+)['\"]")
_BOUND = re.compile(r"(>=|<=|==|<|>)\s*([\d.]+)")
_FOR = {
    "cli": "this command line",
    "report": "reports and figures",
    "models": "the examples and penstock bench",
    "metrics": "Prometheus metrics",
    "trace": "timelines for Perfetto",
    "ray": 'workers="ray"',
    "lightning": "Lightning and Fabric",
    "accelerate": "models prepared with Accelerate",
    "transformers": "PenstockTrainer",
    "serve": "penstock serve",
}


def packages() -> Iterator[Finding]:
    """The packages that Penstock needs, and those that an extra brings."""
    try:
        version, required = metadata.version("penstock"), metadata.requires("penstock") or []
    except metadata.PackageNotFoundError:
        yield Finding(
            "penstock",
            "warning",
            "is imported from a folder and not installed, so what it requires is not known",
            "pip install -e '.[cli,report]' in its folder",
        )
        return
    yield Finding("penstock", "ok", version)
    extras: dict[str, list[tuple[str, str]]] = {}
    for text in required:
        match = _REQUIREMENT.match(text)
        if match is None:
            continue
        name, bounds, marker = match.group(1), match.group(2).strip(), match.group(3) or ""
        extra = _EXTRA.search(marker)
        if extra is None:
            yield _needed(name, bounds)
        elif extra.group(1) in _FOR and name != "penstock":
            extras.setdefault(extra.group(1), []).append((name, bounds))
    for extra_name, wanted in extras.items():
        yield _extra(extra_name, wanted)


def _needed(name: str, bounds: str) -> Finding:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, "problem", "is not installed", f"pip install '{name}{bounds}'")
    if not fits(version, bounds):
        found = f"{version} is installed, and Penstock is tested with {bounds}"
        return Finding(name, "problem", found, f"pip install '{name}{bounds}'")
    return Finding(name, "ok", f"{version} ({bounds or 'any'})")


def _extra(extra: str, wanted: list[tuple[str, str]]) -> Finding:
    """What is there of an extra; what is missing is no fault."""
    there, missing, old = [], [], []
    for name, bounds in wanted:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
            continue
        there.append(f"{name} {version}")
        if not fits(version, bounds):
            old.append(f"{name} {version} is not {bounds}")
    found = "; ".join(
        part
        for part in (
            ", ".join(there),
            f"not installed: {', '.join(missing)}" if missing else "",
            ", ".join(old),
        )
        if part
    )
    to_do = f"for {_FOR[extra]}: pip install 'penstock[{extra}]'" if missing or old else ""
    state: State = "warning" if old else "info" if missing else "ok"
    return Finding(f"extra {extra}", state, found, to_do)


def fits(version: str, bounds: str) -> bool:
    """Whether a version is within bounds such as `">=2.13,<3"`.

    Args:
        version: of a package; what follows its numbers, as in `"2.13.0+cpu"`, does not count.
        bounds: with commas.
    """
    own = _numbers(version)
    for sign, text in _BOUND.findall(bounds):
        other = _numbers(text)
        length = max(len(own), len(other))
        one, two = (each + (0,) * (length - len(each)) for each in (own, other))
        if not {">=": one >= two, "<=": one <= two, "==": one == two, "<": one < two}.get(
            sign, one > two
        ):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found.group().split("."))) if found else (0,)


CHECKS = (packages,)
