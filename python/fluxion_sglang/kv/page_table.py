"""The page lists of a batch, gathered from SGLang's request table once per forward pass.

They must not be kept between passes. After a prefill, SGLang rebinds a request's row to the radix tree's canonical
pages and frees the duplicates, so an old list may name pages of another request.
"""

from __future__ import annotations

import torch

from fluxion_sglang.kv.placement import PAGE


def page_table(req_to_token: torch.Tensor, rows: torch.Tensor, max_tokens: int) -> torch.Tensor:
    """Physical page ids of each request, by logical page.

    Args:
        req_to_token: SGLang's request table [R, max_context] int32: slot id of every position. With page size 16 the
            slots of a logical page are 16*page .. 16*page+15, so the first slot names the page.
        rows: [B] int64, rows of the batch's requests.
        max_tokens: the longest request of the batch, in tokens.

    Returns:
        [B, ceil(max_tokens / 16)] int32 on the CPU, contiguous. Entries past a request's own length are meaningless.
    """
    firsts = req_to_token[:, :max_tokens:PAGE].index_select(0, rows)
    return torch.div(firsts, PAGE, rounding_mode="floor").to("cpu", torch.int32).contiguous()
