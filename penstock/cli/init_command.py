"""`penstock init`"""

from __future__ import annotations

import difflib
import io
import json
import tokenize
from pathlib import Path

import click

from penstock.cli.common import listed, reported, show, talk
from penstock.errors import InputError


@click.command("init")
@click.argument("script", type=click.Path(path_type=Path))
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where to write the changed script; default: beside it, SCRIPT_penstock.py.",
)
@click.option("--force", is_flag=True, help="Overwrite the output if it exists.")
@click.option("--diff", "only_diff", is_flag=True, help="Print the diff, and write nothing.")
@click.option(
    "--devices", metavar="LIST", help="Devices to use: cpu,cpu or cuda:0,cuda:1; default: all."
)
@click.option(
    "--microbatches",
    "number",
    type=click.IntRange(min=1),
    metavar="N",
    help="Per batch; default: as many as are fastest. 1 gives the same bits as the script itself.",
)
@reported
def command(
    script: Path,
    output: Path | None,
    force: bool,
    only_diff: bool,
    devices: str | None,
    number: int | None,
    as_json: bool,
) -> None:
    """Read a training SCRIPT, and write one beside it that trains with a pipeline.

    The script itself is not changed, and not run. The diff is printed, and what was changed, what
    was left as it is, and what to check, by line.
    """
    from penstock.files import save_whole
    from penstock.porting import Options, port

    target = output or script.with_name(f"{script.stem}_penstock.py")
    text, encoding = _read(script)
    if target.resolve() == script.resolve():
        raise InputError(f"--output {target} is the script itself, which is never changed")
    if not only_diff and target.exists() and not force:
        raise InputError(
            f"{target} exists already: give --force to overwrite it, --output FILE for another "
            "name, or --diff to only see the changes"
        )
    chosen = "" if devices is None else json.dumps(listed(devices))
    found = port(text, str(script), Options(chosen, number))
    diff = _diff(text, found.text, script, target)
    if not only_diff:
        save_whole(target, found.text.encode(encoding), "changed script")
    notes = [{"line": note.line, "kind": note.kind, "text": note.text} for note in found.notes]
    data = {
        "script": str(script),
        "output": None if only_diff else str(target),
        "style": found.style,
        "notes": notes,
        "diff": diff,
    }
    show(data, diff.rstrip("\n"), as_json)
    if as_json:
        return
    for title, kind in (("changed", "changed"), ("left as it is", "left"), ("check", "check")):
        lines = [f"  line {note.line}: {note.text}" for note in found.notes if note.kind == kind]
        if lines:
            talk("\n".join([f"{title}:", *lines]))
    if not only_diff:
        talk(f"wrote {target}; {script} is as it was. Try it: python {target}")


def _read(script: Path) -> tuple[str, str]:
    """The text of a script, with its own line ends, and its encoding.

    Raises:
        InputError: it cannot be read.
    """
    if script.is_dir():
        raise InputError(f"{script} is a folder; give a script: penstock init {script}/train.py")
    if script.suffix == ".ipynb":
        raise InputError(
            f"{script} is a notebook: save it as a script first (jupyter nbconvert --to script)"
        )
    try:
        content = script.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return content.decode(encoding), encoding
    except OSError as error:
        raise InputError(f"cannot read {script}: {error.strerror}") from error
    except (SyntaxError, UnicodeDecodeError) as error:
        raise InputError(f"{script} is no text that Python can read: {error}") from error


def _diff(before: str, after: str, script: Path, target: Path) -> str:
    """What has changed, as `diff -u` prints it."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), str(script), str(target)
    )
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)
