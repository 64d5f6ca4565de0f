"""Fixtures of the end-to-end tests: plain SGLang's answers, and a directory for server logs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import cases
import pytest
from filelock import FileLock
from server import Completion, Server

GOLDEN = Path(__file__).with_name("golden.json")
"""Plain SGLang's answers, written by `pytest --full --write-golden test/engine/test_exact.py`."""

ROUTER = "sglang-router==0.3.2"

LEAST_MARGIN = 1e-3
"""Minimum margin, in nats, between the best and the second token of every step in a golden answer. CPUs that sum in
another order then find the same token."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-golden", action="store_true", help=f"write {GOLDEN.name} anew; with --full")


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server-logs")


@pytest.fixture(scope="session")
def router() -> list[str]:
    """The command of SGLang's router in an environment of its own, because its version of FastAPI may differ from
    ours."""
    uv = [str(Path(sys.executable).with_name("uv")), "run", "--no-project", "--with", ROUTER]
    found = subprocess.run([*uv, "true"], capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(f"{ROUTER} cannot be installed: {found.stderr.strip()[-300:]}")
    return [*uv, "python", "-m", "sglang_router.launch_router"]


@pytest.fixture(scope="session")
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Completion]:
    """Greedy tokens of plain SGLang (torch_native, float32, without the flag) for every case, and the second turn.

    With --full, plain SGLang computes them, and they must equal the golden file.
    """
    if not request.config.getoption("--full"):
        return _completions(json.loads(GOLDEN.read_text()))
    # Processes of one run share a folder: the first computes the answers, the others read them.
    folder = tmp_path_factory.getbasetemp()
    shared = (folder.parent if hasattr(request.config, "workerinput") else folder) / "reference.json"
    with FileLock(f"{shared}.lock"):
        if not shared.exists():
            answers = _ask(shared.with_suffix(".log"))
            if request.config.getoption("--write-golden", default=False):  # unknown if pytest got `test`
                GOLDEN.write_text(_dump(answers))
            shared.write_text(_dump(answers))
    found = json.loads(shared.read_text())
    golden = json.loads(GOLDEN.read_text())
    differ = [name for name in found if golden.get(name, {}).get("tokens") != found[name]["tokens"]]
    assert found.keys() == golden.keys() and not differ, f"{GOLDEN.name} differs in {differ}; write it anew"
    return _completions(found)


def _ask(log: Path) -> dict[str, dict[str, list[float]]]:
    answers = {}
    with Server("--chunked-prefill-size", "-1", fluxion=None, log=log) as server:

        def ask(name: str, ids: list[int], new: int) -> list[int]:
            got = server.generate(ids, new, top_logprobs_num=2)
            assert len(got.tokens) == new, name
            best = got.raw["meta_info"]["output_top_logprobs"]
            margin = min(first[0] - second[0] for first, second in best)
            assert margin >= LEAST_MARGIN, f"{name}: two tokens are {margin:.1e} apart; give the case another seed"
            answers[name] = {"tokens": got.tokens, "logprobs": [round(p, 5) for p in got.logprobs]}
            return got.tokens

        for name, (ids, new) in cases.all_cases().items():
            tokens = ask(name, ids, new)
            if name == "length-2000":
                ask("second-turn", cases.second_turn(ids, tokens), cases.TURN_NEW)
        server.assert_clean()
    return answers


def _dump(answers: dict[str, dict[str, list[float]]]) -> str:
    lines = [f" {json.dumps(name)}: {json.dumps(answer)}" for name, answer in answers.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _completions(answers: dict[str, dict[str, list[float]]]) -> dict[str, Completion]:
    return {
        name: Completion([int(token) for token in answer["tokens"]], answer["logprobs"], 0, {}, {})
        for name, answer in answers.items()
    }
