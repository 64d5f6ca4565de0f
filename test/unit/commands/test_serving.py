"""Servers that the commands start and ask, replaced by small programs and sockets."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fluxion_sglang.commands import serving

HEALTHY = """\
import http.server, os, signal, subprocess, sys
child = subprocess.Popen(["sleep", "600"])
open(sys.argv[2], "w").write(f"{os.getpid()} {child.pid}")
if sys.argv[3:] == ["deaf"]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
"""A server with a child; `deaf`: it ignores requests to end."""

USER = """\
import signal, sys, time
# Shells have them ignored in what they run in the background, and nohup.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from fluxion_sglang.commands import serving
port = serving.free_port()
command = [sys.executable, "-c", sys.argv[1], str(port), *sys.argv[2:]]
try:
    with serving.running_server(command, port):
        print("ready", flush=True)
        time.sleep(600)
finally:
    print("ended", flush=True)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGHUP], [signal.SIGINT] * 2])
def test_however_a_command_ends_its_server_ends_with_it(signals: list[signal.Signals], tmp_path: Path) -> None:
    """Two interrupts: the second comes while a deaf server is asked to end."""
    pids = tmp_path / "pids"
    deaf = ["deaf"] if len(signals) > 1 else []
    command = [sys.executable, "-c", USER, HEALTHY, str(pids), *deaf]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as user:
        assert user.stdout is not None
        assert any(line == "ready\n" for line in user.stdout)
        for number in signals:
            user.send_signal(number)
            time.sleep(0.5)
        assert user.stdout.read() == "ended\n"
        user.wait(60)
    deadline = time.monotonic() + 10
    started = [int(pid) for pid in pids.read_text().split()]
    while left := [pid for pid in started if alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_only_what_a_server_did_is_its_failure(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HEALTHY, str(port := serving.free_port()), str(tmp_path / "pids")]
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    with pytest.raises(FileNotFoundError), serving.running_server(command, port):
        (tmp_path / "none" / "file").write_text("")
    with (
        pytest.raises(serving.ServerError, match=r"A request failed: .*501"),
        serving.running_server(command, port) as server,
    ):
        server.generate({}, text="")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == handlers


@contextmanager
def saying(*replies: bytes) -> Iterator[serving.Server]:
    """A server that sends the next of these replies to each connection, and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for reply in replies:
                connection, _ = listening.accept()
                connection.recv(1 << 16)
                connection.sendall(reply)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass
                connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield serving.Server(f"127.0.0.1:{listening.getsockname()[1]}")
        thread.join(10)


@pytest.mark.parametrize(
    ("reply", "status", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", None, "SSH-2.0"),
        (b"", None, "closed connection"),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nLate", 503, "Late"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", None, "4 bytes read"),
    ],
)
def test_replies_that_are_none(reply: bytes, status: int | None, words: str) -> None:
    with saying(reply) as server, pytest.raises(serving.RequestFailed, match=words) as failure:
        server.get("/metrics")
    assert failure.value.status == status


@pytest.mark.parametrize("url", ["http://127.0.0.1:port", "http://[", "ftps://127.0.0.1"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(serving.RequestFailed):
        serving.Server(url).get("/metrics")


def test_a_stream_that_breaks_off() -> None:
    event = b'data: {"index": 0, "output_ids": [5], "meta_info": {}}\n\n'
    reply = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(event), event)
    with saying(reply) as server:
        pieces = server.stream([[1, 2]], {})
        assert next(pieces).tokens == [5]
        with pytest.raises(serving.RequestFailed, match="broke off"):
            next(pieces)


def test_the_counters_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is counted late, and its last step even later."""
    readings = [(1, 5.0), (1, 5.0), (2, 6.0), (2, 7.0), (2, 7.0), (3, 9.0)]
    pages = iter([{"requests": float(count), "fluxion_layers_total": layers} for count, layers in readings])
    server = serving.Server("there")
    monkeypatch.setattr(server, "metrics", lambda: next(pages))
    before = server.metrics()
    assert server.settled(before, "requests") == {"requests": 2.0, "fluxion_layers_total": 7.0}


def test_a_port_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = taken.getsockname()[1]
        free = serving.free_port()
        assert free in serving._PORTS and free < 32768
        monkeypatch.setattr(random.SystemRandom, "sample", lambda self, ports, count: [busy, free])
        assert serving.free_port() == free
        monkeypatch.setattr(random.SystemRandom, "sample", lambda self, ports, count: [busy])
        with pytest.raises(serving.ServerError, match=r"No port from 10000 to 32767 is free"):
            serving.free_port()


def test_what_one_request_added() -> None:
    before = {"h_sum": 2.0, "h_count": 4.0}
    assert serving.added(before, {"h_sum": 2.5, "h_count": 5.0}, "h") == 0.5
    assert serving.added(before, {"h_sum": 4.5, "h_count": 6.0}, "h") is None
    assert serving.added({}, {}, "h") is None


def test_executors_stay_apart_and_everything_else_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    page = """\
# TYPE fluxion_tasks counter
fluxion_tasks_total{executor="cpu"} 30.0
fluxion_tasks_total{executor="torch"} 10.0
# TYPE fluxion_layers counter
fluxion_layers_total{rank="0"} 20.0
fluxion_layers_total{rank="1"} 5.0
"""
    monkeypatch.setattr(serving.Server, "get", lambda self, path, timeout=30: page)
    tasks = {"fluxion_tasks_total/cpu": 30, "fluxion_tasks_total/torch": 10}
    assert serving.Server("").metrics() == {**tasks, "fluxion_layers_total": 25}


@pytest.mark.parametrize(
    ("program", "shown", "hidden"),
    [
        ("echo news; echo 'error: no such policy'; exit 3", ("exit code 3", "error: no such policy"), "news"),
        ("echo last words", ("exit code 0", "last words"), "It said"),
    ],
)
def test_a_server_that_does_not_start_shows_its_refusal_or_its_log(
    program: str, shown: tuple[str, ...], hidden: str
) -> None:
    with pytest.raises(serving.ServerError) as failure, serving.running_server(["/bin/sh", "-c", program], 9):
        pass
    said = str(failure.value)
    assert all(words in said for words in (*shown, "fluxion doctor")) and hidden not in said
