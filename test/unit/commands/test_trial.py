"""`fluxion try` as a whole, with a fake server: its report, its files, its exit codes."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from places import NEEDLE

from fluxion_sglang import cli
from fluxion_sglang.commands import needle
from fluxion_sglang.commands.serving import Piece, RequestRefused, Server, ServerError
from fluxion_sglang.commands.trial import command
from fluxion_sglang.scoring.forced import NOTES

STEP_S = {"off": 0.05, "full": 0.02, "fluxion": 0.01, "sketch": 0.01}


def answer(prompt: Sequence[int]) -> list[int]:
    """The right answer: the fact that follows the key in the document."""
    *document, first, second = prompt
    pairs = zip(document, document[1:], document[2:], strict=False)
    at = next(i for i, three in enumerate(pairs) if three == (needle.FACT, first, second))
    return [needle.ANSWER, *document[at + 1 : at + 7]]


class FakeServer(Server):
    """Answers at once, reports made-up times, and counts.

    Args:
        refuses: policies whose requests it ends. forgets: policies that answer wrongly, and differ much from full.
        breaks: number of batches that it answers before it raises `end`.
    """

    def __init__(
        self, refuses: Sequence[str] = (), forgets: Sequence[str] = (), breaks: int | None = None,
        end: type[BaseException] = KeyboardInterrupt,
    ) -> None:  # fmt: skip
        super().__init__("")
        self.refuses, self.forgets, self.breaks, self.end = refuses, forgets, breaks, end
        self.steps = 0.0
        self.batches = 0

    def stream(self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]) -> Iterator[Piece]:
        self.batches += 1
        if self.breaks is not None and self.batches > self.breaks:
            raise self.end
        policy = sampling.get("custom_params", {}).get("fluxion_policy", "off")
        if policy in self.refuses:
            raise RequestRefused(f"policy {policy!r} is not for you.")
        new = sampling["max_new_tokens"]
        self.steps += (new - 1) * len(prompts)
        answers = [(answer(prompt) + [11] * new)[:new] for prompt in prompts]
        if policy in self.forgets:
            answers = [[token ^ 1 for token in said] for said in answers]
        for step in range(1, new + 1):
            for i, (prompt, said) in enumerate(zip(prompts, answers, strict=True)):
                yield Piece(i, len(prompt) * 1e-4 + STEP_S[policy] * step, said[:step])

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Distributions of forced tokens: two tokens, equally likely except under a policy that forgets."""
        replies = []
        for sampling in body["sampling_params"]:
            params = sampling["custom_params"]
            one = 0.9 if params["fluxion_policy"] in self.forgets else 0.5
            notes = [[0.0, [1, 2], [math.log(one), math.log(1 - one)]]] * len(params["forced"])
            replies.append({"meta_info": {NOTES: notes}})
        return replies

    def metrics(self) -> dict[str, float]:
        each = {"layers": 4, "middle_tokens": 1000, "read_tokens": 250, "tile_bytes": 2**20, "metadata_bytes": 0}
        return {f"fluxion_{name}_total": value * self.steps for name, value in each.items()}

    def generate(self, sampling: Mapping[str, Any], **body: Any) -> dict[str, Any]:
        """The two best tokens are 0.1 nats apart."""
        return {"meta_info": {"output_top_logprobs": [[[-0.5, 1, None], [-0.6, 2, None]]]}}

    def flush(self) -> None:
        pass


class Machine:
    """Starts fake servers, and records their command lines."""

    def __init__(self, error: ServerError | None = None, **server: Any) -> None:
        self.error, self.server = error, server
        self.commands: list[list[str]] = []

    @contextmanager
    def start(self, words: Sequence[str], port: int, environment: Mapping[str, str], what: str) -> Iterator[Server]:
        self.commands.append(list(words))
        if self.error is not None:
            raise self.error
        yield FakeServer(**self.server)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)


SHORT = (NEEDLE, "--lengths", "1k,3k")


