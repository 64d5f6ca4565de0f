"""Forced decoding: the true next token at every step, and its probability under the policy.

Perplexity of a prefill does not depend on the policy, because prefill is exact. Like HGCA's measure, this one is taken
at decode steps. SGLang lets a request supply a logit processor; this one notes the model's distribution and then allows
only the next target to be sampled.
"""

from __future__ import annotations

import json
from typing import Any, Final

import torch

NOTES: Final = "fluxion_forced"
"""Key of the notes in a reply's meta_info: one a step, [log probability of the target, ids, log probabilities]."""


class ForceTokens:
    """A logit processor that SGLang calls for the requests that name it; see `sglang.srt.sampling`.

    A request's custom_params have `forced` (the targets) and `top` (number of tokens of the distribution to note).
    It runs in SGLang's scheduler process and needs the request's current tokens, so the overlap schedule must be off.
    """

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Change the [n, vocabulary] logits of n requests in place."""
        asked = custom_param_list or []
        # One softmax and one top-k for all rows: with a large vocabulary they dominate the step of a small model.
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        top = torch.topk(logprobs, max((params["top"] for params in asked), default=1))
        logits.fill_(float("-inf"))
        for i, params in enumerate(asked):
            request, count = params["__req__"], params["top"]
            step = len(request.output_ids)
            target = params["forced"][step]
            notes = (request.customized_info or {}).get(NOTES, [])
            # Index by step: SGLang samples after every chunk of a prefill and keeps only the last chunk's token.
            ids, values = top.indices[i, :count].tolist(), top.values[i, :count].tolist()
            notes[step:] = [[float(logprobs[i, target]), ids, values]]
            request.customized_info = {NOTES: notes}
            logits[i, target] = 0.0
        return logits


def serialized() -> str:
    """`ForceTokens` in serialized form for a request."""
    # Imported late, because only SGLang, which depends on it, needs it.
    import dill

    return json.dumps({"callable": dill.dumps(ForceTokens).hex()})
