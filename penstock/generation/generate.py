"""`Pipeline.generate`: groups of sequences, each by the model's own `generate`, all at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.capture.trees import map_leaves
from penstock.errors import InputError
from penstock.generation.script import Ended, Request, Script
from penstock.generation.stand_in import lengths_in, named, stand_in
from penstock.sessions.session import Pass, Session, Sessions


class Tokens(NamedTuple):
    """New tokens of a group of sequences.

    Attributes:
        rows: the sequences, by their numbers in the batch.
        tokens: an int64 tensor with one token for each of these rows; of a sequence that has ended
            before, the padding token.
    """

    rows: Sequence[int]
    tokens: torch.Tensor


@dataclass(frozen=True)
class Group:
    """Sequences that are generated together.

    Attributes:
        rows: their numbers in the batch.
        args: positional arguments of the model's `generate`, for these rows.
        kwargs: keyword arguments likewise.
    """

    rows: Sequence[int]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass
class _Running:
    """A group that is being generated.

    Attributes:
        number: of the group.
        group: what it is.
        script: runs the model's `generate`.
        session: has its states.
        under_way: the pass that it waits for.
        tokens: that were not yielded yet.
    """

    number: int
    group: Group
    script: Script
    session: Session
    under_way: Pass | None = None
    tokens: deque[Tokens] = field(default_factory=deque)


class Generation:
    """Generates groups of sequences, several at a time, so that all stages are busy.

    Args:
        model: whose `generate` is called.
        sessions: of the pipeline.
        most: how many groups are under way at a time.
        threads: intra-op threads of what runs outside of the pipeline.
        seed: group of first row `r` draws random numbers as after `torch.manual_seed(seed + r)`.
        streams: whether tokens are wanted as they come.
    """

    def __init__(
        self,
        model: nn.Module,
        sessions: Sessions,
        most: int,
        threads: int,
        seed: int,
        streams: bool,
    ) -> None:
        self._model = model
        self._sessions = sessions
        self._most = most
        self._threads = threads
        self._seed = seed
        self._streams = streams
        self.results: dict[int, Any] = {}

    def run(self, groups: Sequence[Group]) -> Iterator[Tokens]:
        """Generate all groups; `results` has what the model's `generate` returned for each."""
        waiting = deque(enumerate(groups))
        running: deque[_Running] = deque()
        try:
            while waiting or running:
                while waiting and len(running) < self._most:
                    begun = self._begin(*waiting.popleft())
                    running.append(begun)
                    self._go_on(begun, running, None)
                    yield from _taken(begun)
                if running:
                    first = running.popleft()
                    running.append(first)
                    assert first.under_way is not None
                    done, first.under_way = first.under_way, None
                    self._go_on(first, running, self._sessions.finish(done))
                    yield from _taken(first)
        finally:
            self._cancel(running)
            self._sessions.drop()

    def _begin(self, number: int, group: Group) -> _Running:
        session = self._sessions.open()
        begun: _Running

        def generate(script: Script) -> Any:
            model = stand_in(self._model, lambda *a, **k: script.ask(named(self._model, a, k)))
            kwargs = dict(group.kwargs)
            if self._streams:
                kwargs["streamer"] = _Streamer(begun)
            return model.generate(*group.args, **kwargs)  # type: ignore[operator]

        script = Script(generate, self._seed + group.rows[0], self._threads)
        begun = _Running(number, group, script, session)
        return begun

    def _go_on(self, one: _Running, running: deque[_Running], answer: Any) -> None:
        """Let a group go on until its next pass has begun, or it has ended."""
        error: BaseException | None = None
        while True:
            event: Request | Ended = one.script.resume(answer, error)
            if isinstance(event, Ended):
                self.results[one.number] = event.result
                running.remove(one)
                return
            try:
                kwargs = event.what
                one.under_way = self._sessions.start(one.session, (), kwargs, lengths_in(kwargs))
                return
            except Exception as problem:
                answer, error = None, problem

    def _cancel(self, running: Sequence[_Running]) -> None:
        """End all groups that have not ended; their passes are waited for."""
        for one in running:
            if one.under_way is not None:
                done, one.under_way = one.under_way, None
                try:
                    self._sessions.finish(done)
                except Exception:  # the first one was raised already
                    continue
        for one in running:
            one.script.cancel()


class _Streamer:
    """What the model's `generate` gives new tokens to."""

    def __init__(self, running: _Running) -> None:
        self._running = running
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt at first, then one token for each sequence."""
        if self._has_prompt:
            self._running.tokens.append(Tokens(self._running.group.rows, value.reshape(-1).cpu()))
        self._has_prompt = True

    def end(self) -> None:
        """Nothing more will come."""


def _taken(one: _Running) -> Iterator[Tokens]:
    while one.tokens:
        yield one.tokens.popleft()


# -- what goes in and comes out -----------------------------------------------------------------


def generate(
    model: nn.Module,
    sessions: Sessions,
    threads: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
) -> Any:
    """See `Pipeline.generate`.

    Raises:
        InputError: the model has no `generate`, or the arguments have no rows.
    """
    if not callable(getattr(model, "generate", None)):
        raise InputError(
            f"{type(model).__name__} has no method generate(). pipe.session() runs one pass after "
            "the other and keeps states with the workers: write the loop with it"
        )
    listed = bool(args) and isinstance(args[0], (list, tuple))
    if listed:
        groups = _prompts(args, kwargs)
    else:
        size = 1 if options.rowwise else options.group_size
        groups = groups_of(args, kwargs, size, sessions.width)
    most = options.in_flight or sessions.width + (len(groups) > sessions.width)
    seed = _drawn() if options.seed is None else options.seed
    generation = Generation(model, sessions, most, threads, seed, options.stream)
    if options.stream:
        return generation.run(groups)
    for _ in generation.run(groups):
        pass
    results = [generation.results[k] for k in range(len(groups))]
    return results if listed else merged(results, _padding(model, kwargs))


@dataclass(frozen=True)
class Options:
    """How a batch is generated, see `Pipeline.generate`.

    Attributes:
        group_size: sequences in a group.
        rowwise: whether each sequence is a group.
        in_flight: groups under way at a time.
        stream: whether tokens are wanted as they come.
        seed: of random numbers.
    """

    group_size: int | None = None
    rowwise: bool = False
    in_flight: int | None = None
    stream: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("group_size", "in_flight"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise InputError(f"{name}={value!r} must be a positive integer")
        if self.rowwise and self.group_size not in (None, 1):
            raise InputError(
                f"rowwise=True makes each sequence a group, and group_size={self.group_size} asks "
                "for larger ones"
            )


def _drawn() -> int:
    """A seed from torch's default generator, so that `torch.manual_seed` decides."""
    return int(torch.randint(0, 2**31, ()))


