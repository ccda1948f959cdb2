"""Tells requests of HTTP that the page of a stranger may have had somebody's browser send."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address

_OWN = ("none", "same-origin")  # `Sec-Fetch-Site` of requests that no other page has made


def is_on_purpose(headers: Mapping[str, str], any_name: bool = False) -> bool:
    """Whether a request does not come from the page of a stranger in somebody's browser.

    For such a page, a browser sends `Sec-Fetch-Site` with a value such as `cross-site`, or, if it
    does not know that header or trust the connection, an `Origin` other than the `Host`. If the
    page's own host name now leads here (DNS rebinding), both are alike, but have that name, and
    not an address or `localhost`.

    Args:
        headers: of the request, by names in lower case.
        any_name: whether this machine may be called by any name: clients elsewhere know one.
    """
    host = headers.get("host", "")
    if not (any_name or _is_of_this_machine(host)):
        return False
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site in _OWN
    origin = headers.get("origin")
    return origin is None or origin.partition("://")[2] == host


def _is_of_this_machine(host: str) -> bool:
    """Whether it is an address or `localhost`, to which no stranger's name can lead."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    try:
        ip_address(name)
    except ValueError:
        return name.lower() == "localhost"
    return True
