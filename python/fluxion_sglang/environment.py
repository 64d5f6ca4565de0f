"""What the environment says to servers and commands: proxies, and the folder of temporary files."""

from __future__ import annotations

import os
import tempfile
from ipaddress import ip_address
from typing import Final

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
LONGEST_SOCKET: Final = 107
"""Bytes of a unix socket's path, without the zero at its end."""
_TEMPORARY: Final = len("/tmp01234567")
"""Bytes that Python's name of a temporary file adds to the folder's."""


def is_local(host: str | None) -> bool:
    """Whether a URL's host is this machine, whatever machine that is."""
    if host == "localhost":
        return True
    try:
        address = ip_address((host or "").strip("[]"))
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def proxies() -> list[str]:
    """The variables of the environment that name a proxy."""
    names = ("http_proxy", "https_proxy", "all_proxy")
    return [name for lower in names for name in (lower, lower.upper()) if os.environ.get(name)]


def bypass_proxies(*hosts: str) -> list[str]:
    """Have this process, and those that it starts from here on, reach loopback and these hosts without a proxy, which
    does not know this machine's own addresses.

    Returns:
        The hosts that would have been asked for through one.
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
    """None, or why SGLang's processes cannot make the sockets by which they talk; one sentence."""
    folder = tempfile.gettempdir()
    size = len(os.fsencode(folder))
    if size + _TEMPORARY <= LONGEST_SOCKET:
        return None
    return (
        f"TMPDIR is {folder!r}, which has {size} bytes, but SGLang makes unix sockets there, whose paths may have "
        f"{LONGEST_SOCKET} with their names; set TMPDIR to a folder of at most {LONGEST_SOCKET - _TEMPORARY}, such as "
        "/tmp."
    )
