"""Functions of NGRAM speculative decoding on a CPU, against plain Python, and trees of tokens over the host pool."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import reference
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_calls import NAN, dtypes, few, isas, k, random_tiles, seeds
from native_world import attention
from test_prefill import NO_WINDOW, check_lse, close
from torch import Tensor

from fluxion_sglang.kv.host_pool import HostPool, KVShape
from fluxion_sglang.kv.placement import Placement
from fluxion_sglang.native import Workers
from fluxion_sglang.sglang.steps import speculation

parents_of = st.lists(st.integers(0, 1 << 30), min_size=0, max_size=63).map(
    lambda draws: [-1] + [draw % (i + 1) for i, draw in enumerate(draws)]
)
"""Trees: the parent of every node, which precedes it; -1 for the root."""


def lineage(parents: list[int], node: int) -> list[int]:
    """The node and its ancestors."""
    return [] if node < 0 else [node, *lineage(parents, parents[node])]


def mask_of(parents: list[int]) -> Tensor:
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        mask[node, lineage(parents, node)] = True
    return mask


def bits_of(parents: list[int]) -> Tensor:
    return speculation.tree_bits(mask_of(parents).flatten(), 1)[0]


def links(trees: list[list[int]], starts: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count, size = len(trees), len(trees[0])
    numbers = [torch.full((count, size), -7) for _ in range(3)]
    positions = torch.full((count * size,), -7)
    mask = torch.stack([mask_of(parents) for parents in trees]).flatten()
    speculation.tree_links(mask, torch.tensor(starts), positions, *numbers, count, size)
    return positions, *numbers


@settings(max_examples=examples(50))
@given(first=parents_of, seed=seeds)
def test_links_of_trees(first: list[int], seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    second = [-1] + [int(torch.randint(i + 1, (1,), generator=random)) for i in range(len(first) - 1)]
    positions, index, child, sibling = links([first, second], [5, 1000])
    size = len(first)
    assert index.flatten().tolist() == list(range(2 * size))
    for b, (parents, start) in enumerate(((first, 5), (second, 1000))):
        for node in range(size):
            assert positions[b * size + node] == start + len(lineage(parents, node)) - 1
            below = [i for i in range(node + 1, size) if parents[i] == node]
            assert child[b, node] == (below or [-1])[0]
            after = [i for i in range(node + 1, size) if parents[i] == parents[node] and parents[node] >= 0]
            assert sibling[b, node] == (after or [-1])[0]


@settings(max_examples=examples(50))
@given(parents=parents_of, seed=seeds)
def test_the_greedy_path_is_what_the_model_says(parents: list[int], seed: int) -> None:
    """With few tokens, many drafts are right; siblings differ, as in SGLang's trees."""
    random = torch.Generator().manual_seed(seed)
    size, words = len(parents), 3
    used: dict[int, set[int]] = {}
    kept = [0]  # nodes whose siblings have other tokens
    tokens = [0]
    for node in range(1, size):
        token = int(torch.randint(words, (1,), generator=random))
        tokens.append(token)
        if token not in used.setdefault(parents[node], set()):
            kept.append(node)
        else:
            tokens[node] = words + node  # the model never outputs it
        used[parents[node]].add(token)
    says = torch.randint(words, (1, size), generator=random)
    _, index, child, sibling = links([parents], [9])
    predicts, path, count = torch.full((size,), -1), torch.full((1, size), -1), torch.empty(1, dtype=torch.int64)
    speculation.verify_greedy(None, predicts, path, count, torch.tensor([tokens]), index, child, sibling, says)  # type: ignore[arg-type]
    want, node = [0], 0
    while (follow := [i for i in range(size) if parents[i] == node and tokens[i] == says[0, node]]) != []:
        want.append(node := follow[0])
    assert path[0].tolist() == want + [-1] * (size - len(want))
    assert int(count) == len(want) - 1
    assert predicts[want].tolist() == says[0, want].tolist()


def test_sampled_tokens_are_the_models() -> None:
    """Over many draws, the first token after the root follows the model's distribution, whatever was drafted."""
    parents, tokens = [-1, 0, 0, 1], [9, 3, 1, 2]
    probs = torch.tensor([0.1, 0.2, 0.05, 0.4, 0.25])
    random = torch.Generator().manual_seed(3)
    _, index, child, sibling = links([parents], [0])
    counts, draws = torch.zeros(5), 6000
    for _ in range(draws):
        predicts, path, count = torch.full((4,), -1), torch.full((1, 4), -1), torch.empty(1, dtype=torch.int64)
        speculation.verify_sampled(
            predicts=predicts, accept_index=path, accept_token_num=count, candidates=torch.tensor([tokens]),
            retrive_index=index, retrive_next_token=child, retrive_next_sibling=sibling,
            uniform_samples=torch.rand(1, 4, generator=random),
            uniform_samples_for_final_sampling=torch.rand(1, generator=random),
            target_probs=probs.expand(1, 4, 5).clone(), draft_probs=torch.zeros(1, 4, 5),
            threshold_single=1.0, threshold_acc=1.0,
        )  # fmt: skip
        counts[predicts[0]] += 1
        if path[0, 1] == 1 and path[0, 2] != -1:
            assert path[0, 2] == 3 and predicts[1] == 2
        else:
            assert int(count) == (path[0, 1] != -1)
    torch.testing.assert_close(counts / draws, probs, atol=0.03, rtol=0)


