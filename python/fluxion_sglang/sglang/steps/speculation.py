"""NGRAM speculative decoding on the CPU: SGLang's worker, with PyTorch code in place of GPU kernels.

SGLang drafts from an n-gram cache and verifies the drafts of a batch in one pass of the model, as a tree of tokens per
request. `backend` computes their attention. This module has the other functions that the worker calls: KV slots, the
walk through a tree, and the move of accepted tokens' KV to the positions of the next pass.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from http import HTTPStatus
from types import ModuleType
from typing import Any

import torch

from fluxion_sglang.kv.page_table import page_table
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.sglang import compat, hooking
from fluxion_sglang.sglang.containment.ending import end_request
from fluxion_sglang.sglang.start.validation import NGRAM

logger = logging.getLogger(__name__)


def worker_class(algorithm: str) -> type | None:
    """SGLang's own worker, made importable and callable here; None for another algorithm.

    Raises:
        CompatError: a name to replace does not exist.
    """
    if algorithm != NGRAM:
        return None
    # SGLang's module needs libcuda at import.
    stand_in = ModuleType(compat.TREE_MODULE)
    stand_in.reconstruct_indices_from_tree_mask_func = tree_links  # type: ignore[attr-defined]
    sys.modules.setdefault(compat.TREE_MODULE, stand_in)
    compat.check(compat.NGRAM_NEEDS)
    hooking.put_in(HOOKS)
    hooking.assert_applied(HOOKS)
    sampling: Any = importlib.import_module(compat.NGRAM_SAMPLING)
    for name, function in SAMPLING.items():  # SGLang has None on platforms without a kernel
        setattr(sampling, name, function)
    worker: Any = importlib.import_module(compat.NGRAM_WORKER)
    worker.USE_FULL_MASK = False  # the mask covers only the draft, not the tokens before it
    worker_type: type = worker.NGRAMWorker
    return worker_type


def tree_bits(mask: torch.Tensor, requests: int) -> torch.Tensor:
    """The masks [B * T * T] of a pass as the tree argument of `NativePool.attend_chunk`: [B, T] int64."""
    size = round((mask.numel() / requests) ** 0.5)
    weights = torch.ones(size, dtype=torch.int64) << torch.arange(size)
    return (mask.view(requests, size, size).to(torch.int64) * weights).sum(-1)


def tree_links(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Positions and links of the trees' nodes from their masks, like SGLang's reconstruct_indices_from_tree_mask.

    Args (B requests, T nodes each; all but the first two are written):
        tree_mask: [B * T * T] bool: row i has the ancestors of node i and the node itself, parents first.
        verified_seq_len: [B], tokens before the tree.
        positions: [B * T]. retrieve_index: [B, T], indices of the nodes in the batch.
        retrieve_next_token, retrieve_next_sibling: [B, T], first child and next sibling of each node; -1: none.
    """
    size = draft_token_num
    nodes = torch.arange(size)
    ancestors = tree_mask[: batch_size * size * size].view(batch_size, size, size).bool() & (nodes < nodes[:, None])
    positions.view(batch_size, size).copy_(ancestors.sum(-1) + verified_seq_len[:, None])
    retrieve_index.copy_(torch.arange(batch_size * size).view(batch_size, size))
    parents = torch.where(ancestors, nodes, -1).amax(-1)

    def first(found: torch.Tensor) -> torch.Tensor:
        """The first true row of each column [B, rows, columns]; -1: none."""
        rows = torch.where(found, nodes[:, None], size).amin(1)
        return torch.where(rows < size, rows, -1)

    retrieve_next_token.copy_(first(ancestors))
    alike = (parents[:, :, None] == parents[:, None, :]) & (nodes[:, None] > nodes) & (parents >= 0)[:, None, :]
    retrieve_next_sibling.copy_(first(alike))


