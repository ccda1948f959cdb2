"""What models and inputs are called on the command line. No torch here: it takes seconds."""

from __future__ import annotations

import ast
import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import InputError

_INPUT = re.compile(
    r"^(?:(?P<name>[A-Za-z_]\w*)=)?"
    r"(?:(?P<dtype>[a-z0-9]+)\[(?P<inner>[\d,\s]+)\](?:<(?P<below>\d+)>?)?|(?P<plain>\d+(?:x\d+)*))$"
)
_DTYPES = (
    "float32 float64 float16 bfloat16 float double half int8 int16 int32 int64 int long short "
    "uint8 bool complex64 complex128"
).split()
_KIND = re.compile(r'\("([\w-]+)", "\w+Config"\)')


class Input(NamedTuple):
    """An example input, as it is written.

    Attributes:
        name: the keyword; `None` for a positional argument.
        dtype: its name in torch.
        shape: of the tensor.
        below: integers are drawn below this.
    """

    name: str | None
    dtype: str
    shape: tuple[int, ...]
    below: int


class Target(NamedTuple):
    """Something in a module, as it is written.

    Attributes:
        module: its name.
        folder: where it is, if it was given as a file.
        name: within the module.
        args, kwargs: what to call it with; `args` is `None` if it is not called.
    """

    module: str
    folder: str | None
    name: str
    args: Sequence[Any] | None
    kwargs: Mapping[str, Any]


def input_of(text: str) -> Input:
    """An input: `8x3x224x224`, `float32[8,10]` or `ids=int64[8,64]<256`.

    Raises:
        InputError: the text is none of these.
    """
    match = _INPUT.match(text)
    dtype = (match["dtype"] or "float32") if match else ""
    if match and dtype in _DTYPES:
        sizes = match["plain"].split("x") if match["plain"] else match["inner"].split(",")
        with suppress(ValueError):  # there is nothing between two commas, or far too many digits
            return Input(match["name"], dtype, tuple(map(int, sizes)), int(match["below"] or 2))
    raise InputError(
        f"{text!r} is not an input: write a shape (8x3x224x224), a dtype with a shape "
        "(float32[8,10]), an integer dtype with a bound (int64[8,512]<50257), each with "
        "name= before it for a keyword argument"
    )


def target_of(text: str) -> Target:
    """A name: `package.module:name`, `file.py:name`, either also `:name(1, width=2)`.

    Raises:
        InputError: the text is not of that form, or there is no such file or package.
    """
    where, colon, expression = text.partition(":")
    if not colon or not where or not expression:
        close = difflib.get_close_matches(text, _kinds(), 3)
        kinds = f", or a kind of transformers' models, {' or '.join(close)}" if close else ""
        raise InputError(
            f"{text!r} is not a callable: write package.module:callable or file.py:callable, also "
            f"with arguments, package.module:callable(32){kinds}"
        )
    name, args, kwargs = _called(text, expression)
    if where.endswith(".py"):
        path = Path(where)
        if not path.is_file():
            raise InputError(f"{text!r}: there is no file {where}")
        return Target(path.stem, str(path.parent.resolve()), name, args, kwargs)
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    top = where.partition(".")[0]
    if top not in sys.modules and find_spec(top) is None:
        raise InputError(f"{text!r}: there is no module {top!r} to import")
    return Target(where, None, name, args, kwargs)


def is_kind(text: str) -> bool:
    """Whether it is the name of a kind of transformers' models, `gpt2`."""
    return text in _kinds()


def _kinds() -> list[str]:
    """The kinds of models that the installed transformers has, read without importing it."""
    spec = find_spec("transformers")
    folders = spec.submodule_search_locations if spec else None
    files = sorted(Path(folders[0], "models/auto").glob("*.py")) if folders else []
    return [kind for file in files for kind in _KIND.findall(file.read_text())]


def _called(text: str, expression: str) -> tuple[str, Sequence[Any] | None, dict[str, Any]]:
    """The name, and the arguments of the call that it may be."""
    try:
        found = ast.parse(expression, mode="eval").body
        if not isinstance(found, ast.Call):
            return expression, None, {}
        args = [ast.literal_eval(argument) for argument in found.args]
        kwargs = {str(k.arg): ast.literal_eval(k.value) for k in found.keywords}
        return ast.unparse(found.func), args, kwargs
    except (SyntaxError, ValueError) as error:
        raise InputError(
            f"{text!r}: {expression!r} is neither a name nor a call with plain values, like "
            "Net(32, bias=False)"
        ) from error
