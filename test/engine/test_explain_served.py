"""`fluxion explain` of a server, in the terminal and as a file, against its other counters; and of its audit."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest
from server import Server

from fluxion_sglang import cli
from fluxion_sglang.commands import serving
from fluxion_sglang.commands.needle import needle_prompt
from fluxion_sglang.commands.reads.served import Reading, read_server

LAYERS, GROUPS = 4, 2  # the needle model's
NEW = 64


@pytest.fixture(scope="module")
def server(logs: Path):  # type: ignore[no-untyped-def]
    # Two processes with one group each.
    with Server(
        "--tp", "2", fluxion='{"policy": "fixed:16:0.2", "workers": 1}',
        env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}, log=logs / "explain.log",
    ) as server:  # fmt: skip
        yield server
        server.assert_clean()


def explain(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["explain", *words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def settled(server: Server, processes: int) -> Reading:
    """The counters, once those by layer have caught up with the others."""
    for _ in range(50):
        reading = read_server(serving.Server(server.url))
        if reading.values["fluxion_decode_steps_total"] * LAYERS * processes == reading.values["fluxion_layers_total"]:
            return reading
        time.sleep(0.2)
    raise AssertionError("the counters by layer never caught up")


@pytest.mark.full
def test_before_the_first_request(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--url", server.url, "--once"]) == 2
    assert "has not decoded yet" in capsys.readouterr().err


@pytest.mark.full
def test_totals_agree_with_the_other_counters(
    server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    server.generate_many([(needle_prompt(3000, seed=seed).token_ids(0), NEW) for seed in (1, 2)])
    reading = settled(server, processes=2)
    values = reading.values
    read, middle = values["fluxion_group_read_bytes_total"], values["fluxion_layer_middle_bytes_total"]
    share = read / middle
    groups = reading.labelled["fluxion_group_read_bytes_total"]
    assert groups.keys() == {(str(layer), str(group)) for layer in range(LAYERS) for group in range(GROUPS)}
    assert min(groups.values()) > 0 and len(set(groups.values())) > GROUPS
    # Tokens read and readable in all steps; the sample must show the same share of the middle.
    per_token = 2 * 64 * 4 / 4  # bytes of K and V of a KV head in float32, per query head
    everything = values["fluxion_middle_tokens_total"] * per_token
    tiles = values["fluxion_tile_bytes_total"] + values["fluxion_shared_tile_bytes_total"]
    assert share == pytest.approx(tiles / everything, rel=0.05)
    assert 3 < tiles / read < 6, "a quarter of the steps is in the sample"
    assert values["fluxion_decode_tokens_total"] == 2 * (NEW - 1)

    said = explain(capsys, "--url", server.url, "--once")
    assert f"{2 * (NEW - 1)} tokens" in said
    (of_middle,) = re.findall(r"Heads read ([\d.]+)% of the middle", said)
    assert float(of_middle) == pytest.approx(100 * share, abs=0.51)
    rows = [line.split() for line in said.splitlines()]
    assert sum(len(row) == 2 + GROUPS and row[0].isdigit() and row[-1].endswith("%") for row in rows) == LAYERS
    assert re.search(r"A decode step takes [\d.]+ ms, \d+% of it outside attention", said)

    out = tmp_path / "server.png"
    assert cli.main(["explain", "--url", server.url, "--once", "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_a_server_is_watched_while_it_decodes(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = needle_prompt(3000, seed=3).token_ids(0)
    server.generate(prompt, 4)  # the watched request finds its prefix in the pool
    decoding = threading.Thread(target=server.generate, args=(prompt, 800))
    decoding.start()
    said = explain(capsys, "--url", server.url, "--seconds", "4")
    decoding.join()
    assert "share read" in said and re.search(r"tokens/s .* mean [\d,]+", said)


@pytest.mark.full
def test_an_audit(logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "audit.npy", tmp_path / "audit.svg"
    config = f'{{"policy": "fixed:16:0.2", "audit": "{path}"}}'
    with Server(fluxion=config, log=logs / "explain-audit.log") as server:
        server.generate(needle_prompt(2000, seed=1).token_ids(0), 9)
        reading = settled(server, processes=1)
        assert cli.main(["explain", "--url", server.url, "--seconds", "1"]) == 2
        assert "decoded nothing" in capsys.readouterr().err
        said = explain(capsys, "--url", server.url, "--once")
        assert "No step was timed" in said, "an audited step is not what a step takes"
    said = explain(capsys, "--audit", str(path))
    assert "8 decode steps, 8 tokens" in said and "policy fixed:16:0.2" in said
    values = reading.values
    tiles = values["fluxion_tile_bytes_total"] / (values["fluxion_middle_tokens_total"] * 2 * 64 * 4 / 4)
    (of_middle,) = re.findall(r"Heads read ([\d.]+)% of the middle", said)
    assert float(of_middle) == pytest.approx(100 * tiles, abs=0.51)
    assert cli.main(["explain", "--audit", str(path), "--out", str(out)]) == 0
    assert "Mean error of each query head" in out.read_text()
