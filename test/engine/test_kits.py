"""SGLang's own test kits, with the flag: radix_cache_server_kit, abort_timeout_kit (abort all) and kl_divergence_kit.

prefix_cache_branching_kit asserts that the second request over a prefix does *not* hit the cache, which holds for
recurrent-state models only; its branching pattern is covered by `test_exact.py` (the `family` group) instead.
"""

from __future__ import annotations

import functools
import random
import subprocess
import unittest
import unittest.mock
from collections.abc import Iterator
from pathlib import Path

import cases
import pytest
import tiny_model
from forked import Forked
from server import Server
from sglang.test import kl_test_utils
from sglang.test.kits import radix_cache_server_kit
from sglang.test.kits.abort_timeout_kit import AbortAllMixin
from sglang.test.kits.kl_divergence_kit import KLDivergenceMixin

pytestmark = pytest.mark.full


class TestKits(AbortAllMixin, KLDivergenceMixin, unittest.TestCase):
    abort_all_num_requests = 8
    abort_all_sleep = 3
    kl_div_thres = 1e-6  # float32, and exact attention on both sides
    kl_div_max_samples = 8
    kl_div_prefill_max_new_tokens = 64
    kl_div_decode_max_new_tokens = 64

    base_url: str
    model: str
    process: Forked | subprocess.Popen[bytes]

    @pytest.fixture(scope="class", autouse=True)
    def server(self, request: pytest.FixtureRequest, logs: Path) -> Iterator[Server]:
        kit = request.cls
        kit.model = tiny_model.build(logs / "tiny-model")
        # The kit fetches its prompts from a hub unless they are in this cache.
        key = f"{kit.model}_{kl_test_utils.DEFAULT_PROMPT_TOKENS}_{kl_test_utils.DEFAULT_NUM_SAMPLES}"
        kl_test_utils._cached_input_ids[key] = [cases.filler(1500 + 200 * i, 800 + i) for i in range(8)]
        with Server(
            "--chunked-prefill-size", "1024", model=kit.model, fluxion='{"policy": "full", "host_tokens": 65536}',
            log=logs / "kits.log",
        ) as server:  # fmt: skip
            kit.base_url, kit.process = server.url, server.process
            yield server
            server.assert_clean()

    def test_radix_attention(self) -> None:
        random.seed(0)
        full = radix_cache_server_kit.gen_radix_tree
        # The kit's default of 400 nodes is sized for a GPU.
        small = functools.partial(full, num_nodes=40, chunk_len=128)
        with unittest.mock.patch.object(radix_cache_server_kit, "gen_radix_tree", small):
            radix_cache_server_kit.run_radix_attention_test(self.base_url)
