"""What a request asks for: JSON in OpenAI's form, as prompts and arguments of `generate`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.generation.generate import Job
from penstock.generation.groups import Group
from penstock.generation.seeds import seed_of
from penstock.serving.refusal import Refusal, wrong
from penstock.serving.served import Served
from penstock.serving.text import Stopping

_TOKENS = 16  # that are generated if /v1/completions does not say how many, as OpenAI's does
_STOPS = 4  # stop sequences that a request may have, as OpenAI's
_SEEDS = 1 << 63
_STARTS = 1  # tokens that a decoder beside an encoder begins with; the prompt is the encoder's

MOST_PROMPT = 8192
"""Tokens that a prompt may have if nobody says more."""

ONE_BEAM: Mapping[str, Any] = {"num_beams": 1}
"""Tokens are streamed, which beams cannot be, whatever the model's own settings say."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "store": (False,),
    "tools": ([],),
    "response_format": ({"type": "text"},),
}
"""Fields of OpenAI's that are accepted with the values that change nothing."""

_IGNORED = ("user", "metadata")


@dataclass(frozen=True)
class _Range:
    """The numbers that a sampling parameter can be.

    Attributes:
        low, high: the limits.
        is_open: whether the lower one is excluded.
        kind: integers, or any numbers.
    """

    low: float
    high: float
    is_open: bool = False
    kind: type = float

    def check(self, name: str, value: Any) -> Any:
        """The value, as a number of this kind.

        Raises:
            Refusal: it is none, or out of range.
        """
        is_kind = type(value) is int or (self.kind is float and type(value) is float)
        if (
            not is_kind
            or not self.low <= value <= self.high
            or (self.is_open and value == self.low)
        ):
            what = "an integer" if self.kind is int else "a number"
            raise wrong(name, f"{name}={value!r} must be {what} {self._limits}")
        return self.kind(value)

    @property
    def _limits(self) -> str:
        low = f"above {self.low:g}" if self.is_open else f"from {self.low:g}"
        return low if math.isinf(self.high) else f"{low} to {self.high:g}"


_SAMPLING = {
    "temperature": _Range(0, 100),
    "top_p": _Range(0, 1, is_open=True),
    "top_k": _Range(1, math.inf, kind=int),
    "min_p": _Range(0, 1),
    "repetition_penalty": _Range(1e-3, 1e3),
}
"""Arguments of `generate` that a request may have; all but the last one are of sampling."""

_COLDEST = 1e-4  # below, the most likely token is chosen: logits divided by less may be infinite


@dataclass(frozen=True)
class CompletionRequest:
    """Sequences that a request asks for.

    Attributes:
        prompts: their tokens.
        max_tokens: that are generated for each at most.
        stop: texts that end a sequence.
        seed: of random numbers; that of sequence k is `seed_of(seed, k)`. `None` for any.
        stream: whether the text is wanted piece by piece.
        counts: whether a stream ends with the number of tokens.
        arguments: more arguments of the model's `generate`.
    """

    prompts: Sequence[Sequence[int]]
    max_tokens: int
    stop: Sequence[str] = ()
    seed: int | None = None
    stream: bool = False
    counts: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)


