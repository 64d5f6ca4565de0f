"""An untrained predictor for `tiny_model` that behaves like a trained one: it uses all features and decides anew for
every step and head. Some heads stream, the others have budgets, and groups differ in block size."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import LlamaForCausalLM

from fluxion_sglang.config import FluxionConfig
from fluxion_sglang.kv.host_pool import SPREAD
from fluxion_sglang.predictor.artifact import Identity, LoadedPredictor
from fluxion_sglang.predictor.features import NAMES
from fluxion_sglang.predictor.network import HeadPredictor
from fluxion_sglang.sglang.requests.predictors import fingerprint, norms
from fluxion_sglang.training import artifact_writer

TAU, THRESHOLD = 0.1, 0.6
TYPICAL = {
    "layer": (0.5, 0.5), "head": (1.5, 1.1), "cpu_tokens": (6.2, 0.3), "gpu_tokens": (5.8, 0.02),
    "sink_k_norm": (7.7, 0.2), "sink_v_norm": (7.6, 0.1), "mean_k_norm": (0.7, 0.3), "mean_v_norm": (1.1, 0.6),
    "k_norm_mean": (7.6, 0.1), "k_norm_var": (0.9, 0.1), "k_norm_skew": (0.0, 0.2), "k_norm_kurt": (2.9, 0.2),
    "v_norm_mean": (7.6, 0.1), "v_norm_var": (0.9, 0.1), "v_norm_skew": (0.1, 0.1), "v_norm_kurt": (2.8, 0.3),
    "q_mean_k": (0.0, 0.03), "z_mean": (0.0, 0.02), "z_var": (0.06, 0.006), "z_skew": (0.0, 0.1), "z_kurt": (3.0, 0.4),
    "lse_sink": (5.7, 0.7), "lse_cpu": (7.8, 0.5), "lse_local": (7.2, 0.5),
    "anchor_lse_sink": (5.7, 0.6), "anchor_lse_cpu": (7.8, 0.5), "anchor_lse_local": (7.2, 0.4),
    "o_sink_norm": (3.1, 1.0), "o_local_norm": (2.3, 0.8), "anchor_o_sink_norm": (3.1, 0.9),
    "anchor_o_cpu_norm": (2.1, 0.8), "anchor_o_local_norm": (2.1, 0.5),
    "q_norm": (7.6, 0.9), "anchor_q_norm": (7.6, 0.8), "q_cosine": (0.0, 0.2),
    "anchor_budget_16": (0.7, 0.1), "anchor_budget_32": (0.7, 0.1), "anchor_budget_64": (0.8, 0.1),
    "anchor_budget_128": (0.9, 0.1), "o_resident_max": (2.9, 0.9), "anchor_o_resident_max": (2.5, 0.4),
}  # fmt: skip
"""Mean and standard deviation of every feature for prompts of a thousand random tokens in the tiny model."""


def predictor(tau: float | None = None) -> LoadedPredictor:
    """The predictor, without a file."""
    network = HeadPredictor()
    mean, std = zip(*(TYPICAL[name] for name in NAMES), strict=True)
    network.mean.copy_(torch.tensor(mean))
    network.std.copy_(torch.tensor(std))
    *hidden, last = network.layers
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(2)
        for layer in hidden:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            layer.bias.zero_()
        nn.init.orthogonal_(last.weight)
        # bgt0, k and the streaming logit: scales of their variation over heads and steps, and their centers.
        last.weight.mul_(torch.tensor([[0.1], [0.02], [1.0]]))
        last.bias.copy_(torch.tensor([0.2, 0.01, 0.0]))
        margins = 0.75 + torch.arange(2 * 4 * 4).view(2, 4, 4) % 3 / 4  # of layers and heads
    return LoadedPredictor(network.eval().requires_grad_(False), TAU, THRESHOLD, margins, {})


def build(folder: Path, model: str) -> str:
    """Write the predictor to `folder`, for the model in the folder `model` and a server's default options."""
    served, options, found = LlamaForCausalLM.from_pretrained(model), FluxionConfig(), predictor()
    config = served.config
    identity = Identity(
        architecture=type(served).__name__, layers=config.num_hidden_layers, q_heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads, head_dim=config.head_dim, hidden_size=config.hidden_size,
        vocab_size=config.vocab_size, rope_theta=config.rope_parameters["rope_theta"],
        weights=fingerprint(norms(served)), sinks=options.sinks, window=options.window, spread=SPREAD,
    )  # fmt: skip
    trained = {TAU: artifact_writer.Trained(found.network, found.threshold, found.margins, found.metrics)}
    artifact_writer.save(folder, trained, identity=identity, features=NAMES, calibrated=TAU)
    return str(folder)
