"""With policy `full`, clients see no difference: greedy tokens in float32 equal plain SGLang's.

SGLang's strict idle leak check stays on in every server; `assert_clean` fails on what it reports.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import cases
import pytest
from places import NEEDLE
from policy_example import search_path
from server import PLUGINS, Completion, Server

Reference = dict[str, Completion]
ALL = cases.all_cases()
PASSES = {"prefill": r"Prefill batch.*#pending-token: [1-9]", "decode": "Decode batch"}
"""Log lines in the middle of a prompt and of an answer."""


def assert_same(got: Completion, want: Completion) -> None:
    """Tokens are identical; log probabilities agree up to float32 summation order."""
    assert got.tokens == want.tokens, got.finish
    assert max(abs(a - b) for a, b in zip(got.logprobs, want.logprobs, strict=True)) < 1e-3


def group(name: str) -> list[str]:
    return [case for case in ALL if case.startswith(name + "-")]


def check_group(server: Server, reference: Reference, name: str) -> None:
    """Send all requests of a group at once; tokens equal the reference's."""
    names = group(name)
    for case, got in zip(names, server.generate_many([ALL[case] for case in names]), strict=True):
        assert_same(got, reference[case])


def check_pressure(server: Server, reference: Reference) -> None:
    """Groups exceed the pool, while SGLang also retracts requests on its own."""
    for _ in range(2):
        check_group(server, reference, "crowd")
        check_group(server, reference, "relatives")
    assert re.search(r"Testing retraction|Retract requests", server.log()), "nothing was retracted"


class Shared:
    """Requests with common prefixes, on a server that holds all of them."""

    def test_eight_at_once_with_shared_prefixes(self, server: Server, reference: Reference) -> None:
        server.flush()
        check_group(server, reference, "family")
        # Repeat, with every prefix in the tree and rows rebound to its pages.
        check_group(server, reference, "family")

    def test_second_turn(self, server: Server, reference: Reference) -> None:
        server.flush()
        ids, new = ALL["length-2000"]
        first = server.generate(ids, new)
        turn = cases.second_turn(ids, first.tokens)
        got = server.generate(turn, cases.TURN_NEW)
        assert got.cached >= 2048, "the finished turn, decoded tokens included, should be in the tree"
        assert_same(got, reference["second-turn"])


