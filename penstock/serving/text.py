"""Tokens as text, piece by piece, up to the first stop sequence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_INCOMPLETE = "\ufffd"  # what bytes decode to that begin a character
_MARKS = range(0xD800, 0xE000)  # lone surrogates, which no text has
_WITHOUT_MARKS = dict.fromkeys(_MARKS)


class Text:
    """The text of one sequence, whose tokens come one after another.

    Args:
        tokenizer: as of transformers; `None` for the numbers of tokens, with spaces between them.
        ends: tokens that end a sequence and are no text.
        stop: texts that end it; they and what is after them are left out. They may have special
            tokens, which otherwise are no text.

    Attributes:
        tokens: how many have come.
        stopped: whether an end, or one of `stop`, has come.
    """

    def __init__(self, tokenizer: Any, ends: Iterable[int] = (), stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(ends)
        self._marks, marked = _marks(tokenizer, stop)
        self._stop = [*stop, *marked]
        self._ids: list[int] = []
        self._shown = self._read = 0  # in `_ids`: where decoding begins, and how many were shown
        self._held = ""  # text that may be the beginning of a stop sequence
        self.tokens = 0
        self.stopped = False

    def add(self, tokens: Iterable[int]) -> str:
        """Take more tokens; returns the text that they surely add."""
        pieces = []
        for token in tokens:
            self.tokens += 1
            if self.stopped:
                continue
            if token in self._ends:
                self.stopped = True
                pieces.append(self._rest())
            else:
                self._ids.append(token)
                mark = self._marks.get(token, "")
                pieces.append(self._sure(self._decoded(is_end=False) + mark))
        return "".join(pieces).translate(_WITHOUT_MARKS)

    def end(self) -> str:
        """No token comes any more; returns the text that was held back."""
        return "" if self.stopped else self._rest().translate(_WITHOUT_MARKS)

    def _rest(self) -> str:
        rest = self._until_stop(self._held + self._decoded(is_end=True))
        self._held = ""
        return rest

    def _decoded(self, is_end: bool) -> str:
        """The text of new tokens.

        How a token is written may depend on the one before it, so a few are decoded again. Bytes
        that are not yet a character wait for the next token, unless this is the end.
        """
        if self._tokenizer is None:
            new = self._ids[self._read :]
            gap = " " if self._read and new else ""
            self._read = len(self._ids)
            return gap + " ".join(map(str, new))
        before = self._text(self._ids[self._shown : self._read])
        now = self._text(self._ids[self._shown :])
        if len(now) <= len(before) or (now.endswith(_INCOMPLETE) and not is_end):
            return ""
        self._shown, self._read = self._read, len(self._ids)
        return now[len(before) :]

    def _text(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _sure(self, text: str) -> str:
        """What no later token can make part of a stop sequence."""
        text = self._until_stop(self._held + text)
        if self.stopped:
            self._held = ""
            return text
        longest = max(map(len, self._stop), default=0)
        for size in range(min(longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stop):
                self._held = text[-size:]
                return text[:-size]
        self._held = ""
        return text

    def _until_stop(self, text: str) -> str:
        """The text before the first stop sequence, if there is one."""
        found = [where for stop in self._stop if (where := text.find(stop)) >= 0]
        if not found:
            return text
        self.stopped = True
        return text[: min(found)]


def _marks(tokenizer: Any, stop: Sequence[str]) -> tuple[Mapping[int, str], Sequence[str]]:
    """A character for each special token that stop sequences have, and these with it instead.

    Decoding leaves special tokens out, so they are looked for by such a character.

    Args:
        tokenizer, stop: as of `Text`.
    """
    known = getattr(tokenizer, "added_tokens_decoder", {}) if stop else {}
    special = {
        number: token.content
        for number, token in known.items()
        if token.special and any(token.content in each for each in stop)
    }
    longest_first = sorted(special, key=lambda number: -len(special[number]))
    marks = dict(zip(longest_first, map(chr, _MARKS), strict=False))
    marked = list(stop)
    for number, mark in marks.items():
        marked = [each.replace(special[number], mark) for each in marked]
    return marks, marked if marks else ()


class Stopping:
    """Ends the generation of one sequence once its new text has a stop sequence.

    It is a stopping criterion of transformers. That of its own looks at the prompt as well.

    Args:
        tokenizer, stop: as of `Text`.
        length: tokens of the prompt.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], length: int) -> None:
        self._given = tokenizer, (), stop
        self._length = length
        self._text = Text(*self._given)

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """For each of the rows of tokens, of which there is one, whether it has ended."""
        new = input_ids[0, self._length :].tolist()
        if len(new) < self._text.tokens:  # it has begun again
            self._text = Text(*self._given)
        self._text.add(new[self._text.tokens :])
        return input_ids.new_full((len(input_ids),), self._text.stopped).bool()