def trial(folder: Path, machine: Machine, *words: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, numbers and page of a run; without `words`, on short prompts."""
    parser = argparse.ArgumentParser()
    from fluxion_sglang.commands.trial import add_arguments

    add_arguments(parser)
    out, numbers = folder / "report.html", folder / "numbers.json"
    arguments = parser.parse_args([*(words or SHORT), "--out", str(out), "--json", str(numbers)])
    code = command.main(arguments, machine.start)
    return code, json.loads(numbers.read_text()), out.read_text()


def test_a_whole_trial_measures_everything_and_recommends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine()
    code, numbers, _ = trial(tmp_path, machine, NEEDLE)
    assert code == 0
    lengths = numbers["plan"]["lengths"]
    assert numbers["plan"]["policies"] == ["full", "fluxion"]
    assert max(lengths) > 8192
    for policy in ("off", "full", "fluxion"):
        mine = [row for row in numbers["decode"] if row["policy"] == policy]
        assert {(row["length"], row["batch"]) for row in mine} == {(length, b) for length in lengths for b in (1, 4)}
        assert all(row["ms"] == pytest.approx(STEP_S[policy] * 1e3) for row in mine)
    assert {(row["length"], row["policy"]) for row in numbers["agreement"]} == {
        (length, policy) for length in lengths for policy in ("full", "fluxion")
    }
    assert all(row["kl"] == 0 and row["same"] == 1 and row["steps"] > 50 for row in numbers["agreement"])
    assert all(row["agree"] == row["tokens"] for row in numbers["same"])
    assert all(row["share"] == 0.25 and row["bytes_per_token"] == 2**20 for row in numbers["reads"])
    assert numbers["advice"]["policy"] == "fluxion"
    assert {"machine", "versions", "commit"} <= numbers.keys()
    shown = capsys.readouterr().out
    assert numbers["advice"]["command"] in shown
    assert "Agreement with full" in shown


def test_the_servers_differ_by_the_flag_and_hold_every_prompt(tmp_path: Path) -> None:
    machine = Machine()
    _, numbers, _ = trial(tmp_path, machine, *SHORT, "--server-args", "--tp 2")
    with_flag, without = machine.commands
    config = json.loads(with_flag[with_flag.index("--fluxion-config") + 1])
    assert config["policy"] == "full"
    assert config["host_tokens"] > 4 * max(numbers["plan"]["lengths"])
    assert "--enable-fluxion" not in without
    assert int(without[without.index("--max-total-tokens") + 1]) > 4 * max(numbers["plan"]["lengths"])
    for words in (with_flag, without, numbers["advice"]["command"].split()):
        assert "--tp 2" in " ".join(words)


def test_the_page_stands_alone_and_has_every_table(tmp_path: Path) -> None:
    _, numbers, page = trial(tmp_path, Machine())
    outside = re.findall(r'(?:src|href|url)\s*[=(]\s*["\']?(?!#)([^"\')>]+)', re.sub(r"xmlns[^ >]*", "", page))
    assert outside == []
    assert page.count("<table>") >= 6
    assert page.count("<svg") == 2
    assert numbers["advice"]["command"].replace('"', "&#34;").replace("'", "&#39;") in page
    titles: list[str] = []

    class Titles(HTMLParser):
        inside = False

        def handle_starttag(self, tag: str, attrs: object) -> None:
            self.inside = tag == "h2"

        def handle_data(self, data: str) -> None:
            if self.inside:
                titles.append(data)
                self.inside = False

    Titles().feed(page)
    assert titles[0] == "Recommended: fluxion"
    assert {"Same answers", "Agreement with full", "Read of the middle", "How this was made"} <= set(titles)


def test_without_a_predictor_sketches_are_tried_and_training_is_explained(tmp_path: Path) -> None:
    """The model has a predictor that does not fit; only the server can detect this."""
    machine = Machine(refuses=["fluxion"], forgets=["sketch"])
    code, numbers, page = trial(tmp_path, machine)
    assert code == 0
    config = machine.commands[0][machine.commands[0].index("--fluxion-config") + 1]
    assert json.loads(config)["sketches"] is True
    assert numbers["plan"]["policies"] == ["full", "sketch"]
    assert numbers["advice"]["policy"] == "full"
    assert "fluxion train --model" in page
    assert "is not for you" in page
    _, predicted, _ = trial(tmp_path, Machine())
    more = numbers["fit"]["pool_bytes"] / predicted["fit"]["pool_bytes"]
    assert 1.05 < more < 1.12, "a server whose predictor fits needs no sketches"


def test_a_policy_that_is_far_from_full_is_not_recommended(tmp_path: Path) -> None:
    _, numbers, page = trial(tmp_path, Machine(forgets=["fluxion"]))
    assert numbers["advice"]["policy"] == "full"
    assert "nats from full at" in numbers["advice"]["reason"] and "nats from full at" in page


def test_other_tokens_are_counted_up_to_the_first_difference(tmp_path: Path) -> None:
    _, numbers, page = trial(tmp_path, Machine(forgets=["full"]))
    assert all(row["agree"] == 0 and row["gap"] == pytest.approx(0.1) for row in numbers["same"])
    assert "--dtype float32" in page


def test_a_refused_model_is_reported_with_the_server_s_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = "cannot serve this model, because it has sliding-window layers."
    code, numbers, page = trial(tmp_path, Machine(ServerError(f"It ended.\n  error: {refusal}", refusal)))
    assert code == 1
    assert numbers["refusal"] == refusal
    assert numbers["advice"] is None
    for text in (page, capsys.readouterr().out):
        assert "Fluxion does not serve this model" in text
        assert "sliding-window layers" in text
        assert f"python -m sglang.launch_server --model-path {NEEDLE} --port 30000" in text


def test_a_server_that_just_breaks_ends_the_trial_with_its_log(tmp_path: Path) -> None:
    code, numbers, page = trial(tmp_path, Machine(ServerError("The server ended with exit code 9.")))
    assert (code, numbers["refusal"]) == (1, "")
    assert "exit code 9" in page


def test_an_interruption_keeps_what_was_measured(tmp_path: Path) -> None:
    code, numbers, page = trial(tmp_path, Machine(breaks=20))
    assert code == 130
    assert numbers["decode"]
    assert "Interrupted" in numbers["stopped"]
    assert "Interrupted" in page
    assert not list(tmp_path.glob("*.partial"))


def test_a_signal_that_ends_the_command_leaves_a_report_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):  # what serving.exits_at_signals makes of it
        trial(tmp_path, Machine(breaks=20, end=SystemExit))
    assert "Interrupted" in json.loads((tmp_path / "numbers.json").read_text())["stopped"]
    assert "Interrupted" in (tmp_path / "report.html").read_text()


def test_lengths_that_the_model_does_not_hold_are_said_to_be_shorter(tmp_path: Path) -> None:
    code, numbers, page = trial(tmp_path, Machine(), NEEDLE, "--lengths", "2k,1000k")
    assert code == 0
    assert len(numbers["plan"]["lengths"]) == 2 and max(numbers["plan"]["lengths"]) < 1_024_000
    assert "1,024,000 tokens were asked for" in page


def test_a_second_server_that_does_not_start_costs_its_columns_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine()
    begin = machine.start

    @contextmanager
    def start(words: Sequence[str], *rest: Any) -> Iterator[Server]:
        if "--enable-fluxion" not in words:
            raise ServerError("No memory for it.")
        with begin(words, *rest) as server:
            yield server

    monkeypatch.setattr(machine, "start", start)
    code, numbers, page = trial(tmp_path, machine)
    assert code == 0
    assert "The part without the flag ended early. No memory for it." in page
    assert numbers["advice"]["policy"] == "fluxion"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["/no/such/model"], "There is no folder"),
        ([NEEDLE, "--lengths", "12"], "--lengths has '12'"),
        ([NEEDLE, "--minutes", "0"], "--minutes is 0"),
        ([NEEDLE, "--policies", "full,nonsense"], "--policies: policy 'nonsense' is not one"),
        ([NEEDLE, "--server-args", "'"], "close its quotes"),
        ([NEEDLE, "--out", "/no/such/folder/a.html"], "cannot be written to /no/such/folder/a.html (No such file"),
    ],
)
def test_bad_input_is_one_sentence_and_starts_nothing(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fluxion_sglang.commands.serving.subprocess.Popen", None)
    assert cli.main(["try", *words]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1
    assert said in told
