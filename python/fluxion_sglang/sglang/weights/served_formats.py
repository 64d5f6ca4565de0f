"""Checks from its configuration whether a quantised checkpoint is served on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fluxion_sglang.config import ConfigError

NAMES = ("gptq", "awq", "auto-round", "compressed-tensors", "mxfp4")
"""The `quant_method` of served checkpoints, and the legal --quantization for them."""

FORMATS = "GPTQ, AWQ, AutoRound or compressed-tensors (integers of 4 or 8 bits)"
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def check(quantisation: dict[str, Any], model: dict[str, Any]) -> None:
    """Refuse checkpoints that `quantised_checkpoints.py` does not load.

    Args:
        quantisation: the checkpoint's quantization_config, with a method in `NAMES`. model: its config.json.

    Raises:
        ConfigError: the first reason.
    """
    try:
        why = next(_reasons(quantisation, model), None)
    except (AttributeError, TypeError, ValueError):  # such as a list in place of an object
        why = "its quantization_config is damaged"
    if why is not None:
        raise ConfigError(
            f"--enable-fluxion cannot serve this {quantisation['quant_method']} checkpoint on a CPU, because {why}; "
            f"give it in {FORMATS}, or in bfloat16."
        )


def _reasons(quantisation: dict[str, Any], model: dict[str, Any]) -> Iterator[str]:
    name = quantisation["quant_method"]
    if name == "mxfp4":
        if model.get("model_type") != "gpt_oss":
            yield "weights in MXFP4 are served for gpt-oss alone"
        return
    if any(part.get(key) or 0 for part in (model, model.get("text_config") or {}) for key in _EXPERTS):
        yield "its model has experts, and quantised experts have no kernels yet"
    if name == "compressed-tensors":
        yield from _compressed(quantisation)
    elif name == "awq":
        yield from _numbers(quantisation.get("w_bit", quantisation.get("bits")), [4])
        yield from _group(quantisation.get("q_group_size", quantisation.get("group_size")))
        if (version := str(quantisation.get("version", "gemm")).lower()) != "gemm":
            yield f"its weights are packed for AWQ's {version} kernel (version) and not for gemm"
        if not quantisation.get("zero_point", True):
            yield "its weights have no zeros (zero_point)"
    else:
        packing = quantisation.get("packing_format", "auto_round:auto_gptq")
        layers = [*(quantisation.get("dynamic") or {}).values(), *(quantisation.get("extra_config") or {}).values()]
        for layer in ({}, *layers):
            found = quantisation | layer
            if layer and layer.get("bits", 0) >= 16:
                continue  # these layers are not quantised
            yield from _numbers(found.get("bits"), [4] if packing == "auto_round:auto_awq" else [4, 8])
            yield from _group(found.get("group_size"))
            if found.get("desc_act") and found.get("group_size") != -1 and not found.get("static_groups"):
                yield "it orders inputs by activation (desc_act), so that a group is scattered over the inputs"
        form = quantisation.get("checkpoint_format") or quantisation.get("format") or "gptq"
        form = "marlin" if quantisation.get("is_marlin_format") else form
        if form not in ("gptq", "gptq_v2"):
            yield f"its weights are packed for other kernels ({form})"
        if name == "auto-round" and packing not in ("auto_round:auto_gptq", "auto_round:auto_awq"):
            yield f"its packing_format is {packing} and neither auto_round:auto_gptq nor auto_round:auto_awq"
        if quantisation.get("data_type", "int") != "int":
            yield f"its weights are no integers (data_type {quantisation['data_type']})"


def _compressed(quantisation: dict[str, Any]) -> Iterator[str]:
    sparsity = (quantisation.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        yield f"its weights are sparse ({sparsity})"
    if quantisation.get("kv_cache_scheme"):
        yield "it has scales for a KV cache of fewer bits (kv_cache_scheme)"
    if quantisation.get("linear_fp8_config"):
        yield "some of its weights are float8 (linear_fp8_config)"
    if quantisation.get("transform_config"):
        yield "its weights are transformed (transform_config)"
    for group in (quantisation.get("config_groups") or {}).values():
        weights, activations = group.get("weights") or {}, group.get("input_activations")
        form = group.get("format") or quantisation.get("format")
        bits, kind, strategy = (weights.get(key) for key in ("num_bits", "type", "strategy"))
        if form not in ("pack-quantized", "int-quantized", "naive-quantized"):
            yield f"its format is {form}"
        if kind not in (None, "int"):
            yield f"its weights are no integers ({kind} of {bits} bits)"
        packed = form == "pack-quantized"
        yield from _numbers(bits, [4, 8] if packed else [8])
        if strategy not in (("group", "channel") if packed else ("channel", "tensor")):
            yield f"its weights have a scale by {strategy} in the format {form}"
        if strategy == "group":
            yield from _group(weights.get("group_size"))
        if not packed and not weights.get("symmetric", True):
            yield f"its weights have zeros (symmetric) in the format {form}"
        if weights.get("actorder") in ("group", "dynamic"):
            yield "it orders inputs by activation (actorder), so that a group is scattered over the inputs"
        if activations and (bits, activations.get("num_bits"), activations.get("type", "int")) != (8, 8, "int"):
            yield (
                f"its activations are quantised ({activations.get('type', 'int')} of {activations.get('num_bits')} "
                f"bits with weights of {bits}), which is served for integers of 8 bits with weights of 8 alone"
            )
        if group.get("output_activations"):
            yield "it quantises what layers return (output_activations)"


def _numbers(bits: Any, served: list[int]) -> Iterator[str]:
    if bits not in served:
        yield f"its weights have {bits} bits and the kernels take {' or '.join(map(str, served))}"


def _group(size: Any) -> Iterator[str]:
    if not isinstance(size, int) or (size != -1 and (size <= 0 or size % 32)):
        yield f"{size} inputs share a scale (group_size), which is no multiple of 32 and not -1 (all of them)"
