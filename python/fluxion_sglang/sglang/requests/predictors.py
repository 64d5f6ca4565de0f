"""Finds a server's predictor: the one that the option `predictor` names, the one in the model's folder, or none."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from sglang.srt.runtime_context import get_parallel

from fluxion_sglang.config import ConfigError, FluxionConfig
from fluxion_sglang.kv.host_pool import SPREAD
from fluxion_sglang.policy import AUTO, Context, Policy, parse_spec
from fluxion_sglang.predictor.artifact import JSON_NAME, DoesNotFit, Identity, LoadedPredictor, load, tau_key
from fluxion_sglang.predictor.features import NAMES

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

FOLDER = "fluxion"
"""The predictor's folder inside a model's folder."""


def identity(options: FluxionConfig, runner: ModelRunner) -> Identity:
    """The identity that a predictor must have to fit this server. A collective of the pipeline's stages."""
    config = runner.model_config
    text = config.hf_text_config
    rope = getattr(text, "rope_parameters", None) or {}
    return Identity(
        architecture=str((config.hf_config.architectures or ["unknown"])[0]),
        layers=int(config.num_hidden_layers),
        q_heads=int(config.num_attention_heads),
        kv_heads=int(config.get_total_num_kv_heads()),
        head_dim=int(config.head_dim),
        hidden_size=int(config.hidden_size),
        vocab_size=int(config.vocab_size),
        rope_theta=float(rope.get("rope_theta") or getattr(text, "rope_theta", 0.0) or 0.0),
        weights=fingerprint(_of_all_stages(norms(runner.model))),
        sinks=options.sinks,
        window=options.window,
        spread=SPREAD,
    )


def norms(model: torch.nn.Module) -> dict[str, bytes]:
    """The norm weights of this process's layers, rounded to bfloat16, by name.

    They identify a model: training changes them all, every tensor-parallel rank has them whole, and casts and quantised
    matrices keep them. Norms of queries and keys are left out, because some models divide them among ranks.
    """
    return {
        name: weight.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()
        for name, weight in model.named_parameters()
        if "norm" in name and "q_norm" not in name and "k_norm" not in name
    }


def fingerprint(weights: Mapping[str, bytes]) -> str:
    """Fingerprint of a whole model's weights."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name])
    return digest.hexdigest()[:16]


def _of_all_stages(weights: dict[str, bytes]) -> dict[str, bytes]:
    """The weights of every stage of the pipeline; layers have their names in the whole model on each."""
    parallel = get_parallel()
    if parallel.pp_size == 1:
        return weights
    found: list[dict[str, bytes]] = [{}] * parallel.pp_size
    dist.all_gather_object(found, weights, group=parallel.pp_group.cpu_group)
    return {name: weight for stage in found for name, weight in stage.items()}


def context(config: FluxionConfig, runner: ModelRunner) -> Context:
    """The context of specs on this server. Predictors are loaded on first use, each trained tau once.

    A client may write one tau in many ways (0.05, 0.050000001, ...), so the cache is keyed by the trained tau.
    """

    served = cache(partial(identity, config, runner))
    if get_parallel().pp_size > 1:
        served()  # collective: must run now on every stage, because requests reach the stages at different times

    @cache
    def loaded(key: str | None) -> LoadedPredictor:
        folder = folder_of(config, runner)
        if folder is None:
            raise DoesNotFit(
                'Policy "fluxion" needs a predictor that was trained for this model, and none is named or in the '
                f"folder {FOLDER!r} of the model; train one with `fluxion train`, or name it in the option predictor."
            )
        return load(folder, features=NAMES, tau=None if key is None else float(key), expect=served())

    def predictor(tau: float | None) -> LoadedPredictor:
        return loaded(None if tau is None else tau_key(tau))

    return Context(predictor)


def server_policy(config: FluxionConfig, context: Context) -> Policy:
    """The default policy of requests.

    Raises:
        PredictorError: the policy, or the option predictor, needs a predictor that is missing or does not fit; or a
            predictor that fits cannot be loaded.
    """
    if config.policy != AUTO:
        policy = parse_spec(config.policy, context)
        logger.info("Fluxion: policy %s, as --fluxion-config says.", config.policy)
        _say_what_is_unused(config, policy)
        return policy
    try:
        policy = parse_spec("fluxion", context)
    except DoesNotFit as error:
        # An explicitly named predictor must fit; one found in the model's folder need not. But one that fits must load:
        # any other error ends the start.
        if config.predictor is not None:
            raise
        logger.info(
            'Fluxion: policy full, which reads everything and is exact. %s On long contexts {"policy": "sketch"} is '
            "faster and needs no predictor; `fluxion try` measures it on this model.",
            error,
        )
        return parse_spec("full", context)
    logger.info(
        'Fluxion: policy fluxion, tau %.2f, because a predictor fits this model; {"policy": "full"} is exact.',
        policy.criterion.limit,
    )
    return policy


def check_ranks(policy: Policy, config: FluxionConfig, runner: ModelRunner) -> None:
    """Refuse ranks that would decide differently because their machines have different predictors. A collective.

    Raises:
        ConfigError: on every rank, one sentence.
    """
    parallel = get_parallel()
    if parallel.launch_world_size == 1:
        return
    folder = folder_of(config, runner)
    digest = None if folder is None else hashlib.sha256((folder / JSON_NAME).read_bytes()).hexdigest()[:16]
    mine = f"policy {policy.spec}, {'no predictor' if digest is None else f'predictor {digest}'}"
    found = [mine] * parallel.launch_world_size
    dist.all_gather_object(found, mine, group=parallel.world_group.cpu_group)
    for rank, theirs in enumerate(found):
        if theirs != found[0]:
            raise ConfigError(
                f"the ranks of this server would decide differently, because rank 0 has {found[0]} and rank {rank} has "
                f"{theirs}; copy the predictor's folder to every machine, or choose a policy that needs none."
            )


def _say_what_is_unused(config: FluxionConfig, policy: Policy) -> None:
    """Log a warning if the server's policy does not use the option predictor."""
    if config.predictor is not None and not policy.predicts:
        who = "only requests that bring a policy of their own do" if config.request_policies else "nothing here does"
        logger.warning("Fluxion: policy %s does not use the option predictor; %s", config.policy, who)


def folder_of(config: FluxionConfig, runner: Any) -> Path | None:
    """The predictor's folder, or None."""
    folder = Path(runner.server_args.model_path) / FOLDER
    return config.path("predictor") or (folder if (folder / JSON_NAME).is_file() else None)
