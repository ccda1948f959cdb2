"""`Pipeline.generate`: groups of sequences, each by the model's own `generate`, all at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Generator as Iterated
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from penstock.devices.streams import with_streams
from penstock.errors import ClosedError, InputError, StatesLost
from penstock.generation.groups import (
    BY_ROW,
    Group,
    check_apart,
    groups_of,
    prompts_of,
    with_list_first,
    with_own_assistant,
    with_own_numbers,
)
from penstock.generation.outputs import beams_of_the_batch, merged
from penstock.generation.script import Ended, Script
from penstock.generation.seeds import seed_of
from penstock.generation.stand_in import lengths_in, named, stand_in
from penstock.sessions.session import Session, SessionPass, Sessions
from penstock.sessions.together import Followed

_CALL = "generate"

T = TypeVar("T")


class Tokens(NamedTuple):
    """New tokens of a group of sequences.

    Attributes:
        rows: the numbers of the sequences in the batch. With `num_return_sequences`, each number
            is there so many times, one after another.
        tokens: an int64 tensor with one token for each of these rows; of a sequence that has ended
            before, the padding token.
    """

    rows: Sequence[int]
    tokens: torch.Tensor


class Job:
    """A group that is generated, or waits to be.

    Args:
        group: the sequences.
        seed: of random numbers.
        streams: whether its tokens are wanted as they come.

    Attributes:
        group, seed: as given.
        streamer: the user's, which gets every value once.
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
        streamer = group.kwargs.get("streamer")
        self.streamer = None if streamer is None else _Once(streamer)
        self._tokens: deque[torch.Tensor] = deque()
        self._seen = self._given = 0  # tokens of each sequence, and of these those that were given
        self._is_prompted = False

    def new_tokens(self) -> Iterator[Tokens]:
        """The new tokens that were not taken yet."""
        while self._tokens:
            tokens = self._tokens.popleft()
            each = max(1, len(tokens) // len(self.group.rows))
            rows = self.group.rows
            yield Tokens(rows if each == 1 else [r for r in rows for _ in range(each)], tokens)

    def begin(self) -> None:
        """It begins, perhaps again: tokens that come once more are left out."""
        self._seen, self._is_prompted = 0, False
        if self.streamer is not None:
            self.streamer.begin()

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


class _Once:
    """Hands on to a streamer what comes, and nothing twice if a job begins again.

    Args:
        streamer: the user's.
    """

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._seen = self._given = 0  # values

    def begin(self) -> None:
        """The job begins, perhaps again."""
        self._seen = 0

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, or new tokens; called by `generate`."""
        self._seen += 1
        if self._seen > self._given:
            self._given = self._seen
            self._streamer.put(value)

    def end(self) -> None:
        """Nothing more will come; called by `generate`."""
        self._streamer.end()


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
    under_way: SessionPass | None = None
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
        self._ended: list[Job] = []  # that `step` has not told of yet
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
        touched: list[Job] = []
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
        ended, self._ended = self._ended, []
        return [*touched, *(job for job in ended if job not in touched)]

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
            _check_settings(self._model, job.group.args, job.group.kwargs)
            asked = count()
            parts: dict[str, None] = {}

            def forward(*args: Any, **kwargs: Any) -> Any:
                next(asked)
                return script.ask(named(self._model, args, kwargs))

            kwargs = dict(job.group.kwargs)
            if job.streams:
                kwargs["streamer"] = job
            elif job.streamer is not None:
                kwargs["streamer"] = job.streamer
            model: Any = stand_in(self._model, forward, parts.setdefault)
            result = model.generate(*job.group.args, **kwargs)
            if not next(asked):
                _check_calls_itself(self._model, parts)
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
        if error is not None:  # its traceback may keep states
            self._sessions.abandon(one.session)
        one.job.result, one.job.error, one.job.is_over = result, error, True
        self._ended.append(one.job)

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
        """Begin these again, as their passes or states were lost when a pass failed.

        Args:
            those: the jobs.
            failed: the one whose pass failed. If it is among them, this counts as one more of its
                `_MOST_BEGINNINGS`; for the others it does not count.
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


def _check_calls_itself(model: nn.Module, called: Collection[str]) -> None:
    """Raise if a model's `generate`, which has not called the model, is a loop over parts of it.

    Args:
        model: whose `generate` has returned.
        called: the names of the parts that it has called, and of those that these have called.

    Raises:
        InputError: a part has a `generate`, too, or was called.
    """
    kind = type(model).__name__
    parts = [
        (n, m) for n, m in model.named_modules() if n and callable(getattr(m, "generate", None))
    ]
    if parts:
        name, part = parts[-1]
        raise InputError(
            f"the generate() of {kind} has not called the model, but a part of it, "
            f"so nothing of it ran in the pipeline. Build the pipeline of that part, "
            f"model.{name} ({type(part).__name__})"
        )
    outer = [n for n in called if not any(n.startswith(f"{other}.") for other in called)]
    if outer:
        shown = ", ".join(f"self.{name}" for name in outer[:_SHOWN])
        raise InputError(
            f"the generate() of {kind} has not called the model, but parts of it ({shown}"
            f"{', …' * (len(outer) > _SHOWN)}), so nothing of it ran in the pipeline. Have it call "
            "self(...) for every token, or build the pipeline of a module whose forward is what "
            "the loop does for a token, and write the loop with pipe.session()"
        )


_SHOWN = 3


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
        InputError: the arguments have no rows, or do not fit together.
    """
    if _is_of_transformers(model) and any(
        _setting(model, args, kwargs, name) for name in _COLLECTED
    ):
        _have_hooks(model)
    args, kwargs = with_list_first(args, kwargs)
    listed = bool(args) and isinstance(args[0], (list, tuple))
    whole = vars(getattr(model, "generation_config", None) or _Nothing()).keys() - BY_ROW
    if listed:
        options.check_listed()
        groups = prompts_of(args, kwargs, whole)
    else:
        size = 1 if options.rowwise else options.group_size
        groups = groups_of(args, kwargs, size, sessions.width, whole)
    check_apart(groups)
    beams = int(_setting(model, args, kwargs, "num_beams") or 1)
    _check_streamer(groups, options, beams if _is_of_transformers(model) else 1)
    returned = int(_setting(model, args, kwargs, "num_return_sequences") or 1)
    repeats = returned if beams == 1 else 1  # beams of a sequence have its number
    groups = [with_own_assistant(with_own_numbers(group, repeats)) for group in groups]
    most = options.in_flight or sessions.most
    jobs = [Job(group, seed_of(seed, group.rows[0]), options.stream) for group in groups]
    generator = Generator(model, sessions, most, threads)
    if listed:
        return _generated(generator, jobs, None, 0)
    return _generated(generator, jobs, _padding(model, args, kwargs), beams)


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
    results = [beams_of_the_batch(job.result, job.group.rows[0] * beams) for job in jobs]
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
                for tokens in job.new_tokens():
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

    def check_listed(self) -> None:
        """Raise if this is not possible for prompts in a list.

        Raises:
            InputError: groups of several are asked for.
        """
        if self.group_size not in (None, 1):
            raise InputError(
                f"each prompt in a list is a group, as they have any lengths, and group_size="
                f"{self.group_size} asks for larger ones. Leave it out, or pad the prompts to one "
                "tensor and give attention_mask="
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


_FIXED = frozenset({"static", "offloaded_static", "hybrid", "hybrid_chunked", "sliding_window"})
"""Kinds of caches that have their full length from the beginning."""


def _check_settings(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise if transformers' `generate` would change what groups share, or read their states.

    Raises:
        InputError: it would.
    """
    if not _is_of_transformers(model):
        return
    layers = _setting(model, args, kwargs, "assistant_early_exit")
    if layers is not None:
        raise InputError(
            f"assistant_early_exit={layers} has generate() change the number of layers in the "
            "configuration of the model while it drafts, and all groups share it. Leave it out; "
            "drafts are possible with assistant_model=, another model, and with "
            "prompt_lookup_num_tokens="
        )
    if kwargs.get("cache_implementation") == "paged":
        raise InputError(
            "cache_implementation='paged' has generate() set another attention in the model, and "
            "run batches of its own without calling the model. Leave it out: with a list of "
            "prompts, the next one begins as soon as one has ended"
        )
    cache, mask = (
        _setting(model, args, kwargs, "cache_implementation"),
        kwargs.get("attention_mask"),
    )
    if cache in _FIXED and isinstance(mask, torch.Tensor) and not mask.all():
        raise InputError(
            f"cache_implementation={cache!r} has generate() make masks for padded prompts of what "
            "the cache says, in the script, and its tensors are with the workers. Leave it out; or "
            "give prompts of different lengths as a list, without padding"
        )


def _check_streamer(groups: Sequence[Group], options: Options, beams: int) -> None:
    """Raise if a streamer would not get the tokens of one batch.

    Args:
        groups: of the batch.
        options: how it is generated.
        beams: of every sequence.

    Raises:
        InputError: it would not.
    """
    has_streamer = groups[0].kwargs.get("streamer") is not None
    if beams > 1 and (options.stream or has_streamer):
        what = "streamer=" if has_streamer else "stream=True"
        whose = "" if "num_beams" in groups[0].kwargs else ", as the generation config says,"
        raise InputError(
            f"{what} gives tokens as they come, and with num_beams={beams}{whose} nobody knows "
            "before the end which beam is the result. Give num_beams=1, also to sample, or leave "
            f"{what} out"
        )
    if not has_streamer:
        return
    if options.stream:
        raise InputError("stream=True and streamer= both take the tokens as they come: give one")
    if len(groups) > 1:
        raise InputError(
            f"streamer= would get the tokens of {len(groups)} groups of sequences one among "
            "another. Use stream=True, which says whose tokens they are, or have one group: "
            "group_size= the number of sequences"
        )
