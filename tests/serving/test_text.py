"""Tokens as text, piece by piece."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from tokenizers import AddedToken

from penstock.serving.text import Stopping, Text
from tests.serving.models import letters


class Bytes:
    """A tokenizer whose tokens are bytes, of which a character may have several."""

    def decode(self, ids: list[int], **options: Any) -> str:
        return bytes(ids).decode(errors="replace")


def test_numbers_with_spaces_between_them() -> None:
    text = Text(None)
    assert [text.add([3]), text.add([]), text.add([14, 15]), text.end()] == ["3", "", " 14 15", ""]


def test_an_end_is_no_text() -> None:
    text = Text(None, ends=[7])
    assert text.add([3, 7]) + text.end() == "3"
    assert (text.stopped, text.tokens) == (True, 2)


def test_a_character_comes_when_all_its_bytes_have() -> None:
    text = Text(Bytes())
    given = "aé€".encode()
    pieces = [text.add([byte]) for byte in given]
    assert pieces == ["a", "", "é", "", "", "€"]
    assert text.end() == ""


def test_a_character_that_never_is_complete_comes_at_the_end() -> None:
    text = Text(Bytes())
    assert text.add("a€".encode()[:-1]) + text.end() == "a\ufffd"


def test_what_may_become_a_stop_sequence_is_held_back() -> None:
    text = Text(Bytes(), stop=["END", "NO"])
    assert [text.add(b"aE"), text.add(b"N"), text.add(b"x"), text.add(b"N")] == ["a", "", "ENx", ""]
    assert text.end() == "N"
    assert not text.stopped


@pytest.mark.parametrize("size", [1, 2, 3, 20])
def test_the_text_before_the_first_stop_sequence_however_it_comes(size: int) -> None:
    text, given = Text(Bytes(), stop=["cd", "bcde"]), b"aabbccdeff"
    pieces = [text.add(given[k : k + size]) for k in range(0, len(given), size)]
    assert "".join(pieces) + text.end() == "aabbc"
    assert text.stopped


def test_pieces_are_the_whole_of_a_real_tokenizer() -> None:
    tokenizer = letters()
    ids = tokenizer("hello world").input_ids
    text = Text(tokenizer)
    assert "".join(text.add([token]) for token in ids) + text.end() == tokenizer.decode(ids)


@pytest.mark.parametrize("size", [1, 2, 20])
@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("<end>", "ab"),
        ("b<end>", "a"),
        ("<end>c", "ab"),
        ("<end><end>", "abcd"),
        ("<other>", "abc"),
        ("d", "abc"),
        ("cd", "ab"),
    ],
)
def test_special_tokens_stop_it_and_are_no_text(size: int, stop: str, expected: str) -> None:
    tokenizer = letters()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>", "<other>"]})
    end, other = tokenizer.convert_tokens_to_ids(["<end>", "<other>"])
    a, b, c, d = tokenizer("abcd").input_ids
    given = [a, b, end, c, other, d, end, end]
    text, stopping = Text(tokenizer, stop=[stop]), Stopping(tokenizer, [stop], 0)
    pieces = [text.add(given[k : k + size]) for k in range(0, len(given), size)]
    assert "".join(pieces) + text.end() == expected
    assert text.stopped
    assert stopping(torch.tensor([given]), None).tolist() == [True]


def test_a_special_token_that_is_spelled_out_stops_it_too() -> None:
    class Spelled(Bytes):
        added_tokens_decoder: ClassVar = {300: AddedToken("<end>", special=True)}

    text = Text(Spelled(), stop=["<end>"])
    assert text.add(b"a<en") + text.add(b"d>b") + text.end() == "a"
    assert text.stopped
