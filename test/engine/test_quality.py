"""The quality harness on a real engine: one server, two tasks of RULER at 1K, every kind of policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
from places import ROOT

from fluxion_quality import session
from fluxion_sglang import cli

pytestmark = pytest.mark.full

SCRIPT = """
import dataclasses, json, sys
from pathlib import Path
from fluxion_quality import plan, run
from fluxion_sglang.scoring import serve
from fluxion_sglang.scoring.kl import tokens_compared

POLICIES = ("full", "streaming", "oracle", "fixed:16:0.05")
FORCED = 12
serve.FORCED_AUDITED = 1  # answers of these tasks have a few steps

def main():
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    settings = plan.Settings(
        "ruler", model, POLICIES, out, (1024,), ("niah_single_2", "niah_multikey_1"), samples=2, dtype="float32",
        device="cpu",
    )
    made = plan.make(settings)
    needs = dataclasses.replace(made.needs, forced=True)
    server = serve.starter(model, tokens_compared(made.model.vocabulary), "float32", "cpu")("full", needs)
    close, server.close = server.close, lambda: None
    try:
        run.run(made, lambda policy, needs: server)

        prompt = made.samples(made.cells[0])[0].prompt
        request = serve.Request(prompt[:-FORCED], "full", FORCED, prompt[-FORCED:])
        (forced,) = server.generate([request])
        (sparse,) = server.generate([dataclasses.replace(request, policy="streaming")])
        assert forced.tokens == sparse.tokens == list(prompt[-FORCED:])
        read = server._engine.generate(
            input_ids=list(prompt), sampling_params={"temperature": 0, "max_new_tokens": 1},
            return_logprob=True, logprob_start_len=len(prompt) - FORCED - 1,
        )
        prefill = [entry[0] for entry in read["meta_info"]["input_token_logprobs"][-FORCED:]]

        try:
            server.generate([serve.Request(prompt, "guess", 2)])
            refused = ""
        except serve.RequestFailed as error:
            refused = str(error)
    finally:
        close()
    print("RESULT", json.dumps(dict(forced=forced.logprobs, sparse=sparse.logprobs, prefill=prefill, refused=refused)))

if __name__ == "__main__":
    main()
"""

MODEL = ROOT / "models" / "needle"
TASKS = ("niah_single_2", "niah_multikey_1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quality")


@pytest.fixture(scope="module")
def served(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The result file, and the output of the program."""
    script = folder / "program.py"
    script.write_text(SCRIPT)
    done = forked.run(str(script), str(MODEL), str(folder / "out.json"))
    assert "RESULT " in done.stdout, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads((folder / "out.json").read_text()), json.loads(done.stdout.split("RESULT ")[1].splitlines()[0])


def test_every_policy_is_measured_against_full(served: tuple[dict[str, Any], dict[str, Any]]) -> None:
    rows = {(row["task"], row["policy"]): row for row in served[0]["rows"]}
    assert len(rows) == 8
    for task in TASKS:
        full, streaming, oracle, fixed = (
            rows[task, policy] for policy in ("full", "streaming", "oracle:0.05", "fixed:16:0.05")
        )
        assert full["error_p99"] < 1e-5
        assert (full["kl"], full["delta"], full["same"]) == (0.0, 0.0, 1.0)
        assert full["read_fraction"] == pytest.approx(1, abs=1e-9)
        assert streaming["read_fraction"] == streaming["bytes_per_token"] == 0
        assert 0 < oracle["read_fraction"] < fixed["read_fraction"] < 1
        assert 0 < oracle["error_mean"] < streaming["error_mean"]
        assert 0 < fixed["error_mean"] < streaming["error_mean"]
        assert streaming["kl"] > 0 and streaming["kl_steps"] > 0


def test_forced_decoding_gives_the_logprobs_of_a_prefill(served: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Log probabilities of a prompt's last tokens: by decode steps under full attention, and by SGLang's prefill;
    float32."""
    found = served[1]
    assert len(found["forced"]) == 12
    assert np.allclose(found["forced"], found["prefill"], atol=2e-4)
    # The first comes from the exact prefill under every policy.
    assert found["sparse"][0] == pytest.approx(found["prefill"][0], abs=2e-4)
    assert not np.allclose(found["sparse"], found["prefill"], atol=1e-3)


def test_an_illegal_policy_ends_its_request_with_a_sentence(served: tuple[dict[str, Any], dict[str, Any]]) -> None:
    assert "policy 'guess'" in served[1]["refused"]


def test_the_command_goes_on_from_the_file_and_has_nothing_to_do(
    served: tuple[dict[str, Any], dict[str, Any]],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def no_engine(*args: Any) -> Any:
        raise AssertionError("a finished run started an engine")

    monkeypatch.setattr(session, "starter", lambda *args: no_engine)
    words = ["bench", "quality", "--suite", "ruler", "--model", str(MODEL), "--out", str(folder / "out.json")]
    words += ["--lengths", "1k", "--tasks", ",".join(TASKS), "--samples", "2", "--dtype", "float32", "--device", "cpu"]
    assert cli.main([*words, "--policies", "streaming,oracle,fixed:16:0.05"]) == 0, capsys.readouterr().err
    assert "| niah_single_2 | 1,024 |" in capsys.readouterr().out
    assert json.loads((folder / "out.json").read_text()) == served[0]


def test_sglang_without_the_flag_gives_the_same_answers(
    served: tuple[dict[str, Any], dict[str, Any]], folder: Path
) -> None:
    """The same samples in float32, with `off` added to the finished file: only SGLang without the flag is started."""
    out = folder / "off.json"
    out.write_text(json.dumps(served[0]))
    words = ["bench", "quality", "--suite", "ruler", "--model", str(MODEL), "--out", str(out)]
    words += ["--lengths", "1k", "--tasks", ",".join(TASKS), "--samples", "2", "--dtype", "float32", "--device", "cpu"]
    words += ["--policies", "streaming,oracle,fixed:16:0.05,off"]
    done = forked.run("-m", "fluxion_sglang.cli", *words)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = json.loads(out.read_text())["rows"]
    assert [row for row in rows if row["policy"] != "off"] == served[0]["rows"]
    off = [row for row in rows if row["policy"] == "off"]
    assert [row["task"] for row in off] == list(TASKS)
    assert all(row["same"] == 1.0 and row["kl"] is None for row in off)
