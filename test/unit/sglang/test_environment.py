"""Proxies and the folder of temporary files, as servers and commands use them."""

from __future__ import annotations

import os
import tempfile
import urllib.request
from pathlib import Path

import httpx
import pytest
import requests

from fluxion_sglang import environment

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        for spelling in (name, name.upper()):
            monkeypatch.setenv(spelling, "")  # restores the variable after the test
            monkeypatch.delenv(spelling)


def test_without_a_proxy_nothing_changes() -> None:
    assert environment.bypass_proxies("10.0.0.7") == []
    assert "no_proxy" not in os.environ and "NO_PROXY" not in os.environ


@pytest.mark.parametrize("name", ["http_proxy", "HTTPS_PROXY", "ALL_PROXY"])
def test_this_machine_is_reached_without_a_proxy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "http://proxy.invalid:3128")
    monkeypatch.setenv("NO_PROXY", "example.org, ::1")
    assert environment.proxies() == [name]
    assert environment.bypass_proxies("10.0.0.7", "127.0.0.1") == ["127.0.0.1", "localhost", "10.0.0.7"]
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "example.org,::1,127.0.0.1,localhost,10.0.0.7"
    assert environment.bypass_proxies("10.0.0.7") == [], "a second server has nothing to say"
    for host in ("127.0.0.1", "localhost", "[::1]", "10.0.0.7"):
        url = f"http://{host}:30000/health"
        assert requests.utils.should_bypass_proxies(url, None), url
        assert urllib.request.proxy_bypass(host.strip("[]")), url
        with httpx.Client() as client:
            assert client._transport_for_url(httpx.URL(url)) is client._transport, url
    assert not requests.utils.should_bypass_proxies("http://huggingface.co/", None)


def test_who_bypasses_all_proxies_has_said_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.invalid:3128")
    monkeypatch.setenv("no_proxy", "*")
    assert environment.bypass_proxies() == []
    assert os.environ["no_proxy"] == "*"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "localhost", "::1", "[::1]", "0.0.0.0", "::"])
def test_addresses_of_this_machine(host: str) -> None:
    assert environment.is_local(host)


@pytest.mark.parametrize("host", [None, "", "10.0.0.7", "localhost.example.org", "proxy"])
def test_addresses_that_may_be_another_s(host: str | None) -> None:
    assert not environment.is_local(host)


def test_a_folder_whose_sockets_would_have_too_long_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for size, fits in ((95, True), (96, False)):
        folder = tmp_path / ("x" * (size - len(str(tmp_path)) - 1))
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with tempfile.NamedTemporaryFile() as file:
            assert (len(file.name) <= environment.LONGEST_SOCKET) == fits
        problem = environment.socket_problem()
        assert (problem is None) == fits
    assert problem is not None and "which has 96 bytes" in problem and "at most 95, such as /tmp." in problem