def test_renormalised_probabilities() -> None:
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.3, 0.2]])
    want = torch.tensor([[0.0, 0.4, 0.0, 0.3], [0.0, 0.0, 0.3, 0.0]])
    torch.testing.assert_close(speculation.top_k_renorm(probs, torch.tensor([2, 1])), want / want.sum(-1, keepdim=True))
    want = torch.tensor([[0.0, 0.4, 0.0, 0.3], [0.25, 0.25, 0.3, 0.2]])
    torch.testing.assert_close(
        speculation.top_p_renorm(probs, torch.tensor([0.6, 1.0])), want / want.sum(-1, keepdim=True)
    )
    assert torch.equal(speculation.top_k_renorm(probs, torch.tensor([1 << 30, 4])), probs / probs.sum(-1, keepdim=True))


def test_slots_go_into_the_table_and_come_out() -> None:
    table = torch.zeros(4, 64, dtype=torch.int32)
    rows, starts = torch.tensor([3, 1]), torch.tensor([10, 16])
    speculation.assign_slots(None, rows, table, starts, torch.tensor([13, 21]), torch.arange(100, 108), 2)  # type: ignore[arg-type]
    assert table[3, 9:14].tolist() == [0, 100, 101, 102, 0] and table[1, 16:21].tolist() == list(range(103, 108))
    found = speculation.cache_locs(
        req_pool_indices=rows, req_to_token=table, start_offset=torch.tensor([11, 17]), draft_token_num=2, device="cpu"
    )
    assert found.tolist() == [101, 102, 104, 105] and found.dtype == torch.int64


