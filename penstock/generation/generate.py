"""`Pipeline.generate`: groups of sequences, each by the model's own `generate`, all at a time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Generator as Iterated
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from penstock.capture.trees import map_leaves, tree_leaves
from penstock.devices.streams import with_streams
from penstock.errors import ClosedError, InputError, StatesLost
from penstock.generation.script import Ended, Script
from penstock.generation.stand_in import lengths_in, named, stand_in
from penstock.sessions.session import Pass, Session, Sessions
from penstock.sessions.together import Followed

_CALL = "generate"

T = TypeVar("T")


class Tokens(NamedTuple):
    """New tokens of a group of sequences.

    Attributes:
        rows: the sequences, by their numbers in the batch.
            One is there as often as it is generated: `num_return_sequences` times.
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


class Job:
    """A group that is generated, or waits to be.

    Args:
        group: the sequences.
        seed: of random numbers.
        streams: whether its tokens are wanted as they come.

    Attributes:
        group, seed: as given.
        result: what the model's `generate` has returned, when it has.
        error: why it has not; `None` if it has not failed.
        is_over: whether it has ended, in either way.
    """

    def __init__(self, group: Group, seed: int, streams: bool = False) -> None:
        self.group = group
        self.seed = seed
        self.streams = streams
        self.result: Any = None
        self.error: Exception | None = None
        self.is_over = False
        self._tokens: deque[torch.Tensor] = deque()
        self._seen = self._given = 0  # tokens of each sequence, and of these those that were given
        self._is_prompted = False

    def taken(self) -> Iterator[Tokens]:
        """The new tokens that were not taken yet."""
        while self._tokens:
            tokens = self._tokens.popleft()
            each = max(1, len(tokens) // len(self.group.rows))
            rows = self.group.rows
            yield Tokens(rows if each == 1 else [r for r in rows for _ in range(each)], tokens)

    def begin(self) -> None:
        """It begins, perhaps again: tokens that come once more are left out."""
        self._seen, self._is_prompted = 0, False

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt at first, then new tokens; called by `generate`.

        It gives one token for each sequence, or, with an assistant, several for its only one.
        """
        if not self._is_prompted:
            self._is_prompted = True
            return
        for tokens in value.cpu().unbind(1) if value.ndim == 2 else (value.reshape(-1).cpu(),):
            self._seen += 1
            if self._seen > self._given:
                self._given = self._seen
                self._tokens.append(tokens)

    def end(self) -> None:
        """Nothing more will come; called by `generate`."""


@dataclass(eq=False)
class _Running:
    """A job that is under way.

    Attributes:
        job: what it is.
        script: runs the model's `generate`.
        session: has its states.
        under_way: the pass that it waits for.
        begun: how often it was begun.
    """

    job: Job
    script: Script
    session: Session
    under_way: Pass | None = None
    begun: int = 1


class Generator:
    """Generates groups of sequences, several at a time, so that all stages are busy.

    `add` gives it jobs, and `step` brings the next of them forward by one pass.

    Args:
        model: whose `generate` is called.
        sessions: of the pipeline.
        most: how many groups are under way at a time.
        threads: intra-op threads of what runs outside of the pipeline.
    """

    def __init__(self, model: nn.Module, sessions: Sessions, most: int, threads: int) -> None:
        self._model = model
        self._sessions = sessions
        self._most = most
        self._threads = threads
        self._waiting: deque[Job] = deque()
        self._running: deque[_Running] = deque()
        self._weights_stay = _is_of_transformers(model)  # other loops may do anything
        self.script_ran()

    def script_ran(self) -> None:
        """The script has done what it likes: weights may be others than in the pass before."""
        self._sessions.script_ran()

    def add(self, job: Job) -> None:
        """Generate this as well, as soon as there is room."""
        self._waiting.append(job)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._waiting and not self._running

    def step(self) -> Sequence[Job]:
        """Begin what there is room for, and wait for the pass that was started first.

        Returns:
            the jobs that may have new tokens, or have ended.

        Raises:
            BaseException: what is no `Exception` that a job raises, such as a `KeyboardInterrupt`.
        """
        touched = []
        while self._waiting and len(self._running) < self._most:
            begun = self._begin(self._waiting.popleft())
            self._running.append(begun)
            self._go_on(begun)
            touched.append(begun.job)
        if self._running:
            first = self._running[0]
            self._running.rotate(-1)
            touched.append(first.job)
            try:
                answer = self._finish(first)
            except Exception as error:
                self._after_failure(first, error)
            else:
                self._go_on(first, answer)
        return touched

    def cancel(self, job: Job) -> None:
        """End a job, whether it has begun or not."""
        if job in self._waiting:
            self._waiting.remove(job)
        for one in [one for one in self._running if one.job is job]:
            self._running.remove(one)
            if not self._give_up(one):
                self._begin_again(self._under_way())
        job.is_over = True

    def close(self) -> None:
        """End all jobs, and have the workers let go of their states."""
        running, self._running = list(self._running), deque()
        for one in running:
            self._give_up(one)
        for job in [*self._waiting, *(one.job for one in running)]:
            job.is_over = True
        self._waiting.clear()
        with suppress(ClosedError):  # workers that are gone have let go of everything
            self._sessions.drop()

    def _begin(self, job: Job, begun: int = 1) -> _Running:
        """A job from its beginning."""

        def generate(script: Script) -> Any:
            asked = count()

            def forward(*args: Any, **kwargs: Any) -> Any:
                next(asked)
                return script.ask(named(self._model, args, kwargs))

            kwargs = dict(job.group.kwargs)
            if job.streams:
                kwargs["streamer"] = job
            model: Any = stand_in(self._model, forward)
            result = model.generate(*job.group.args, **kwargs)
            if not next(asked):
                _check_calls_itself(self._model)
            return result

        job.begin()
        devices = with_streams(self._sessions.devices)
        script = Script(generate, job.seed, self._threads, devices)
        return _Running(job, script, self._sessions.open(), begun=begun)

    def _finish(self, one: _Running) -> Any:
        """What the model's call returns that a job waits for."""
        done, one.under_way = one.under_way, None
        return None if done is None else self._sessions.finish(done)

    def _go_on(self, one: _Running, answer: Any = None) -> None:
        """Let a job go on until its next pass has begun, or it has ended."""
        error: Exception | None = None
        while True:
            try:
                event = one.script.resume(answer, error)
                answer = error = None  # whose traceback would keep what is in this frame
            except Exception as problem:
                self._over(one, error=problem)
                return
            if isinstance(event, Ended):
                self._over(one, event.result)
                return
            try:
                one.under_way = self._sessions.start(
                    *(one.session, (), event.what, lengths_in), self._weights_stay
                )
                return
            except StatesLost as problem:
                if one.begun < _MOST_BEGINNINGS:
                    self._begin_again([one], one)
                    return
                answer, error = None, problem
            except Exception as problem:
                answer, error = None, problem

    def _over(self, one: _Running, result: Any = None, error: Exception | None = None) -> None:
        self._running.remove(one)
        one.job.result, one.job.error, one.job.is_over = result, error, True

    def _after_failure(self, first: _Running, error: Exception) -> None:
        """A pass has failed, and with it all that were started.

        If states are gone with a worker that was replaced, everything begins again: the same tokens
        come. Otherwise the job fails, and those whose passes were given up begin again.
        """
        again = [one for one in self._under_way() if one is not first]
        if isinstance(error, StatesLost) and first.begun < _MOST_BEGINNINGS:
            again.append(first)
        else:
            first.script.cancel()
            self._over(first, error=error)
        self._begin_again(again, first)

    def _under_way(self) -> list[_Running]:
        """Those that wait for a pass."""
        return [one for one in self._running if one.under_way is not None]

    def _begin_again(self, those: Sequence[_Running], failed: _Running | None = None) -> None:
        """Begin these again, whose passes or states were lost with one that has failed.

        That one alone is a time nearer to the end of its chances, if it is among them.
        """
        for one in those:
            self._running.remove(one)
            self._give_up(one)
        for one in those:
            fresh = self._begin(one.job, one.begun + (one is failed))
            self._running.append(fresh)
            self._go_on(fresh)

    def _give_up(self, one: _Running) -> bool:
        """End what is under way of a job; whether its pass has ended well, which is waited for."""
        try:
            self._finish(one)
        except Exception:  # nobody waits for it any more
            return False
        finally:
            one.script.cancel()
        return True


_MOST_BEGINNINGS = 5


def _check_calls_itself(model: nn.Module) -> None:
    """Raise if a model's `generate`, which has not called the model, may be that of a part of it.

    Raises:
        InputError: a part has a `generate`, too.
    """
    parts = [
        (n, m) for n, m in model.named_modules() if n and callable(getattr(m, "generate", None))
    ]
    if parts:
        name, part = parts[-1]
        raise InputError(
            f"the generate() of {type(model).__name__} has not called the model, but a part of it, "
            f"so nothing of it ran in the pipeline. Build the pipeline of that part, "
            f"model.{name} ({type(part).__name__})"
        )


def _is_of_transformers(model: nn.Module) -> bool:
    """Whether its `generate` is that of transformers."""
    where = getattr(getattr(type(model), "generate", None), "__module__", None) or ""
    return str(where).partition(".")[0] == "transformers"


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
    seed = _drawn() if options.seed is None else options.seed
    together = sessions.together
    if _runs_parts(model):
        sessions.refresh()
    if together.follows:
        tokens = together.followed(_CALL, Followed())
    else:
        with together.preparing(_CALL):
            tokens = _tokens(model, sessions, threads, args, kwargs, options, seed)
        tokens = together.led(_CALL, tokens)
    return tokens if options.stream else _returned(tokens)


def _tokens(
    model: nn.Module,
    sessions: Sessions,
    threads: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    seed: int,
) -> Iterated[Tokens, None, Any]:
    """What yields the tokens of a batch, and returns the whole.

    Raises:
        InputError: the arguments have no rows.
    """
    if _is_of_transformers(model) and any(
        _setting(model, args, kwargs, name) for name in _COLLECTED
    ):
        _have_hooks(model)
    args, kwargs = _with_list_first(args, kwargs)
    listed = bool(args) and isinstance(args[0], (list, tuple))
    if listed:
        groups = _prompts(args, kwargs)
    else:
        size = 1 if options.rowwise else options.group_size
        settings = vars(getattr(model, "generation_config", None) or _Nothing())
        groups = groups_of(args, kwargs, size, sessions.width, settings.keys() - _BY_ROW)
    _check_apart(groups)
    _check_streamer(groups, options)
    groups = [_with_own_numbers(group) for group in groups]
    most = options.in_flight or sessions.most
    jobs = [Job(group, seed + group.rows[0], options.stream) for group in groups]
    generator = Generator(model, sessions, most, threads)
    if listed:
        return _generated(generator, jobs, None, 0)
    beams = _setting(model, args, kwargs, "num_beams") or 1
    return _generated(generator, jobs, _padding(model, args, kwargs), int(beams))


def _generated(
    generator: Generator, jobs: Sequence[Job], padding: int | None, beams: int
) -> Iterated[Tokens, None, Any]:
    """Generate these; yields tokens as `run` does.

    Args:
        generator: does it.
        jobs: the groups.
        padding: the token that groups are padded with; `None` if they stay apart.
        beams: of every sequence; 0 if they stay apart.

    Returns:
        what they have returned, together or in a list; nothing if their tokens were wanted.
    """
    yield from run(generator, jobs)
    results = [_beams_of_the_batch(job.result, job.group.rows[0] * beams) for job in jobs]
    if any(job.streams for job in jobs):
        return None
    return results if padding is None else merged(results, padding)


def _returned(tokens: Iterated[Tokens, None, T]) -> T:
    """What a generator function returns."""
    while True:
        try:
            next(tokens)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def run(generator: Generator, jobs: Sequence[Job]) -> Iterator[Tokens]:
    """Generate these, and yield their tokens as they come, if they are wanted.

    Raises:
        Exception: what the first job raises that fails; the others are ended.
    """
    for job in jobs:
        generator.add(job)
    try:
        while not generator.is_idle:
            for job in generator.step():
                if job.error is not None:
                    raise job.error
                for tokens in job.taken():
                    yield tokens
                    generator.script_ran()
    finally:
        generator.close()


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
        if self.seed is not None and type(self.seed) is not int:
            raise InputError(f"seed={self.seed!r} must be an integer, or None to draw one")
        if self.rowwise and self.group_size not in (None, 1):
            raise InputError(
                f"rowwise=True makes each sequence a group, and group_size={self.group_size} asks "
                "for larger ones"
            )


def _runs_parts(model: nn.Module) -> bool:
    """Whether a model's `generate` may run parts of it without calling it as a whole."""
    has_encoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return bool(has_encoder) or not _is_of_transformers(model)


def _drawn() -> int:
    """A seed from torch's default generator, so that `torch.manual_seed` decides."""
    return int(torch.randint(0, 2**31, ()))


class _Nothing:
    """Has no settings of generation."""


def _setting(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """A setting of generation as transformers finds it; `None` if nobody has set it.

    Args:
        model: whose own settings are the last that count.
        args, kwargs: as of the model's `generate`; a `GenerationConfig` may be among them.
        name: of the setting.
    """
    given = [kwargs.get("generation_config"), *args[1:2]]
    configs = [*given, getattr(model, "generation_config", None)]
    candidates = [kwargs.get(name), *(getattr(config, name, None) for config in configs)]
    return next((found for found in candidates if found is not None), None)


def _padding(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The token that sequences are padded with, as transformers chooses it."""
    for name in ("pad_token_id", "eos_token_id"):
        token = _setting(model, args, kwargs, name)
        if isinstance(token, torch.Tensor):
            token = token.reshape(-1).tolist()
        if token is not None:
            return int(token[0] if isinstance(token, (list, tuple)) else token)
    return 0


_COLLECTED = ("output_hidden_states", "output_attentions", "output_router_logits")


_HOOKED = "_output_capturing_hooks_installed"  # as transformers notes it


def _have_hooks(model: nn.Module) -> None:
    """Let a model of transformers have the hooks that collect hidden states and the like.

    Its forward would install them when it is first asked, and stay changed, which no recording may.
    A part of it may have them already: it must not have them twice.
    """
    with suppress(ImportError):  # before transformers 5 there were none
        from transformers import PreTrainedModel
        from transformers.utils.output_capturing import maybe_install_capturing_hooks

        if not any(hasattr(module, _HOOKED) for module in model.modules()):
            if isinstance(model, PreTrainedModel):
                maybe_install_capturing_hooks(model)
                return
        elif getattr(model, _HOOKED, False):
            return
        for child in model.children():
            _have_hooks(child)


def _with_list_first(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments, of which a list of prompts that was given by its name is the first."""
    for name in ("input_ids", "inputs"):
        if not args and isinstance(kwargs.get(name), (list, tuple)):
            return (kwargs[name],), {k: v for k, v in kwargs.items() if k != name}
    return tuple(args), kwargs


def _prompts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Group]:
    """A list of prompts of any lengths, each a group of its own.

    Raises:
        InputError: one is no tensor of tokens, or there is none.
    """
    if kwargs.get("attention_mask") is not None:
        raise InputError(
            "prompts in a list have no padding, so leave attention_mask out; padded prompts are "
            "one tensor"
        )
    groups = []
    for k, prompt in enumerate(args[0]):
        is_tensor = isinstance(prompt, torch.Tensor)
        what = f"a tensor of shape {tuple(prompt.shape)}" if is_tensor else type(prompt).__name__
        is_one = is_tensor and (prompt.ndim == 1 or (prompt.ndim == 2 and len(prompt) == 1))
        if not is_one or not prompt.numel():
            raise InputError(
                f"prompt {k} is {what}: a list of prompts has for each a tensor of its tokens, "
                "one at least, of shape (length,) or (1, length)"
            )
        own = prompt.reshape(1, -1) if prompt.ndim == 1 else prompt
        groups.append(Group(range(k, k + 1), (own, *args[1:]), kwargs))
    if not groups:
        raise InputError("there are no prompts in the list")
    return groups


_OF_ALL = ("past_key_values", "cache_params", "state")  # what all calls of a model write into


def _check_apart(groups: Sequence[Group]) -> None:
    """Raise if several groups would write into one cache.

    Raises:
        InputError: they would.
    """
    for name in _OF_ALL if len(groups) > 1 else ():
        value = groups[0].kwargs.get(name)
        if value is not None and value is groups[1].kwargs[name]:
            raise InputError(
                f"{name}= is one {type(value).__name__}, and there are {len(groups)} groups of "
                "sequences, each of which would write into it. Leave it out, or have one group: "
                "group_size= the number of sequences"
            )


def _check_streamer(groups: Sequence[Group], options: Options) -> None:
    """Raise if a streamer would not get the tokens of one batch.

    Raises:
        InputError: it would not.
    """
    if groups[0].kwargs.get("streamer") is None:
        return
    if options.stream:
        raise InputError("stream=True and streamer= both take the tokens as they come: give one")
    if len(groups) > 1:
        raise InputError(
            f"streamer= would get the tokens of {len(groups)} groups of sequences one among "
            "another. Use stream=True, which says whose tokens they are, or have one group: "
            "group_size= the number of sequences"
        )


_BY_ROW = {"decoder_start_token_id"}
"""Settings that may be a tensor with an entry for each sequence."""


def _with_own_numbers(group: Group) -> Group:
    """A group whose functions are told the numbers that its sequences have in the batch."""
    allowed = group.kwargs.get("prefix_allowed_tokens_fn")
    if allowed is None or not group.rows[0]:
        return group

    def shifted(row: int, tokens: torch.Tensor) -> Any:
        return allowed(group.rows[0] + row, tokens)

    return replace(group, kwargs={**group.kwargs, "prefix_allowed_tokens_fn": shifted})


def groups_of(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    size: int | None,
    most: int,
    whole: Collection[str] = (),
) -> list[Group]:
    """A batch as groups of sequences.

    Args:
        args, kwargs: as of the model's `generate`; tensors with one entry for each sequence are
            split, everything else is given to each group.
        size: how many sequences a group has; `None` for `most` groups of about the same size.
        most: see above.
        whole: the names of settings, which are never split.

    Raises:
        InputError: no argument has rows, or of one it is not known which are whose.
    """
    own_kwargs = {name: v for name, v in kwargs.items() if name not in whole}
    tensors = [v for v in (*args, *own_kwargs.values()) if isinstance(v, torch.Tensor) and v.ndim]
    tensors += [v for v in tree_leaves(own_kwargs) if isinstance(v, torch.Tensor) and v.ndim]
    first = next(iter(tensors), None)
    if first is None:
        raise InputError("generate needs a tensor with one row for each sequence, such as the ids")
    rows = len(first)
    if rows == 0:
        raise InputError("there are no sequences: the first tensor has no rows")
    count = min(most, rows) if size is None else -(-rows // size)
    _check_media(kwargs, rows, count)
    settings = {name: v for name, v in kwargs.items() if name in whole}
    groups, start = [], 0
    for k in range(count):
        own = rows // count + (k < rows % count) if size is None else min(size, rows - start)
        part = partial(_part, rows=rows, start=start, size=own)
        of_args, of_kwargs = map_leaves(part, (tuple(args), own_kwargs))
        groups.append(Group(range(start, start + own), of_args, {**of_kwargs, **settings}))
        start += own
    return groups


_MEDIA = ("pixel_values", "image_", "video_", "audio_", "input_features", "input_values")


def _check_media(kwargs: Mapping[str, Any], rows: int, groups: int) -> None:
    """Raise if images or the like, of all sequences, would go to several groups.

    Raises:
        InputError: they would.
    """
    for name, value in kwargs.items() if groups > 1 else ():
        is_of_all = isinstance(value, torch.Tensor) and value.ndim and len(value) != rows
        if is_of_all and name.startswith(_MEDIA):
            raise InputError(
                f"{name}= has {len(value)} entries, and there are {rows} sequences, so it is not "
                f"known which are whose. Have one group: group_size={rows}"
            )


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

    What has an entry for each step has one for each step of the longest group; in those that come
    after a group has ended its numbers are NaN. What cannot be joined, such as caches that are with
    the workers, is `None`.
    """
    values: dict[str, Any] = {}
    for name in results[0]:
        parts = [result[name] for result in results]
        pads = {"sequences": padding, "beam_indices": _NO_BEAM}
        if isinstance(parts[0], torch.Tensor) and name in pads:
            values[name] = _joined(parts, pads[name])
        else:
            values[name] = _along_rows(_in_all_steps(parts) if name in _BY_STEP else parts)
    return type(results[0])(**values)


_OF_STEPS = ("attentions", "hidden_states")
_BY_STEP = {
    *("scores", "logits", "cross_attentions", *_OF_STEPS),
    *(f"decoder_{name}" for name in _OF_STEPS),
}
"""Fields of transformers' outputs that have an entry for each step."""

_NO_BEAM = -1  # as transformers marks where a sequence has ended


def _beams_of_the_batch(result: Any, first: int) -> Any:
    """An output of transformers' `generate` whose beams have the numbers that they have in a batch.

    Args:
        result: of a group.
        first: the number in the batch that its first beam has.
    """
    beams = result.get("beam_indices") if isinstance(result, Mapping) else None
    if not isinstance(beams, torch.Tensor) or not first:
        return result
    values = {**result, "beam_indices": torch.where(beams < 0, beams, beams + first)}
    return type(result)(**values)


def _in_all_steps(parts: Sequence[Any]) -> Sequence[Any]:
    """The steps of several groups, of which none has fewer than another."""
    if not all(isinstance(part, tuple) for part in parts):
        return parts
    longest = max(parts, key=len)
    return [
        (*part, *(_after_end(each, part[0]) for each in longest[len(part) :])) for part in parts
    ]


def _after_end(step: Any, own: Any) -> Any:
    """What stands for a step that a group does not take: NaN, or 0 where there is none.

    Args:
        step: that of another group.
        own: a step of this one, which has its rows.
    """
    if isinstance(step, tuple):
        return tuple(map(_after_end, step, own))
    return step.new_full((len(own), *step.shape[1:]), math.nan if step.is_floating_point() else 0)


def _along_rows(parts: Sequence[Any]) -> Any:
    """Tensors with rows one after another, in tuples likewise; `None` if they do not fit."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        fits = len({part.shape[1:] for part in parts}) == 1
        return torch.cat(list(parts)) if fits else None
    if isinstance(first, tuple) and len({len(part) for part in parts}) == 1:
        return tuple(map(_along_rows, zip(*parts, strict=True)))
    return None
