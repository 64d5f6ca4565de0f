"""NGRAM speculative decoding with the flag: tokens equal those of plain SGLang without it, in fewer passes.

Plain SGLang's worker needs libcuda, so plain SGLang with NGRAM is no reference on a CPU.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from places import NEEDLE
from server import Completion, Server
from test_exact import ALL, Reference, Shared, assert_same, check_pressure

from fluxion_sglang.kv.host_pool import KVShape

pytestmark = pytest.mark.full

NGRAM = ("--speculative-algorithm", "NGRAM")


def steps(got: Completion) -> int:
    """Verify passes of a request."""
    return int(got.raw["meta_info"]["spec_verify_ct"])


class TestDrafts(Shared):
    """A pool that holds everything. The bundled model has a predictor, so the server's default policy is sparse."""

    @pytest.fixture(scope="class")
    def server(self, reference: Reference, logs: Path) -> Iterator[Server]:
        with Server(
            *NGRAM, "--chunked-prefill-size", "1024", fluxion='{"host_tokens": 65536, "canary": 1.0, "sketches": true}',
            log=logs / "ngram.log",
        ) as server:  # fmt: skip
            yield server
            server.assert_clean()

    def test_the_log_says_what_is_read(self, server: Server) -> None:
        assert re.search(r"verifies a draft, and reads everything for it; the policy fluxion\S* changes", server.log())

    @pytest.mark.parametrize("length", [50, 300, 2000, 5000])
    def test_lengths(self, server: Server, reference: Reference, length: int) -> None:
        """Ask twice: the second time the cache has the n-grams of the first answer, and drafts are longer."""
        ids, new = ALL[f"length-{length}"]
        first, second = (server.generate(ids, new) for _ in range(2))
        assert_same(first, reference[f"length-{length}"])
        assert_same(second, reference[f"length-{length}"])
        assert second.cached >= length // 16 * 16 - 16
        assert steps(second) < new - 1, "no draft was accepted"

    def test_any_policy_gives_the_exact_tokens(self, server: Server, reference: Reference) -> None:
        ids, new = ALL["length-2000"]
        assert_same(server.generate(ids, new, "streaming"), reference["length-2000"])

    def test_sampling(self, server: Server) -> None:
        """top_k of one is greedy at any temperature; without it, this temperature gives arbitrary tokens."""
        ids, new = ALL["length-300"]
        greedy = server.generate(ids, new)
        params = {"temperature": 20.0, "max_new_tokens": new, "ignore_eos": True}
        one = server.generate(ids, new, sampling_params={**params, "top_k": 1})
        assert one.tokens == greedy.tokens
        free = server.generate(ids, new, sampling_params={**params, "top_p": 0.95})
        assert len(free.tokens) == new and free.tokens != greedy.tokens

    def test_abort(self, server: Server, reference: Reference) -> None:
        server.aborted(ALL["length-2000"][0], 8000, "Decode batch", "abort-ngram")
        ids, new = ALL["length-300"]
        assert_same(server.generate(ids, new), reference["length-300"])

    def test_the_pool_is_sound(self, server: Server) -> None:
        """After all accepted and rejected drafts, every token and metadata entry is what was written."""
        server.assert_sound()

    def test_the_pool_keeps_no_sketches_which_no_draft_reads(self, server: Server) -> None:
        config = json.loads((Path(NEEDLE) / "config.json").read_text())
        shape = KVShape(config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"], torch.float32)
        (taken,) = [value for name, value in server.metrics().items() if name.startswith("fluxion_host_pool_bytes")]
        assert shape.pool_bytes(65536) <= taken < 1.01 * shape.pool_bytes(65536)


class TestNarrow:
    """A pool of 2,400 tokens, and SGLang's forced retractions."""

    @pytest.fixture(scope="class")
    def server(self, reference: Reference, logs: Path) -> Iterator[Server]:
        with Server(
            *NGRAM, "--max-total-tokens", "2400", "--chunked-prefill-size", "512",
            "--speculative-num-draft-tokens", "20", env={"SGLANG_TEST_RETRACT": "1"}, log=logs / "ngram-narrow.log",
        ) as server:  # fmt: skip
            yield server
            server.assert_clean()

    def test_eviction_and_retraction(self, server: Server, reference: Reference) -> None:
        check_pressure(server, reference)