class TestTheFlagAlone(Shared):
    """A model without a predictor; the server has the flag and no policy: chunks of 1,024 tokens, overlap scheduler
    (SGLang's default), a pool that holds everything, processes that SGLang spawns."""

    @pytest.fixture(scope="class")
    def server(self, reference: Reference, logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        model = tmp_path_factory.mktemp("no-predictor")
        for file in Path(NEEDLE).iterdir():
            if file.is_file():
                (model / file.name).symlink_to(file)
        with Server(
            "--chunked-prefill-size", "1024", model=str(model), fluxion='{"host_tokens": 65536}',
            log=logs / "flag-alone.log", spawn=True,
        ) as server:  # fmt: skip
            yield server
            server.assert_clean()

    def test_it_is_exact_and_says_so(self, server: Server) -> None:
        (line,) = re.findall(r"Fluxion: policy full, which reads everything and is exact.*", server.log())
        assert "none is named or in the folder" in line and "`fluxion try`" in line

    def test_the_workers_compute_the_layers(self, server: Server) -> None:
        assert re.search(r"Fluxion: [1-9]\d* linear layers run on the native workers", server.log())

    def test_capacity_line(self, server: Server) -> None:
        line = re.search(
            r"Fluxion: host pool of (\d+) tokens, ([\d.]+) GiB .*largest context (\d+) tokens", server.log()
        )
        assert line and (line[1], line[3]) == ("65536", "32768") and float(line[2]) > 0.1
        assert "'disable_overlap_schedule': False" in server.log()

    @pytest.mark.parametrize(
        "length", [n if n <= 2000 else pytest.param(n, marks=pytest.mark.full) for n in cases.LENGTHS]
    )
    def test_lengths(self, server: Server, reference: Reference, length: int) -> None:
        server.flush()
        ids, new = ALL[f"length-{length}"]
        got = server.generate(ids, new)
        assert got.cached == 0
        assert_same(got, reference[f"length-{length}"])

    def test_radix_hit_on_a_host_only_prefix(self, server: Server, reference: Reference) -> None:
        server.flush()
        ids, new = ALL["length-5000"]
        server.generate(ids, 1)
        # Other requests take the row, so nothing of the prefix stays on the device.
        server.generate_many([(cases.prompt(400, 300 + i), 4) for i in range(8)])
        got = server.generate(ids, new)
        assert got.cached >= 4900
        assert_same(got, reference["length-5000"])

    @pytest.mark.full
    def test_long_generation(self, server: Server, reference: Reference) -> None:
        ids, new = ALL["long-generation"]
        assert_same(server.generate(ids, new), reference["long-generation"])

    def test_flush_cache(self, server: Server, reference: Reference) -> None:
        ids, new = ALL["length-2000"]
        server.generate(ids, 1)
        server.flush()
        got = server.generate(ids, new)
        assert got.cached == 0
        assert_same(got, reference["length-2000"])

    @pytest.mark.parametrize("when", ["prefill", "decode"])
    def test_abort(self, server: Server, reference: Reference, when: str) -> None:
        server.flush()
        ids = cases.prompt(30000, 77) if when == "prefill" else ALL["length-2000"][0]
        got = server.aborted(ids, 8000 if when == "decode" else 20, PASSES[when], f"abort-{when}")
        assert bool(got.tokens) == (when == "decode")
        ids, new = ALL["length-300"]
        assert_same(server.generate(ids, new), reference["length-300"])

    def test_prompt_longer_than_the_context_is_refused(self, server: Server, reference: Reference) -> None:
        got = server.generate([5] * 70000, 4)
        assert not got.tokens and "70000" in str(got.finish), got.finish
        ids, new = ALL["length-50"]
        assert_same(server.generate(ids, new), reference["length-50"])


@pytest.mark.full
class TestUnchunked:
    """A whole prompt in one extend; only its sinks and window have a place on the device. PyTorch computes the model's
    layers."""

    @pytest.fixture(scope="class")
    def server(self, reference: Reference, logs: Path) -> Iterator[Server]:
        with Server(
            "--chunked-prefill-size", "-1", "--disable-overlap-schedule",
            fluxion='{"policy": "full", "host_tokens": 65536, "model_kernels": "off"}',
            log=logs / "unchunked.log",
        ) as server:  # fmt: skip
            yield server
            server.assert_clean()

    @pytest.mark.parametrize("length", [2000, 20000])
    def test_lengths(self, server: Server, reference: Reference, length: int) -> None:
        ids, new = ALL[f"length-{length}"]
        assert_same(server.generate(ids, new), reference[f"length-{length}"])

    def test_family(self, server: Server, reference: Reference) -> None:
        check_group(server, reference, "family")

    def test_the_layers_are_pytorchs(self, server: Server) -> None:
        assert "run on the native workers" not in server.log()

    def test_the_workers_took_the_tasks(self, server: Server) -> None:
        assert server.metrics()['fluxion_tasks_total{executor="cpu"}'] > 0


@pytest.mark.full
class TestPressure:
    """A host pool of 2,400 tokens, forced retractions and mixed chunks: constant eviction and retraction."""

    @pytest.fixture(scope="class")
    def server(self, reference: Reference, logs: Path) -> Iterator[Server]:
        with Server(
            "--chunked-prefill-size", "256", "--enable-mixed-chunk", fluxion='{"policy": "full", "host_tokens": 2400}',
            env={"SGLANG_TEST_RETRACT": "1"}, log=logs / "pressure.log",
        ) as server:  # fmt: skip
            yield server
            server.assert_clean()

    def test_eviction_and_retraction(self, server: Server, reference: Reference) -> None:
        check_pressure(server, reference)
        evicted = [value for name, value in server.metrics().items() if "evicted_tokens_total" in name]
        assert sum(evicted) > 0, "nothing was evicted"

    def test_prompt_longer_than_the_pool_is_refused(self, server: Server, reference: Reference) -> None:
        got = server.generate(cases.prompt(3000, 5), 4)
        assert not got.tokens and re.search(r"exceed|too long|longer", str(got.finish)), got.finish
        ids, new = ALL["length-300"]
        assert_same(server.generate(ids, new), reference["length-300"])


@pytest.mark.full
class TestFailure:
    """The 26th decode step fails: its request gets an error, its decoded tokens are dropped, the server continues."""

    @pytest.fixture(scope="class")
    def server(self, reference: Reference, logs: Path) -> Iterator[Server]:
        with Server(
            "--chunked-prefill-size", "512", fluxion='{"policy": "faulty:26", "host_tokens": 20000}',
            env={"PYTHONPATH": search_path(PLUGINS)}, log=logs / "failure.log",
        ) as server:  # fmt: skip
            yield server
            assert server.process.poll() is None

    def test_the_request_fails_and_the_server_goes_on(self, server: Server, reference: Reference) -> None:
        ids, new = ALL["length-2000"]
        failed = server.generate(ids, new)
        assert "injected fault" in str(failed.finish), failed.finish
        # The prompt was prefilled before the fault and may be in the tree. With the 25 decoded tokens, the hit would be
        # a page longer.
        conversation = ids + reference["length-2000"].tokens
        assert server.generate(conversation, 1).cached <= len(ids), "something of the failed pass is in the tree"
        for _ in range(2):
            assert_same(server.generate(ids, new), reference["length-2000"])
        server.assert_idle()
