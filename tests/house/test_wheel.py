"""A built wheel works where there is no checkout, with what it says that it needs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TRAINS = """
import sys, torch, penstock as ps

def main():
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    x, y = torch.randn(8, 6), torch.randn(8, 4)
    mean = torch.nn.MSELoss()
    for workers in ("threads", "processes"):
        options = dict(devices=["cpu", "cpu"], workers=workers, num_microbatches=2, replicas=1)
        with ps.Pipeline(model, (x,), **options) as pipe:
            optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
            pipe.train_step(x, target=y, loss_fn=mean)
            optimizer.step()
            print(len(pipe.plan.stages), pipe.status().steps, ps.__file__)

main()
"""

ALONE = """
# Lets nothing be found that the wheel does not ask for.
import sys
from importlib.machinery import PathFinder

class Only:
    find_distributions = PathFinder.find_distributions

    @staticmethod
    def find_spec(name, path=None, target=None):
        hidden = name.partition(".")[0] in {others}
        return None if hidden else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Only
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = run(["-m", "build", "--wheel", "--no-isolation", "-o", str(folder), str(ROOT)])
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("*.whl")
    return found


def run(
    arguments: list[str],
    python: str = sys.executable,
    cwd: Path | None = None,
    more: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run Python without anything of the checkout."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | dict(more or {})
    return subprocess.run(
        [python, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


def asked_for() -> dict[str, set[str]]:
    """The names of the packages that the project needs, and those of its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {k: names(v) for k, v in project["optional-dependencies"].items()}
    return {"": names(project["dependencies"])} | extras


def names(requirements: list[str]) -> set[str]:
    found = {re.split(r"[\\[<>=~!; ]", requirement)[0] for requirement in requirements}
    return {name.replace("-", "_") for name in found}


def test_it_trains_with_the_packages_that_it_asks_for(wheel: Path, tmp_path: Path) -> None:
    """Those of extras are hidden; torch brings some that it needs itself, such as jinja2."""
    target, torchs = tmp_path / "installed", {"jinja2", "numpy"}
    done = run(["-m", "pip", "install", "-q", "--no-deps", "--target", str(target), str(wheel)])
    assert done.returncode == 0, done.stderr
    needs = asked_for()
    others = set.union(*needs.values()) - needs[""] - torchs - {"penstock"}
    assert {"click", "rich", "matplotlib", "transformers", "ray", "lightning"} <= others
    (tmp_path / "sitecustomize.py").write_text(ALONE.format(others=others))
    (tmp_path / "script.py").write_text(TRAINS)
    paths = os.pathsep.join([str(target), str(tmp_path)])
    done = run(["script.py"], cwd=tmp_path, more={"PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [["2", "1"], ["2", "1"]]
    assert all(str(target) in line for line in lines)
    done = run(["-m", "penstock", "--version"], cwd=tmp_path, more={"PYTHONPATH": paths})
    assert "pip install 'penstock[cli]'" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_it_installs_into_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """With the command line's extra."""
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    pins = ["-c", str(ROOT / "constraints.txt")]
    for each in (["torch"], [f"{wheel}[cli]"]):
        done = run(["-m", "pip", "install", "-q", *each, *pins], python=python)
        assert done.returncode == 0, done.stderr
    (tmp_path / "script.py").write_text(TRAINS)
    done = run(["script.py"], python=python, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert str(folder) in done.stdout
    done = run(["-m", "penstock", "--version"], python=python, cwd=tmp_path)
    assert done.stdout.startswith("penstock, version"), done.stderr