def cache_locs(
    *, req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, start_offset: torch.Tensor, **other: Any
) -> torch.Tensor:
    """SGLang's slots of the `draft_token_num` positions of each request from `start_offset` on, [B * T] int64."""
    columns = start_offset[:, None] + torch.arange(other["draft_token_num"])
    return req_to_token[req_pool_indices[:, None], columns].flatten().to(torch.int64)


def last_slots(
    original: Callable[..., torch.Tensor],
    req_to_token: torch.Tensor,
    req_pool_indices_tensor: torch.Tensor,
    prefix_lens_tensor: torch.Tensor,
) -> torch.Tensor:
    """AROUND mem_cache.allocation.get_last_loc: the slot of each request's last token; -1 for an empty request."""
    found = req_to_token[req_pool_indices_tensor, (prefix_lens_tensor - 1).clamp(min=0)]
    return torch.where(prefix_lens_tensor > 0, found, -1)


def assign_slots(
    original: Callable[..., None],
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """AROUND mem_cache.allocation.assign_req_to_token_pool_func: write new slots to the request table."""
    taken = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in rows:
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


def verify_greedy(
    original: Callable[..., Any],
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """AROUND spec_tree.verify_tree_greedy_func: accept the path of each tree whose tokens are the model's predictions.

    Args (B trees of T nodes):
        predicts: [B * T], written: the model's token after each accepted node.
        accept_index: [B, depth], written: indices of the accepted nodes. accept_token_num: [B], written: their number
            without the root.
        candidates: [B, T], the nodes' tokens. retrieve_*: as for `tree_links`. target_predict: [B, T].
    """
    trees = _trees(candidates, retrieve_next_token, retrieve_next_sibling)
    for b, (tree, wanted) in enumerate(zip(trees, target_predict.tolist(), strict=True)):
        path = [0]
        while len(path) < accept_index.shape[1]:
            follow = [node for node in tree.children(path[-1]) if tree.tokens[node] == wanted[path[-1]]]
            if not follow:
                break
            path.append(follow[0])
        _accept(b, path, [wanted[node] for node in path], predicts, accept_index, accept_token_num, retrieve_index)
    return predicts, accept_index, accept_token_num


def verify_sampled(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float,
    threshold_acc: float,
    deterministic: bool = True,
) -> None:
    """SGLang's tree_speculative_sampling_target_only: tokens are distributed as if drawn from the model's
    probabilities.

    Args besides those of `verify_greedy`:
        uniform_samples: [B, T], uniform_samples_for_final_sampling: [B]: in [0, 1).
        target_probs: [B, T, V]. draft_probs: [B, T, V] of zeros.
        threshold_single, threshold_acc: a token is always accepted at this probability or above; the siblings'
            cumulative probability is divided by threshold_acc. With 1 and 1 the model's distribution is kept.
    """
    for b, tree in enumerate(_trees(candidates, retrive_next_token, retrive_next_sibling)):
        path, drawn = [0], []
        while True:
            node, coin, mass = path[-1], float(uniform_samples[b, path[-1]]), 0.0
            left = target_probs[b, node].clone()
            accepted = None
            for child in tree.children(node) if len(path) < accept_index.shape[1] else ():
                probability = float(left[tree.tokens[child]])
                mass += probability
                if coin <= mass / threshold_acc or probability >= threshold_single:
                    accepted = child
                    break
                left[tree.tokens[child]] = 0  # refused
            if accepted is None:
                break
            path.append(accepted)
            drawn.append(tree.tokens[accepted])
        sums = left.double().cumsum(0)
        at = float(uniform_samples_for_final_sampling[b]) * float(sums[-1])
        drawn.append(min(int((sums <= at).sum()), len(sums) - 1))
        _accept(b, path, drawn, predicts, accept_index, accept_token_num, retrive_index)


class _Tree:
    """A request's draft: token, first child and next sibling of every node."""

    def __init__(self, tokens: list[int], child: list[int], sibling: list[int]) -> None:
        self.tokens, self._child, self._sibling = tokens, child, sibling

    def children(self, node: int) -> list[int]:
        found, at = [], self._child[node]
        while at >= 0:
            found.append(at)
            at = self._sibling[at]
        return found


def _trees(candidates: torch.Tensor, children: torch.Tensor, siblings: torch.Tensor) -> list[_Tree]:
    return [
        _Tree(*of) for of in zip(candidates.tolist(), children.tolist(), siblings.tolist(), strict=True)
    ]  # fmt: skip


def _accept(
    b: int,
    path: Sequence[int],
    after: Sequence[int],
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    numbers: torch.Tensor,
) -> None:
    """Write the accepted path of request b, and the token after each of its nodes."""
    places = numbers[b, list(path)]
    predicts[places] = torch.tensor(after, dtype=predicts.dtype)
    accept_index[b, : len(path)] = places.to(accept_index.dtype)
    accept_token_num[b] = len(path) - 1


def top_k_renorm(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Probabilities [N, V] of the top_k [N] largest of each row, the others 0, summing to 1."""
    ordered = probs.sort(-1, descending=True).values
    least = ordered.gather(-1, (top_k.long().clamp(1, probs.shape[-1]) - 1)[:, None])
    kept = torch.where(probs >= least, probs, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def top_p_renorm(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """For each row [V], keep the fewest largest probabilities that sum to top_p [N]; the others are 0; the sum is 1."""
    ordered = probs.sort(-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    least = torch.where(before < top_p[:, None], ordered, torch.inf).amin(-1, keepdim=True)
    kept = torch.where(probs >= least, probs, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def move_accepted(
    original: Callable[..., None],
    batch: Any,
    accept_index: torch.Tensor,
    num_correct_drafts: torch.Tensor,
    token_to_kv_pool_allocator: Any,
) -> None:
    """AROUND spec_utils.move_accept_tokens_to_target_kvcache: move accepted nodes' KV to the front of the draft's.

    It is appended there, so the metadata of every filled page covers only accepted tokens. If that fails for a request,
    the request is ended, and the others continue.

    Args:
        accept_index: [B, depth], indices of the accepted nodes in the batch. num_correct_drafts: [B], their number
            without the root.
    """
    pool = token_to_kv_pool_allocator.get_kvcache().host
    starts, rows = batch.seq_lens.tolist(), batch.req_pool_indices
    size = batch.out_cache_loc.numel() // len(starts)
    pages = None
    for b, (start, path, count) in enumerate(
        zip(starts, accept_index.tolist(), num_correct_drafts.tolist(), strict=True)
    ):
        nodes = [number - b * size for number in path[: count + 1]]
        still = next((i for i, node in enumerate(nodes) if node != i), len(nodes))
        if still == len(nodes):
            continue
        if pages is None:
            pages = page_table(batch.req_to_token_pool.req_to_token, rows, max(starts) + size)
        first = start // PAGE
        moved = start - first * PAGE + torch.tensor(nodes[still:])
        drafted = pages[b, first : (start + size - 1) // PAGE + 1]
        try:
            for layer in range(pool.shape.layers):
                # `gather` copies, [T, H, D], because sources and targets may overlap.
                k, v = (of[:, moved].transpose(0, 1) for of in pool.gather(layer, drafted))
                pool.append(layer, pages[b], start + still, k, v)
        except Exception as error:
            logger.exception("Fluxion: KV of accepted tokens could not be moved, and the request is ended")
            reason = f"KV of accepted tokens could not be moved: {error}"
            end_request(batch.reqs[b], reason, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")


HOOKS: dict[compat.Need, Callable[..., Any]] = {
    compat.LAST_SLOT: last_slots,
    compat.ASSIGN_SLOTS: assign_slots,
    compat.VERIFY_GREEDY: verify_greedy,
    compat.MOVE_ACCEPTED: move_accepted,
}
SAMPLING = {
    "tree_speculative_sampling_target_only": verify_sampled,
    "top_k_renorm_prob": top_k_renorm,
    "top_p_renorm_prob": top_p_renorm,
}