class Reader:
    """Reads requests for one model.

    Args:
        served: the model.
        most: the most tokens that a request may ask for, for each sequence.
        most_prompt: the most tokens that a prompt may have.
        check_count: raises if a request has more prompts than there is room for; it is called
            before anything is made of them.

    Attributes:
        ends: tokens that end a sequence.
        has_chat: whether the tokenizer knows how messages are written.
    """

    def __init__(
        self,
        served: Served,
        most: int,
        most_prompt: int = MOST_PROMPT,
        check_count: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._served = served
        self._most, self._most_prompt = most, most_prompt
        self._check_count = check_count
        config: Any = getattr(served.model, "config", None)
        generation = getattr(served.model, "generation_config", None)
        of_text = config.get_text_config() if hasattr(config, "get_text_config") else config
        self._context: int | None = getattr(of_text, "max_position_embeddings", None)
        self._words: int | None = getattr(of_text, "vocab_size", None)
        self._is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
        self.ends = _numbers(generation, "eos_token_id") or _numbers(config, "eos_token_id")
        padding = _numbers(generation, "pad_token_id") or self.ends
        self._padding = padding[0] if padding else None
        self.has_chat = bool(getattr(served.tokenizer, "chat_template", None))

    def completion(self, body: Mapping[str, Any]) -> CompletionRequest:
        """A request to /v1/completions.

        Raises:
            Refusal: it cannot be done.
        """
        fields = _Fields(body)
        given = fields.take("prompt")
        if given is None:
            raise wrong("prompt", "prompt is missing: give a text, or a list of token numbers")
        most = fields.take("max_tokens")
        return self._request(fields, self._prompts(given), _TOKENS if most is None else most)

    def chat(self, body: Mapping[str, Any]) -> CompletionRequest:
        """A request to /v1/chat/completions.

        Raises:
            Refusal: it cannot be done.
        """
        if not self.has_chat:
            raise Refusal(
                404,
                f"{self._served.name} has no chat template, so it does not take messages: give "
                "prompts to /v1/completions, or serve it with a tokenizer that has chat_template",
                code="no_chat_template",
            )
        fields = _Fields(body)
        messages = _messages(fields.take("messages"))
        older, most = fields.take("max_tokens"), fields.take("max_completion_tokens")
        most = older if most is None else most
        try:
            text = self._served.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # the template's own, which is a program
            raise wrong("messages", f"the chat template does not take these: {error}") from error
        prompt = self._tokens("messages", text, special=False)
        if most is None:
            room = self._most if self._context is None else self._context - len(prompt)
            most = max(1, min(self._most, room))
        return self._request(fields, [prompt], most)

    def jobs(self, requested: CompletionRequest, seed: int) -> list[Job]:
        """A job for each sequence.

        Args:
            requested: the sequences.
            seed: of the first one.
        """
        arguments = {**requested.arguments, **ONE_BEAM}
        arguments["max_new_tokens"] = requested.max_tokens
        if self._padding is not None:
            arguments["pad_token_id"] = self._padding
        jobs = []
        for k, prompt in enumerate(requested.prompts):
            ids = torch.tensor([list(prompt)], dtype=torch.long)
            own = {**arguments, "attention_mask": torch.ones_like(ids)}
            if requested.stop:
                before = _STARTS if self._is_encoder_decoder else len(prompt)
                own["stopping_criteria"] = [
                    Stopping(self._served.tokenizer, requested.stop, before)
                ]
            group = Group(range(1), (ids,), own)
            jobs.append(Job(group, seed_of(seed, k), streams=True))
        return jobs

    def _request(
        self, fields: _Fields, prompts: Sequence[Sequence[int]], most: Any
    ) -> CompletionRequest:
        """What the other fields ask for."""
        wanted = _Range(1, self._most, kind=int).check("max_tokens", most)
        self._check_room(prompts, wanted)
        model = fields.take("model")
        if model is not None and model != self._served.name:
            raise Refusal(
                404,
                f"there is no model {model!r}; {self._served.name!r} is served",
                param="model",
                code="model_not_found",
            )
        stop = self._stop(fields.take("stop"))
        seed = fields.take("seed")
        if seed is not None:
            seed = _Range(0, _SEEDS - 1, kind=int).check("seed", seed)
        stream = fields.flag("stream")
        options = fields.take("stream_options") or {}
        if not isinstance(options, dict) or not options.keys() <= {"include_usage"}:
            raise wrong("stream_options", f"stream_options={options!r}: include_usage is known")
        counts = _Fields(options).flag("include_usage")
        arguments = _sampling(fields)
        fields.finish()
        return CompletionRequest(prompts, wanted, stop, seed, stream, counts, arguments)

    def _prompts(self, given: Any) -> list[list[int]]:
        """A text or its tokens, or a list of such.

        Raises:
            Refusal: it is something else.
        """
        is_one = isinstance(given, str) or (isinstance(given, list) and _are_numbers(given))
        prompts = [given] if is_one else given
        if not isinstance(prompts, list) or not prompts:
            raise wrong(
                "prompt",
                f"prompt={_short(given)} must be a text, a list of token numbers, or a list of "
                "texts or of such lists",
            )
        self._check_count(len(prompts))
        return [self._tokens("prompt", prompt) for prompt in prompts]

    def _tokens(self, name: str, prompt: Any, special: bool = True) -> list[int]:
        """The tokens of a prompt.

        Raises:
            Refusal: it has none, or one that the model does not have.
        """
        if isinstance(prompt, str):
            tokenizer = self._served.tokenizer
            if tokenizer is None:
                raise wrong(
                    name,
                    f"{self._served.name} is served without a tokenizer, so a prompt is a list of "
                    f"token numbers, not a text such as {_short(prompt)}",
                )
            tokens = list(tokenizer(prompt, add_special_tokens=special).input_ids)
        elif isinstance(prompt, list) and _are_numbers(prompt):
            tokens = prompt
        else:
            raise wrong(name, f"{name}: {_short(prompt)} is neither a text nor a list of integers")
        if not tokens:
            raise wrong(name, f"{name} is empty: at least one token is needed to go on from")
        if len(tokens) > self._most_prompt:
            raise wrong(
                name,
                f"{name} has {len(tokens)} tokens, and this server takes {self._most_prompt}: "
                "shorten it, or start the server with a larger --max-prompt",
                "context_length_exceeded",
            )
        words = math.inf if self._words is None else self._words
        unknown = [token for token in tokens if not 0 <= token < words]
        if unknown:
            raise wrong(name, f"{name}: {unknown[0]} is no token; they are 0 to {words - 1:g}")
        return tokens

    def _check_room(self, prompts: Sequence[Sequence[int]], most: int) -> None:
        """Raise unless a sequence is no longer than the model allows.

        Raises:
            Refusal: it would be.
        """
        if self._context is None:
            return
        for prompt in prompts:
            length = len(prompt) if self._is_encoder_decoder else len(prompt) + most
            if max(length, most) > self._context:
                raise wrong(
                    "max_tokens",
                    f"the model's context is {self._context} tokens; the prompt has {len(prompt)}, "
                    f"and {most} more were asked for. Shorten the prompt, or lower max_tokens",
                    "context_length_exceeded",
                )

    def _stop(self, given: Any) -> list[str]:
        """The stop sequences.

        Raises:
            Refusal: they are no texts, or there is no tokenizer.
        """
        stop = [given] if isinstance(given, str) else given or []
        are_texts = isinstance(stop, list) and all(isinstance(s, str) and s for s in stop)
        if not are_texts or len(stop) > _STOPS:
            raise wrong("stop", f"stop={_short(given)} must be a text, or up to {_STOPS} of them")
        if stop and self._served.tokenizer is None:
            raise wrong("stop", f"stop needs a tokenizer, and {self._served.name} has none")
        return stop


class _Fields:
    """The fields of a request, each of which is taken once; `None` is as if it was not there."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._left = {name: value for name, value in body.items() if value is not None}
        self._known: list[str] = []

    def take(self, name: str) -> Any:
        """A field, or `None`."""
        self._known.append(name)
        return self._left.pop(name, None)

    def flag(self, name: str) -> bool:
        """A field that is true or false.

        Raises:
            Refusal: it is something else.
        """
        value = self.take(name)
        if value is not None and type(value) is not bool:
            raise wrong(name, f"{name}={value!r} must be true or false")
        return bool(value)

    def finish(self) -> None:
        """Raise if there is a field that nobody has taken.

        Raises:
            Refusal: there is one.
        """
        for name, value in self._left.items():
            if name in _IGNORED or any(value == each for each in _NEUTRAL.get(name, ())):
                continue
            if name in _NEUTRAL:
                only = " or ".join(map(repr, _NEUTRAL[name]))
                raise wrong(name, f"{name}={_short(value)} is not possible here, only {only}")
            known = ", ".join(sorted(self._known))
            raise wrong(name, f"{name!r} is unknown; a request can have {known}")


def _sampling(fields: _Fields) -> dict[str, Any]:
    """Arguments of `generate` for what is said of sampling; what is not said is the model's own."""
    found = {
        name: limits.check(name, value)
        for name, limits in _SAMPLING.items()
        if (value := fields.take(name)) is not None
    }
    penalty = {k: found.pop(k) for k in ("repetition_penalty",) if k in found}
    if found.get("temperature", 1) < _COLDEST:
        return {"do_sample": False, **penalty}
    return {**found, **penalty, **({"do_sample": True} if found else {})}


def _messages(given: Any) -> list[dict[str, Any]]:
    """Messages as chat templates have them.

    Raises:
        Refusal: they are none.
    """
    if not isinstance(given, list) or not given:
        raise wrong("messages", "messages must be a list with one message at least")
    found = []
    for k, message in enumerate(given):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and all(_is_text(part) for part in content):
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str) or not isinstance(message.get("role"), str):
            raise wrong(
                "messages", f"message {k} must have a role, and a content that is text: {message!r}"
            )
        found.append({**message, "content": content})
    return found


def _is_text(part: Any) -> bool:
    is_one = isinstance(part, dict) and part.get("type") == "text"
    return is_one and isinstance(part.get("text"), str)


def _are_numbers(values: list[Any]) -> bool:
    return bool(values) and all(type(value) is int for value in values)


def _short(value: Any) -> str:
    """What an error shows of a value."""
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _numbers(config: Any, name: str) -> list[int]:
    """One or several token numbers of a configuration."""
    found = getattr(config, name, None)
    if found is None:
        return []
    return list(found) if isinstance(found, (list, tuple)) else [int(found)]
