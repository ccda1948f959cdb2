"""What clients of OpenAI's interface get: completions and chat completions, whole or in pieces."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Literal

Reason = Literal["stop", "length"]
"""Why a sequence has ended: at its own end or a stop sequence, or as it may not be longer."""


class Answer:
    """The form of what a request gets.

    Args:
        name: of the model.
        is_chat: whether the request was for a chat completion.
    """

    def __init__(self, name: str, is_chat: bool) -> None:
        self._is_chat = is_chat
        self._common = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": name,
        }

    def whole(
        self, texts: Sequence[str], reasons: Sequence[Reason], prompt: int, completion: int
    ) -> dict[str, Any]:
        """All of it.

        Args:
            texts: of the sequences.
            reasons: why each has ended.
            prompt, completion: numbers of tokens, of all sequences.
        """
        choices = []
        for k, (text, reason) in enumerate(zip(texts, reasons, strict=True)):
            content: dict[str, Any] = {"text": text}
            if self._is_chat:
                content = {"message": {"role": "assistant", "content": text, "refusal": None}}
            choices.append({"index": k, **content, "logprobs": None, "finish_reason": reason})
        kind = "chat.completion" if self._is_chat else "text_completion"
        usage = usage_of(prompt, completion)
        return {**self._common, "object": kind, "choices": choices, "usage": usage}

    def first(self, number: int) -> list[dict[str, Any]]:
        """What a stream begins a sequence with."""
        if not self._is_chat:
            return []
        return [self._chunk(number, {"delta": {"role": "assistant", "content": ""}}, None)]

    def piece(self, number: int, text: str, reason: Reason | None = None) -> dict[str, Any]:
        """More text of a sequence, or its end.

        Args:
            number: of the sequence.
            text: that has come.
            reason: why it has ended, if it has.
        """
        content: dict[str, Any] = {"text": text}
        if self._is_chat:
            content = {"delta": {"content": text} if text else {}}
        return self._chunk(number, content, reason)

    def usage(self, prompt: int, completion: int) -> dict[str, Any]:
        """The last piece of a stream, if it is asked for: how many tokens there were."""
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        usage = usage_of(prompt, completion)
        return {**self._common, "object": kind, "choices": [], "usage": usage}

    def _chunk(self, number: int, content: dict[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {"index": number, **content, "logprobs": None, "finish_reason": reason}
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return {**self._common, "object": kind, "choices": [choice]}


def usage_of(prompt: int, completion: int) -> dict[str, int]:
    """Numbers of tokens."""
    total = prompt + completion
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}
