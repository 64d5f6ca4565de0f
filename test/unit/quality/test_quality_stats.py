"""Numbers of the quality harness on hand-computed cases: intervals, divergences, audit sums, forced decoding."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import dill
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quality_world import AUDIT, HEADS

from fluxion_quality import stats, table
from fluxion_sglang.scoring import kl
from fluxion_sglang.scoring.forced import NOTES, ForceTokens, serialized
from fluxion_sglang.scoring.kl import Distribution


class TestBootstrap:
    def test_a_constant_difference_has_no_spread(self) -> None:
        deltas = stats.resampled_deltas([0.5, 0.25, 0.75], [1.0, 0.75, 1.25], [0, 1, 2], "score", 0)
        assert deltas is not None and deltas.shape == (10_000,)
        assert stats.interval(deltas) == pytest.approx((-0.5, -0.5))

    def test_one_document_says_nothing(self) -> None:
        assert stats.resampled_deltas([0.0, 1.0, 0.0], [1.0, 1.0, 1.0], [4, 4, 4], "score", 0) is None

    def test_two_documents_have_three_outcomes(self) -> None:
        # Draws: twice the first (-1), twice the second (0), or both, with probabilities 1/4, 1/4, 1/2. The spread is
        # corrected by sqrt(2).
        deltas = stats.resampled_deltas([0.0, 1.0], [1.0, 1.0], [0, 1], "score", 0)
        assert deltas is not None
        values, counts = np.unique(deltas, return_counts=True)
        assert values == pytest.approx([-0.5 - 0.5**0.5, -0.5, -0.5 + 0.5**0.5])
        assert counts / 10_000 == pytest.approx([0.25, 0.5, 0.25], abs=0.02)
        assert stats.interval(deltas) == pytest.approx((values[0], values[-1]))

    def test_means_of_few_documents_spread_as_means_of_new_ones(self) -> None:
        gaps = np.random.default_rng(2).normal(0.0, 1.0, 6)
        deltas = stats.resampled_deltas(gaps.tolist(), [0.0] * 6, range(6), "score", 3)
        assert deltas is not None
        assert deltas.std() == pytest.approx(gaps.std(ddof=1) / 6**0.5, rel=0.03)
        assert deltas.mean() == pytest.approx(gaps.mean(), abs=0.02)

    def test_documents_are_drawn_whole(self) -> None:
        # Questions about a document fail together: drawn singly, 20 of them would look four times as certain.
        policy, full = [0.0] * 10 + [1.0] * 10, [1.0] * 20
        whole = stats.resampled_deltas(policy, full, [0] * 10 + [1] * 10, "score", 0)
        single = stats.resampled_deltas(policy, full, list(range(20)), "score", 0)
        assert whole is not None and single is not None
        assert stats.interval(whole) == pytest.approx((-0.5 - 0.5**0.5, -0.5 + 0.5**0.5))
        low, high = stats.interval(single)
        assert low == pytest.approx(-0.7, abs=0.06) and high == pytest.approx(-0.3, abs=0.06)

    def test_documents_of_different_sizes_weigh_by_their_questions(self) -> None:
        deltas = stats.resampled_deltas([0.0, 1.0, 1.0, 1.0], [1.0] * 4, [0, 1, 1, 1], "score", 0)
        assert deltas is not None
        assert np.unique(deltas) == pytest.approx([-0.25 - 0.75 * 2**0.5, -0.25, -0.25 + 0.25 * 2**0.5])

    def test_it_agrees_with_the_normal_approximation(self) -> None:
        rng = np.random.default_rng(5)
        full = rng.random(400)
        gaps = rng.normal(-0.1, 0.3, 400)
        deltas = stats.resampled_deltas((full + gaps).tolist(), full.tolist(), range(400), "score", 1)
        assert deltas is not None
        half = 1.96 * gaps.std() / 20
        assert stats.interval(deltas) == pytest.approx((gaps.mean() - half, gaps.mean() + half), abs=0.004)

    def test_the_seed_decides(self) -> None:
        case = ([0.0, 1.0, 0.5], [1.0, 1.0, 0.0], [0, 1, 2], "score")
        first, again, other = (stats.resampled_deltas(*case, seed) for seed in (3, 3, 4))
        assert np.array_equal(first, again) and not np.array_equal(first, other)

    def test_perplexity_is_the_exponential_of_the_mean(self) -> None:
        assert stats.score([1.0, 3.0], "perplexity") == pytest.approx(math.e**2)
        deltas = stats.resampled_deltas([1.0, 1.0], [0.0, 0.0], [0, 1], "perplexity", 0)
        assert deltas is not None and stats.interval(deltas) == pytest.approx((math.e - 1, math.e - 1))


class TestAudit:
    def records(self, policy: str, error: float, tile: int = 10, middle: int = 32) -> np.ndarray[Any, Any]:
        rows = [(policy.encode(), layer, 400, middle, tile, 6, 64, [error] * HEADS) for layer in (0, 1)]
        return np.array(rows, AUDIT)

    def test_sums_by_policy(self) -> None:
        steps = [np.concatenate([self.records("a", 0.25), self.records("b:0.1", 1.0, tile=58)])] * 3
        sums = {"a": stats.AuditSum(), "b:0.1": stats.AuditSum(), "c": stats.AuditSum()}
        stats.by_policy(steps, sums)
        assert sums["a"].row() == {
            "error_mean": 0.25,
            "error_p99": 0.25,
            "read_fraction": 0.25,
            "bytes_per_token": 32.0,  # 16 bytes in each of two layers
        }
        assert sums["b:0.1"].row()["read_fraction"] == 1.0
        assert set(sums["c"].row().values()) == {None}

    def test_other_policies_and_steps_without_a_middle_do_not_count(self) -> None:
        sums = {"a": stats.AuditSum()}
        stats.by_policy([self.records("z", 9.0), self.records("a", 9.0, middle=0), self.records("a", 0.5)], sums)
        assert sums["a"].row()["error_mean"] == 0.5

    def test_a_percentile_is_over_heads_layers_and_steps(self) -> None:
        one = self.records("a", 0.0)
        one["error"] = np.arange(2 * HEADS).reshape(2, HEADS)
        sums = {"a": stats.AuditSum()}
        stats.by_policy([one], sums)
        assert sums["a"].row()["error_p99"] == pytest.approx(6.93)
        assert sums["a"].row()["error_mean"] == 3.5

    def test_a_spec_longer_than_the_field(self) -> None:
        name = "x" * 40
        sums = {name: stats.AuditSum()}
        stats.by_policy([self.records(name, 0.5)], sums)
        assert sums[name].row()["error_mean"] == 0.5


class TestParetoFront:
    def rows(self, others: dict[str, tuple[float, float]]) -> dict[str, dict[str, Any]]:
        """Score and bytes, by policy."""
        found = {"full": (0.9, 100.0), "streaming": (1.0, 0.0)} | others
        return {policy: {"score": score, "bytes_per_token": read} for policy, (score, read) in found.items()}

    def test_the_front(self) -> None:
        rows = self.rows(
            {
                "fixed:16:0.5": (0.9, 50), "fixed:32:0.5": (0.9, 40), "fixed:16:0.2": (0.8, 45),
                "fixed:16:0.1": (0.8, 10), "fixed:32:0.1": (0.8, 10),
            }
        )  # fmt: skip
        fixed = [policy for policy in rows if policy.startswith("fixed")]
        assert table.pareto_front(rows, fixed) == {"fixed:32:0.5", "fixed:16:0.1", "fixed:32:0.1"}
        assert table.pareto_front(rows, rows) == {"streaming"}, "it has the best score and reads nothing"
        costs = {"a": {"score": 1.0, "read_fraction": 0.2}, "b": {"score": 1.0, "read_fraction": 0.1}}
        assert table.pareto_front(costs, costs, "read_fraction") == {"b"}


def distribution(**probabilities: float) -> Distribution:
    ids = [int(name[1:]) for name in probabilities]
    return Distribution(np.array(ids), np.log(np.array(list(probabilities.values()))))


class TestDivergence:
    def test_whole_vocabularies(self) -> None:
        full, other = distribution(t0=0.5, t1=0.25, t2=0.25), distribution(t2=0.5, t0=0.25, t1=0.25)
        assert kl.divergence(full, other) == pytest.approx(0.25 * math.log(2))
        assert kl.divergence(full, full) == 0

    def test_the_rest_is_one_bucket(self) -> None:
        # Both list token 0; tokens that only one lists join the rest: 0.5 against 0.75.
        full, other = distribution(t0=0.5, t1=0.25), distribution(t0=0.25, t2=0.5)
        want = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
        assert kl.divergence(full, other) == pytest.approx(want)

    def test_nothing_in_common_is_nothing_known(self) -> None:
        assert kl.divergence(distribution(t0=0.9), distribution(t1=0.9)) == 0

    def test_impossible_tokens(self) -> None:
        full = Distribution(np.array([0, 1]), np.array([0.0, -np.inf]))
        other = Distribution(np.array([0, 1]), np.array([-np.inf, 0.0]))
        assert kl.divergence(full, full) == 0
        assert math.isfinite(kl.divergence(full, other)) and kl.divergence(full, other) > 100

    @given(st.integers(0, 2**32 - 1), st.integers(1, 40))
    def test_a_part_of_the_vocabulary_gives_a_lower_bound(self, seed: int, top: int) -> None:
        rng = np.random.default_rng(seed)
        p, q = rng.dirichlet(np.full(40, 0.3), 2) * 0.999 + 0.001 / 40

        def best(values: Any, count: int) -> Distribution:
            order = np.argsort(values)[::-1][:count]
            return Distribution(order, np.log(values[order]))

        whole = kl.divergence(best(p, 40), best(q, 40))
        assert whole == pytest.approx(float((p * np.log(p / q)).sum()), abs=1e-6)
        assert kl.divergence(best(p, top), best(q, top)) <= whole + 1e-6

    def test_steps_up_to_the_first_difference_without_the_first(self) -> None:
        near, far = distribution(t0=0.5, t1=0.5), distribution(t0=0.25, t1=0.75)
        gap = kl.divergence(near, far)
        assert kl.divergences([1, 2, 3, 4], [near] * 4, [1, 2, 9, 4], [far] * 4) == pytest.approx([gap, gap])
        assert kl.divergences([1, 2, 3], [near] * 3, [1, 2], [far] * 2) == pytest.approx([gap])
        assert kl.divergences([1, 2], [near] * 2, [7, 2], [far] * 2) == []
        assert kl.divergences([], [], [1], [far]) == []

    def test_how_many_tokens(self) -> None:
        assert [kl.tokens_compared(size) for size in (576, 1024, 1025, 150_000)] == [576, 1024, 256, 256]


class TestForced:
    def request(self, forced: list[int]) -> tuple[SimpleNamespace, dict[str, Any]]:
        request = SimpleNamespace(output_ids=[], customized_info=None)
        return request, {"__req__": request, "forced": forced, "top": 2}

    def test_the_target_is_noted_and_forced(self) -> None:
        (one, first), (two, second) = self.request([2, 0]), self.request([1, 1])
        logits = torch.tensor([[0.0, 0.0, math.log(2.0)], [math.log(8.0), 0.0, 0.0]])
        forced = ForceTokens()(logits.clone(), [first, second])
        assert forced.argmax(-1).tolist() == [2, 1]
        assert torch.isneginf(forced).sum() == 4
        ((logprob, ids, values),) = one.customized_info[NOTES]
        assert logprob == pytest.approx(math.log(0.5)) and ids[0] == 2
        assert values == pytest.approx([math.log(0.5), math.log(0.25)])
        assert two.customized_info[NOTES][0][0] == pytest.approx(math.log(0.1))
        one.output_ids.append(2)
        assert ForceTokens()(logits[:1].clone(), [first]).argmax(-1).tolist() == [0]
        assert len(one.customized_info[NOTES]) == 2

    def test_chunks_of_a_prefill_leave_one_note(self) -> None:
        request, params = self.request([1, 1])
        for value in (0.0, 1.0, 2.0):
            ForceTokens()(torch.tensor([[value, 0.0, 0.0]]), [params])
        assert len(request.customized_info[NOTES]) == 1
        assert request.customized_info[NOTES][0][0] == pytest.approx(-math.log(math.exp(2.0) + 2))

    def test_sglang_can_read_it(self) -> None:
        assert dill.loads(bytes.fromhex(json.loads(serialized())["callable"])) is ForceTokens
