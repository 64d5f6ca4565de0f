"""The demo without a server: its command line, what it reads of /metrics, what it says when nothing works."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fluxion_sglang.commands import demo, serving

METRICS = """\
# TYPE fluxion_tasks counter
fluxion_tasks_total{executor="cpu"} 30.0
fluxion_tasks_total{executor="torch"} 10.0
# TYPE fluxion_layers counter
fluxion_layers_total 20.0
# TYPE fluxion_middle_tokens counter
fluxion_middle_tokens_total 1000.0
# TYPE fluxion_read_tokens counter
fluxion_read_tokens_total 250.0
# TYPE fluxion_tile_bytes counter
fluxion_tile_bytes_total 3.145728e+06
# TYPE fluxion_metadata_bytes counter
fluxion_metadata_bytes_total 1.048576e+06
# TYPE fluxion_host_pool_tokens gauge
fluxion_host_pool_tokens 2000.0
# TYPE fluxion_resident_tokens_per_request gauge
fluxion_resident_tokens_per_request 336.0
# TYPE sglang:time_to_first_token_seconds histogram
sglang:time_to_first_token_seconds_bucket{le="+Inf",is_streaming="false"} 2.0
sglang:time_to_first_token_seconds_sum{is_streaming="false"} 1.5
sglang:time_to_first_token_seconds_count{is_streaming="false"} 2.0
"""


class FakeServer(serving.Server):
    def get(self, path: str, timeout: float = 30) -> str:
        return METRICS


def test_metrics_keep_executors_apart_and_add_up_everything_else() -> None:
    metrics = FakeServer("").metrics()
    assert metrics["fluxion_tasks_total/cpu"] == 30
    assert metrics["fluxion_tasks_total/torch"] == 10
    assert metrics[f"{serving.TTFT}_sum"] == 1.5


def test_the_report_says_what_the_counters_say(capsys: pytest.CaptureFixture[str]) -> None:
    demo._report(FakeServer("").metrics(), 16800)
    out = capsys.readouterr().out
    assert "at most 336 of a request's 16,800 tokens (2.0%)" in out
    assert "holds 2,000 tokens" in out
    assert "40: cpu 75%, torch 25%" in out
    assert "25.0% of its tokens" in out
    assert "4.0 MiB by all tasks, 1.0 of it metadata" in out


def test_a_server_that_never_used_fluxion_is_an_error() -> None:
    with pytest.raises(demo.DemoError, match="no decode step that went through Fluxion"):
        demo._report({}, 16800)


def test_the_pool_of_the_command_line_holds_the_document_and_every_question(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(demo, "run", lambda args: bool(seen.append(args)) or True)
    assert demo.main(["--length", "5000", "--questions", "8", "--policy", "full"]) == 0
    command = demo.server_command(seen[0], 1234)
    config = json.loads(command[command.index("--fluxion-config") + 1])
    assert config["policy"] == "full"
    assert config["host_tokens"] % 16 == 0
    assert config["host_tokens"] >= 5000 + 8 * (demo.MAX_TOKENS + 2 * 16)


def test_the_server_s_refusal_is_shown_instead_of_its_log(capfd: pytest.CaptureFixture[str]) -> None:
    command = ["/bin/sh", "-c", "echo news; echo 'error: no such policy'; exit 3"]
    with pytest.raises(serving.ServerError) as failure, serving.running_server(command, 9):
        pass
    assert "exit code 3" in str(failure.value)
    assert "error: no such policy" in str(failure.value)
    assert "news" not in str(failure.value)
    assert "fluxion doctor" in str(failure.value)


def test_the_end_of_the_log_is_shown_when_the_server_dies_without_a_word() -> None:
    with (
        pytest.raises(serving.ServerError, match="last words"),
        serving.running_server(["/bin/sh", "-c", "echo last words"], 9),
    ):
        pass


def test_a_missing_model_ends_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--model-path", str(tmp_path)]) == 2
    assert "There is no model in" in capsys.readouterr().err


def test_a_wrong_answer_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "run", lambda args: False)
    assert demo.main([]) == 1
