"""Servers that start at once do not count the same memory twice."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fluxion_sglang.config import FluxionConfig
from fluxion_sglang.sglang.memory import capacity, pools, sizing
from fluxion_sglang.sglang.memory.sizing import Turn

# A server: it measures free memory, takes half of it, and holds it later.
SERVER = """
import sys, time
from pathlib import Path
from fluxion_sglang.sglang.memory.sizing import Turn
free, path = Path(sys.argv[1]), Path(sys.argv[2])
turn = Turn(path)
print("ready", flush=True)
sys.stdin.readline()
turn.wait()
before = int(free.read_text())
taken = before // 2
time.sleep(0.5)
free.write_text(str(before - taken))
turn.end()
print(taken)
"""


def start(*arguments: object, code: str = SERVER) -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None and server.stdout.readline() == "ready\n"
    return server


def test_the_second_server_sees_what_the_first_has_taken(tmp_path: Path) -> None:
    free = tmp_path / "free"
    free.write_text("1000")
    servers = [start(free, tmp_path / "turn") for _ in range(2)]
    for server in servers:
        assert server.stdin is not None
        server.stdin.write("go\n")
        server.stdin.flush()
    taken = sorted(int(server.communicate(timeout=60)[0]) for server in servers)
    assert taken == [250, 500] and free.read_text() == "250"


def test_a_server_that_dies_gives_its_turn_away(tmp_path: Path) -> None:
    code = "import sys, time; from pathlib import Path; from fluxion_sglang.sglang.memory.sizing import Turn\n"
    code += "turn = Turn(Path(sys.argv[1])); turn.wait(); print('ready', flush=True); time.sleep(600)"
    server = start(tmp_path / "turn", code=code)
    impatient = Turn(tmp_path / "turn", patience_s=0.1)
    impatient.wait()
    assert not impatient.held
    server.kill()
    server.wait()
    turn = Turn(tmp_path / "turn", patience_s=30)
    turn.wait()
    assert turn.held


def test_patience_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = Turn(tmp_path / "turn"), Turn(tmp_path / "turn", patience_s=0.2)
    first.wait()
    start = time.monotonic()
    second.wait()
    assert first.held and not second.held and time.monotonic() - start < 20
    assert "measures without waiting longer" in caplog.text
    first.end()
    second.wait()
    assert second.held


def test_a_file_that_cannot_be_used_keeps_nobody_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path / "no folder" / "turn", tmp_path / "link"):
        turn = Turn(path)
        turn.wait()
        turn.end()
        assert not turn.held and "do not wait for one another" in caplog.text
        caplog.clear()
    assert not (tmp_path / "elsewhere").exists()


def test_another_users_file_is_locked_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "turn"
    path.touch()
    path.chmod(0o444)
    turn = Turn(path)
    turn.wait()
    assert turn.held


@dataclass(slots=True)
class Configurator:
    """SGLang's class, which does not accept further attributes."""

    is_draft_worker: bool = False
    server_args: Any = field(default_factory=lambda: SimpleNamespace(disaggregation_mode="null"))
    device: str = "cuda"
    layer_info: Any = field(default_factory=lambda: SimpleNamespace(start_layer=0))
    model_config: Any = field(
        default_factory=lambda: SimpleNamespace(
            context_len=4096, hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"])
        )
    )


@pytest.mark.parametrize(("rank", "waits"), [(0, True), (1, False)])
def test_the_turn_lasts_from_the_measurement_to_the_pool(
    rank: int, waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank of a host waits for all."""
    monkeypatch.setattr(sizing, "turn_file", lambda: tmp_path / "turn")
    monkeypatch.setattr(capacity, "rank_on_host", lambda args: rank)
    monkeypatch.setattr(capacity, "ranks_on_host", lambda args: 2)
    held: list[bool] = []
    configurator = Configurator()
    monkeypatch.setattr(pools, "least_over_ranks", lambda value: value)
    monkeypatch.setattr(pools, "_shape", lambda *_: SimpleNamespace(pool_bytes=lambda n: n, window_bytes=lambda p: 1))
    monkeypatch.setattr(pools, "rank_options", lambda _: FluxionConfig())
    monkeypatch.setattr(pools, "maker_of", lambda _: None)

    def note(*args: Any, **kwargs: Any) -> int:
        other = Turn(tmp_path / "turn", patience_s=0)
        other.wait()
        held.append(not other.held)
        return 4096

    monkeypatch.setattr(capacity, "available_bytes", note)
    monkeypatch.setattr(capacity, "plan_tokens", note)
    monkeypatch.setattr(pools, "FluxionKVPool", note)
    resolved = SimpleNamespace(max_total_num_tokens=100_000, max_running_requests=4)
    pools.resolve_memory_pool_config(lambda *_: resolved, configurator, 0)
    table = SimpleNamespace(req_to_token=SimpleNamespace(shape=(5,)))
    pools.build_token_to_kv_pool(lambda *_: None, configurator, sizes=resolved, req_to_token_pool=table)
    assert held == [waits] * 3
    note()
    assert held[-1] is False, "the next one's turn"


def test_one_file_for_a_machine() -> None:
    assert sizing.turn_file().parent == Path(os.environ.get("TMPDIR", "/tmp"))
