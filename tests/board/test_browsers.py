"""Requests that the page of a stranger may have had somebody's browser send."""

from __future__ import annotations

import pytest

from penstock.board.browsers import is_on_purpose

HERE = "127.0.0.1:8000"


@pytest.mark.parametrize(
    ("headers", "here", "elsewhere"),
    [
        ({"host": HERE}, True, True),
        ({"host": "[::1]:8000"}, True, True),
        ({"host": "192.168.0.7"}, True, True),
        ({"host": "localhost:8000"}, True, True),
        ({"host": "localhost.example"}, False, True),
        ({"host": "penstock:8000"}, False, True),  # such as the name of a container
        ({}, False, True),
        ({"host": HERE, "sec-fetch-site": "none"}, True, True),
        ({"host": HERE, "sec-fetch-site": "cross-site"}, False, False),
        ({"host": HERE, "sec-fetch-site": "same-site"}, False, False),
        ({"host": HERE, "origin": "https://evil.example"}, False, False),
        ({"host": HERE, "origin": "null"}, False, False),
        ({"host": HERE, "origin": f"http://{HERE}"}, True, True),
        # a page and the server behind one proxy
        (
            {"host": HERE, "origin": "https://a.example", "sec-fetch-site": "same-origin"},
            True,
            True,
        ),
        ({"host": "a.example", "origin": "http://a.example"}, False, True),
    ],
    ids=str,
)
def test_what_is_sent_on_purpose(headers: dict[str, str], here: bool, elsewhere: bool) -> None:
    assert is_on_purpose(headers) == here
    assert is_on_purpose(headers, any_name=True) == elsewhere