@isas
@dtypes
@few
@given(
    parents=parents_of, seed=seeds, D=st.sampled_from([32, 48, 64, 128, 256]), G=st.integers(1, 4),
    before=st.integers(0, 300), window=st.sampled_from([NO_WINDOW, 64, 65, 100]), part=st.integers(0, 63),
    cap=st.sampled_from([0.0, 5.0]),
)  # fmt: skip
def test_extend_by_a_tree(
    isa: str, dtype: torch.dtype, parents: list[int], seed: int, D: int, G: int, before: int, window: int, part: int,
    cap: float,
) -> None:  # fmt: skip
    """The kernel, for the nodes from one on: each sees its ancestors, and its window of the tokens before the tree."""
    T = len(parents)
    skip = part % T
    torch.manual_seed(seed)
    n = -(-(before + T) // 16)
    tiles, q = random_tiles(24, D, dtype), torch.randn(T, G, D).to(dtype)
    pages = torch.randperm(24)[:n].to(torch.int32)
    tree = bits_of(parents)[skip:].contiguous()
    o, lse = torch.full((T - skip, G, D), NAN), torch.full((T - skip, G), NAN)
    k("extend_tree")(isa, q[skip:], D**-0.5, cap, tiles, pages, before + T, before + skip, window, tree, before, o, lse)
    keys, values = (tiles[pages.long(), i].double().flatten(0, 1) for i in (0, 1))
    for t in range(skip, T):
        path = sorted(lineage(parents, t))
        seen = [*range(max(before + len(path) - window, 0), before), *(before + node for node in path)]
        scores = reference.capped(torch.einsum("gd,kd->gk", q[t].double(), keys[seen]) * D**-0.5, cap)
        assert close(o[t - skip], scores.softmax(-1) @ values[seen], dtype)
        check_lse(lse[t - skip], scores.logsumexp(-1), dtype)


class Draft:
    """Requests in a pool with canary, whose drafts are verified; the fields of SGLang's batch that the move reads."""

    def __init__(self, lengths: list[int], workers: int = 2) -> None:
        shape = KVShape(2, 2, 32, torch.float32, sketched=True)
        self.pool = HostPool(shape, 2048, Placement(32, 48), Workers(workers), canary=1.0)
        self.random = torch.Generator().manual_seed(sum(lengths))
        free = (torch.randperm(120, generator=self.random) + 1).tolist()
        self.pages = torch.tensor([[free.pop() for _ in range(30)] for _ in lengths], dtype=torch.int32)
        self.table = torch.zeros(len(lengths) + 1, 480, dtype=torch.int32)
        self.table[1:] = (self.pages[:, :, None] * 16 + torch.arange(16, dtype=torch.int32)).flatten(1)
        self.lengths = lengths
        self.kv = [[torch.randn(2, n, 2, 32, generator=self.random) for _ in range(2)] for n in lengths]
        for b, of in enumerate(self.kv):
            for layer, (keys, values) in enumerate(of):
                self.pool.append(layer, self.pages[b], 0, keys, values)

    def verify(self, trees: list[list[int]], window: int | None = None) -> None:
        """Append a draft of every request and attend to it; then accept the path to the last node, and move it."""
        size, paths = len(trees[0]), [sorted(lineage(parents, len(parents) - 1)) for parents in trees]
        for b, (parents, path) in enumerate(zip(trees, paths, strict=True)):
            start = self.lengths[b]
            for layer in range(2):
                k, v = torch.randn(2, size, 2, 32, generator=self.random)
                q = torch.randn(size, 4, 32, generator=self.random)
                out = torch.full_like(q, NAN)
                self.pool.append(layer, self.pages[b], start, k, v)
                self.pool.attend_chunk(layer, self.pages[b], start, q, 0.2, out, window=window, tree=bits_of(parents))
                old_k, old_v = self.kv[b][layer]
                for t in range(size):
                    own = sorted(lineage(parents, t))
                    first = max(start + len(own) - (window or 1 << 30), 0)
                    keys, values = torch.cat([old_k[first:], k[own]]), torch.cat([old_v[first:], v[own]])
                    for head in range(4):
                        want, _ = attention(q[t, head], keys[:, head // 2], values[:, head // 2], 0.2)
                        torch.testing.assert_close(out[t, head].double(), want, atol=2e-5, rtol=1e-4)
                self.kv[b][layer] = torch.stack([torch.cat([old_k, k[path]]), torch.cat([old_v, v[path]])])
        index = torch.full((len(trees), size), -1)
        for b, path in enumerate(paths):
            index[b, : len(path)] = torch.tensor(path) + b * size
        batch: Any = SimpleNamespace(
            seq_lens=torch.tensor(self.lengths), req_pool_indices=torch.arange(len(trees)) + 1,
            out_cache_loc=torch.empty(len(trees) * size), req_to_token_pool=SimpleNamespace(req_to_token=self.table),
        )  # fmt: skip
        allocator = SimpleNamespace(get_kvcache=lambda: SimpleNamespace(host=self.pool))
        speculation.move_accepted(None, batch, index, torch.tensor([len(path) - 1 for path in paths]), allocator)  # type: ignore[arg-type]
        self.lengths = [n + len(path) for n, path in zip(self.lengths, paths, strict=True)]

    def check(self) -> None:
        """KV, metadata, moments and sketches of all accepted tokens equal those of a pool that got them at once."""
        plain = HostPool(KVShape(2, 2, 32, torch.float32, sketched=True), 2048, Placement(32, 48), Workers(1))
        for b, n in enumerate(self.lengths):
            for layer in range(2):
                keys, values = self.kv[b][layer]
                plain.append(layer, self.pages[b], 0, keys, values)
                full = self.pages[b, : n // 16].long()
                for name in ("tiles", "meta0", "moments", "sketches"):
                    ours, theirs = (pool.tensor(name, layer)[:, full] for pool in (self.pool, plain))
                    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-12)
                got = self.pool.gather(layer, self.pages[b])
                assert torch.equal(got[0][:, :n].transpose(0, 1), keys)
                assert torch.equal(got[1][:, :n].transpose(0, 1), values)
                for level in range(1, 4):
                    for last in range((1 << level) - 1, n // 16, 1 << level):
                        page = int(self.pages[b, last])
                        if int(self.pool.tensor(f"tag{level}", layer)[page >> level]) != page:
                            continue  # another block has its entry
                        first = max(last + 1 - (1 << level), 2)
                        if last < 2:
                            continue
                        pages = plain.tensor("meta0", layer)[:, self.pages[b, first : last + 1].long()]
                        low, high = pages.amin(1)[:, 0], pages.amax(1)[:, 1]
                        entry = self.pool.tensor(f"meta{level}", layer)[:, page >> level]
                        assert torch.equal(entry, torch.stack([low, high], dim=1))
        checked, found = self.pool.sweep()
        assert checked > 0 and not found


class Moved:
    """Two requests; each accepted the nodes 0, 2 and 5 of a draft of 6 tokens."""

    PATH = (0, 2, 5)

    def __init__(self, dtype: torch.dtype, int8: bool) -> None:
        self.pool = HostPool(KVShape(2, 2, 32, dtype, int8), 640, Placement(32, 48), Workers(1), canary=1.0)
        self.starts, self.pages = [30, 45], torch.arange(1, 9, dtype=torch.int32).view(2, 4)
        for b, start in enumerate(self.starts):
            for layer in range(2):
                k, v = torch.randn(2, start + 6, 2, 32).to(dtype)
                self.pool.append(layer, self.pages[b], 0, k, v)
        self.requests = [SimpleNamespace(to_finish=None, skip_radix_cache_insert=False) for _ in self.starts]

    def tokens(self, b: int, positions: Sequence[int]) -> list[torch.Tensor]:
        """Keys and values of all layers."""
        found = [of for layer in range(2) for of in self.pool.gather(layer, self.pages[b])]
        return [of[:, [self.starts[b] + i for i in positions]] for of in found]

    def move(self) -> None:
        table = torch.zeros(3, 64, dtype=torch.int32)
        table[1:] = (self.pages[:, :, None] * 16 + torch.arange(16, dtype=torch.int32)).flatten(1)
        batch: Any = SimpleNamespace(
            seq_lens=torch.tensor(self.starts), req_pool_indices=torch.tensor([1, 2]), out_cache_loc=torch.empty(12),
            req_to_token_pool=SimpleNamespace(req_to_token=table), reqs=self.requests,
        )  # fmt: skip
        index = torch.tensor([[number + 6 * b for number in self.PATH] for b in range(2)])
        allocator = SimpleNamespace(get_kvcache=lambda: SimpleNamespace(host=self.pool))
        speculation.move_accepted(None, batch, index, torch.tensor([2, 2]), allocator)  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "int8"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_accepted_tokens_are_moved_as_they_are_stored(dtype: torch.dtype, int8: bool) -> None:
    moved = Moved(dtype, int8)
    want = [moved.tokens(b, moved.PATH) for b in range(2)]
    moved.move()
    for b in range(2):
        for got, was in zip(moved.tokens(b, range(3)), want[b], strict=True):
            assert torch.equal(got, was)
    assert moved.pool.sweep()[1] == [] and all(request.to_finish is None for request in moved.requests)


def test_a_request_whose_tokens_cannot_be_moved_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = Moved(torch.float32, False)
    want, append = moved.tokens(0, moved.PATH), moved.pool.append

    def fails(layer: int, pages: torch.Tensor, *args: Any) -> None:
        if pages[0] == moved.pages[1, 0]:
            raise RuntimeError("it is not what was written")
        append(layer, pages, *args)

    monkeypatch.setattr(moved.pool, "append", fails)
    moved.move()
    assert all(torch.equal(got, was) for got, was in zip(moved.tokens(0, range(3)), want, strict=True))
    good, bad = moved.requests
    assert good.to_finish is None and bad.to_finish.status_code == 500 and bad.skip_radix_cache_insert
    assert "could not be moved: it is not what was written" in bad.to_finish.message


@settings(max_examples=examples(15), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=3),
    size=st.integers(1, 20),
    rounds=st.integers(1, 6),
    window=st.sampled_from([None, 20, 33]),
    seed=seeds,
)
def test_drafts_come_and_go(lengths: list[int], size: int, rounds: int, window: int | None, seed: int) -> None:
    """Drafts fill pages round after round; data derived from these pages covers the accepted tokens only."""
    random = torch.Generator().manual_seed(seed)
    draft = Draft(lengths)
    for _ in range(rounds):
        draft.verify(
            [[-1] + [int(torch.randint(i + 1, (1,), generator=random)) for i in range(size - 1)] for _ in lengths],
            window,
        )
    draft.check()


def test_trees_that_cannot_be_are_refused() -> None:
    draft = Draft([40])
    q, out = torch.randn(65, 4, 32), torch.full((65, 4, 32), NAN)

    def attend(tree: Tensor, window: int | None = None) -> None:
        draft.pool.attend_chunk(0, draft.pages[0], 40, q[: len(tree)], 0.1, out[: len(tree)], window=window, tree=tree)

    with pytest.raises(ValueError, match="may have 64"):
        attend(torch.ones(65, dtype=torch.int64))
    with pytest.raises(ValueError, match="may have 3"):
        attend(torch.tensor([1, 3, 7, 15]), window=3)
    for tree in ([1, 1], [1, 6], [2], [1, 3, 3]):
        with pytest.raises(ValueError, match="must attend to itself and to no later one"):
            attend(torch.tensor(tree))
    assert out.isnan().all()
