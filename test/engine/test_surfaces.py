"""Other entry points of SGLang: sgl.Engine, sgl.Runtime, one_batch; and a start that must fail."""

from __future__ import annotations

import json
from pathlib import Path

import forked
import pytest
from places import NEEDLE

from fluxion_sglang.commands.needle import needle_prompt

pytestmark = pytest.mark.full

SCRIPT = """
import json, sys
import sglang as sgl
from fluxion_sglang.commands.needle import needle_prompt

def main():
    prompt = needle_prompt(4096, 8, seed=5)
    options = dict(
        model_path=sys.argv[2], device="cpu", enable_fluxion=True, fluxion_config=sys.argv[3],
        max_running_requests=4, max_total_tokens=20000, chunked_prefill_size=2048, log_level="error",
    )
    new = len(prompt.questions[0].answer_ids)
    sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    if sys.argv[1] == "engine":
        engine = sgl.Engine(**options)
        found = [
            engine.generate(input_ids=prompt.token_ids(i), sampling_params=sampling)["output_ids"]
            for i in range(len(prompt.questions))
        ]
        wanted = [list(q.answer_ids) for q in prompt.questions]
        engine.shutdown()
    else:
        runtime = sgl.Runtime(**options)

        @sgl.function
        def ask(s, text):
            s += text
            s += sgl.gen("answer", max_tokens=new, temperature=0, ignore_eos=True)

        found = [ask.run(text=prompt.text(i), backend=runtime)["answer"].split() for i in range(len(prompt.questions))]
        wanted = [q.answer.split() for q in prompt.questions]
        runtime.shutdown()
    print("RESULT", json.dumps([found, wanted]))

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(("surface", "policy", "least"), [("engine", "fixed:16:0.05", 4), ("runtime", "full", 8)])
def test_programs(surface: str, policy: str, least: int, tmp_path: Path) -> None:
    """sgl.Engine at the paper's baseline budget, and sgl.Runtime with full attention; right answers out of eight."""
    script = tmp_path / "program.py"
    script.write_text(SCRIPT)
    done = forked.run(str(script), surface, NEEDLE, json.dumps({"policy": policy}))
    assert "RESULT " in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]
    found, wanted = json.loads(done.stdout.split("RESULT ")[1].splitlines()[0])
    right = sum(f == w for f, w in zip(found, wanted, strict=True))
    assert right >= least, (found, wanted)


def test_one_batch_computes_what_plain_sglang_computes(tmp_path: Path) -> None:
    """SGLang's own --correctness-test gives the same text with and without the flag."""
    words = ["--model-path", NEEDLE, "--device", "cpu", "--dtype", "float32", "--correctness-test", "--cut-len", "2"]
    words += ["--max-total-tokens", "20000", "--max-running-requests", "8", "--output-len", "24"]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(needle_prompt(1500, 8, seed=3).text() + "\n")
    words += ["--prompt-filename", str(prompts)]

    def answers(*more: str) -> list[str]:
        done = forked.run("-m", "sglang.benchmark.one_batch", *words, *more)
        assert done.returncode == 0, done.stderr[-4000:]
        lines = done.stdout.splitlines()
        found = [i for i, line in enumerate(lines) if line.startswith("========== Prompt")]
        assert len(found) == 1, done.stdout[-2000:]
        return lines[found[0] :]

    assert answers("--enable-fluxion", "--fluxion-config", '{"policy": "full"}') == answers()


def test_a_corrupt_library_is_refused_in_one_sentence(tmp_path: Path) -> None:
    library = tmp_path / "libfluxion.so"
    library.write_bytes(b"\\x7fELF and nothing more")
    done = forked.run(
        "-m", "sglang.launch_server", "--model-path", NEEDLE, "--device", "cpu", "--enable-fluxion",
        FLUXION_LIBRARY=str(library),
    )  # fmt: skip
    assert done.returncode != 0
    refusals = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(refusals) == 1 and str(library) in refusals[0], done.stderr[-3000:]
    assert "Traceback" not in done.stderr
