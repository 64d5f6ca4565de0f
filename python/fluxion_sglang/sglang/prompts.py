"""Requests that are refused in the process that tokenizes: the client gets status 400, and no other one notices.

A prompt without a token, or with one that the vocabulary does not have, SGLang lets through, and the pass that it comes
to ends the scheduler. A policy that is not legal would cost a pass, and the session that it is a turn of its KV.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fluxion_sglang.config import ConfigError
from fluxion_sglang.executor import metrics
from fluxion_sglang.sglang import asked
from fluxion_sglang.sglang.options import options_of


def validate_one_request(
    original: Callable[..., None], manager: Any, obj: Any, input_ids: Sequence[int] | None
) -> None:
    """AROUND TokenizerManager._validate_one_request: SGLang's own checks, then ours.

    Raises:
        ValueError: one sentence for the client.
    """
    original(manager, obj, input_ids)
    _check_policy(manager.server_args, getattr(obj, "sampling_params", None))
    if input_ids is None:  # a prompt of embeddings
        return
    if not len(input_ids):
        session = getattr(obj, "session_params", None)
        # What a session remembers may be the whole prompt; if it remembers nothing, the scheduler says so.
        if not (isinstance(session, dict) and session.get("id")):
            raise ValueError("The prompt has no tokens, and a model has nothing to go on; give at least one token.")
        return
    vocabulary = int(manager.model_config.vocab_size)
    least, most = min(input_ids), max(input_ids)
    if least < 0 or most >= vocabulary:
        raise ValueError(
            f"The prompt has the token {least if least < 0 else most}, but this model has those from 0 to "
            f"{vocabulary - 1}; use the model's own tokenizer."
        )


def _check_policy(server_args: Any, sampling_params: Any) -> None:
    try:
        options = options_of(server_args)
    except ConfigError:  # a file that has changed since the server began; the scheduler's process knows what it said
        return
    try:
        asked.check(sampling_params, options)
    except ValueError:
        if server_args.enable_metrics:
            metrics.count_refused_spec()
        raise
