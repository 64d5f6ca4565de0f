"""Environment settings of servers and commands: proxies, and the folder of temporary files."""

from __future__ import annotations

import os
import tempfile
from ipaddress import ip_address
from typing import Final

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
LONGEST_SOCKET: Final = 107
"""Longest path of a unix socket in bytes, without the terminating zero."""
_TEMPORARY: Final = len("/tmp01234567")
"""Bytes that the name of a Python temporary file adds to the folder's path."""


def is_local(host: str | None) -> bool:
    """Whether a URL's host is loopback or unspecified, that is, the local machine."""
    if host == "localhost":
        return True
    try:
        address = ip_address((host or "").strip("[]"))
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def proxies() -> list[str]:
    """The environment variables that are set and name a proxy."""
    names = ("http_proxy", "https_proxy", "all_proxy")
    return [name for lower in names for name in (lower, lower.upper()) if os.environ.get(name)]


def bypass_proxies(*hosts: str) -> list[str]:
    """Make this process and its future children reach loopback and `hosts` without a proxy. A proxy cannot reach this
    machine's own addresses.

    Returns:
        The hosts that were not exempt before.
    """
    if not proxies():
        return []
    added: list[str] = []
    for name, other in (("no_proxy", "NO_PROXY"), ("NO_PROXY", "no_proxy")):
        known = [host.strip() for host in (os.environ.get(name) or os.environ.get(other, "")).split(",")]
        if "*" in known:
            continue
        missing = [host for host in dict.fromkeys((*LOOPBACK, *hosts)) if host not in known]
        os.environ[name] = ",".join(filter(None, (*known, *missing)))
        added += [host for host in missing if host not in added]
    return added


def socket_problem() -> str | None:
    """One sentence if paths of SGLang's unix sockets would be too long, else None."""
    folder = tempfile.gettempdir()
    size = len(os.fsencode(folder))
    if size + _TEMPORARY <= LONGEST_SOCKET:
        return None
    return (
        f"TMPDIR is {folder!r}, which has {size} bytes, but SGLang makes unix sockets there, whose paths may have "
        f"{LONGEST_SOCKET} with their names; set TMPDIR to a folder of at most {LONGEST_SOCKET - _TEMPORARY}, such as "
        "/tmp."
    )
