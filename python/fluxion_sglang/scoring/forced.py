"""Forced decoding: the true next token at every step, and how probable it was under the policy.

Perplexity from a prefill says nothing about a policy, because prefill is exact. HGCA's measure is taken at decode
steps. SGLang lets a request bring a logit processor. This one notes what the model thought of the next target and
then lets nothing else be sampled.
"""

from __future__ import annotations

import json
from typing import Any, Final

import torch

NOTES: Final = "fluxion_forced"
"""Where a reply's meta_info has the notes: one a step, [log probability of the target, ids, log probabilities]."""


class ForceTokens:
    """What SGLang calls with the logits of the requests that asked for it; see `sglang.srt.sampling`.

    A request's custom_params say `forced` (the targets) and `top` (how many tokens of the distribution to note).
    Runs in SGLang's scheduler process, which must not be ahead of the request's tokens: no overlap schedule.
    """

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """[n, vocabulary] logits of n requests, changed in place."""
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
            # By step, not appended: SGLang samples after every chunk of a prefill and keeps the last chunk's token.
            ids, values = top.indices[i, :count].tolist(), top.values[i, :count].tolist()
            notes[step:] = [[float(logprobs[i, target]), ids, values]]
            request.customized_info = {NOTES: notes}
            logits[i, target] = 0.0
        return logits


def serialized() -> str:
    """`ForceTokens` in the form in which a request carries it."""
    # Imported late: a dependency of SGLang, which alone reads this.
    import dill

    return json.dumps({"callable": dill.dumps(ForceTokens).hex()})