def _padding(model: nn.Module, kwargs: Mapping[str, Any]) -> int:
    """The token that sequences are padded with, as transformers chooses it."""
    given = kwargs.get("generation_config"), getattr(model, "generation_config", None)
    candidates = [kwargs.get("pad_token_id")]
    candidates += [getattr(config, "pad_token_id", None) for config in given]
    candidates += [kwargs.get("eos_token_id")]
    candidates += [getattr(config, "eos_token_id", None) for config in given]
    for token in candidates:
        if token is not None:
            return int(token[0] if isinstance(token, (list, tuple)) else token)
    return 0


def _prompts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Group]:
    """A list of prompts of any lengths, each a group of its own.

    Raises:
        InputError: one is no tensor of tokens, or there is none.
    """
    groups = []
    for k, prompt in enumerate(args[0]):
        if not isinstance(prompt, torch.Tensor) or prompt.ndim not in (1, 2) or not prompt.numel():
            raise InputError(
                f"prompt {k} is a {type(prompt).__name__}, not a tensor of tokens: a list of "
                "prompts has a tensor of shape (length,) or (1, length) for each"
            )
        own = prompt.reshape(1, -1) if prompt.ndim == 1 else prompt
        groups.append(Group(range(k, k + 1), (own, *args[1:]), kwargs))
    if not groups:
        raise InputError("there are no prompts in the list")
    return groups


def groups_of(
    args: Sequence[Any], kwargs: Mapping[str, Any], size: int | None, most: int
) -> list[Group]:
    """A batch as groups of sequences.

    Args:
        args, kwargs: as of the model's `generate`; tensors with one entry for each sequence are
            split, everything else is given to each group.
        size: how many sequences a group has; `None` for `most` groups of about the same size.
        most: see above.

    Raises:
        InputError: no argument has rows.
    """
    tensors = (v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor) and v.ndim)
    first = next(tensors, None)
    if first is None:
        raise InputError("generate needs a tensor with one row for each sequence, such as the ids")
    rows = len(first)
    if rows == 0:
        raise InputError("there are no sequences: the first tensor has no rows")
    count = min(most, rows) if size is None else -(-rows // size)
    groups, start = [], 0
    for k in range(count):
        own = rows // count + (k < rows % count) if size is None else min(size, rows - start)
        part = partial(_part, rows=rows, start=start, size=own)
        own_args, own_kwargs = map_leaves(part, (tuple(args), dict(kwargs)))
        groups.append(Group(range(start, start + own), own_args, own_kwargs))
        start += own
    return groups


def _part(leaf: Any, rows: int, start: int, size: int) -> Any:
    has_rows = isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and len(leaf) == rows
    return leaf[start : start + size] if has_rows else leaf


def merged(results: Sequence[Any], padding: int) -> Any:
    """What the model's `generate` would return for all groups together.

    Sequences of groups that ended earlier are padded on the right.

    Args:
        results: of the groups, in order.
        padding: the token.
    """
    if len(results) == 1:
        return results[0]
    first = results[0]
    if isinstance(first, torch.Tensor):
        return _joined(results, padding)
    if isinstance(first, Mapping) and hasattr(first, "sequences"):
        return _joined_output(results, padding)
    if isinstance(first, (tuple, list)):
        return type(first)(merged(list(each), padding) for each in zip(*results, strict=True))
    return list(results)


def _joined(parts: Sequence[torch.Tensor], padding: int) -> torch.Tensor:
    """Tensors with rows one after another, the last dimension padded to the longest."""
    if parts[0].ndim < 2 or len({part.shape[1:] for part in parts}) == 1:
        return torch.cat(list(parts))
    longest = max(part.shape[-1] for part in parts)
    padded = [
        nn.functional.pad(part, (0, longest - part.shape[-1]), value=padding) for part in parts
    ]
    return torch.cat(padded)


def _joined_output(results: Sequence[Any], padding: int) -> Any:
    """Outputs of transformers' `generate` as one.

    What has an entry for each step is joined if all groups have taken as many; else it is `None`.
    """
    first = results[0]
    values: dict[str, Any] = {}
    for name in first:
        parts = [result[name] for result in results]
        if isinstance(parts[0], torch.Tensor):
            values[name] = _joined(parts, padding)
        elif isinstance(parts[0], tuple) and len({len(part) for part in parts}) == 1:
            try:
                values[name] = tuple(torch.cat(step) for step in zip(*parts, strict=True))
            except (TypeError, RuntimeError):
                values[name] = None
        else:
            values[name] = None
    return type(first)(**values)
