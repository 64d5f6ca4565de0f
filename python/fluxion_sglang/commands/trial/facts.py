"""Facts about a model from its files alone; for a name on the Hub, only the configuration is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from fluxion_sglang.commands.named_model import folder_of
from fluxion_sglang.commands.trial.results import Fit, ModelFacts, TrialError
from fluxion_sglang.scoring.model_files import weights

_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}


def read(name: str, trust: bool = False) -> ModelFacts:
    """Read a model's configuration.

    Args:
        name: a folder, a GGUF file, or a name on the Hub.
        trust: whether code of the model may run (`--trust-remote-code`).

    Raises:
        TrialError: it is no language model.
    """
    try:
        folder = folder_of(name)
    except ValueError as error:
        raise TrialError(str(error)) from None
    config = _config(str(folder or name), name, trust)
    found = folder or _cached(name)
    whole, config = config, config.get_text_config()
    try:
        heads, layers = int(config.num_attention_heads), int(config.num_hidden_layers)
        latent = getattr(config, "kv_lora_rank", None)  # keys are not stored by head
        return ModelFacts(
            name=name,
            folder=None if found is None else str(found),
            architecture=str((whole.architectures or ["unknown"])[0]),
            dtype=str(getattr(config, "dtype", None) or "unknown").removeprefix("torch."),
            layers=layers,
            heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=None if latent else int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            positions=int(getattr(config, "max_position_embeddings", None) or config.n_positions),
            vocabulary=int(config.vocab_size),
            weights_bytes=sum(file.stat().st_size for file in weights(found)) or None if found else None,
            predictor=found is not None and (found / "fluxion" / "predictor.json").is_file(),
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise TrialError(
            f"The configuration of {name} does not describe a language model ({error}); give a model that generates "
            "text."
        ) from None


def fit(facts: ModelFacts, dtype: str, on_cpu: bool, int8: bool = False, sketched: bool = False) -> Fit | None:
    """Number of tokens that this machine holds; None if the model does not store a key for each KV head.

    Args:
        dtype: bfloat16 or float32, as served.
        on_cpu: whether the weights are in host memory, too.
        int8: whether the host pool stores KV in 8 bits.
        sketched: whether it has sketches of keys.
    """
    if facts.head_dim is None:
        return None
    import torch

    from fluxion_sglang import native
    from fluxion_sglang.config import ConfigError, FluxionConfig
    from fluxion_sglang.kv.host_pool import KVShape
    from fluxion_sglang.sglang.memory.capacity import EXPLICIT_FRACTION, plan_tokens

    available = int(native.topology()["available_bytes"])
    if on_cpu and facts.weights_bytes is not None:
        # Weights take twice their file size if 16-bit files are served in float32.
        available -= facts.weights_bytes * _BYTES[dtype] // _BYTES.get(facts.dtype, _BYTES[dtype])
    shape = KVShape(facts.layers, facts.kv_heads, facts.head_dim, getattr(torch, dtype), int8, sketched)
    kv_bytes = facts.layers * shape.token_bytes
    page = shape.pool_bytes(1 << 16) // (1 << 16)
    try:
        tokens = plan_tokens(FluxionConfig(), shape, max(available, 0))
    except ConfigError as error:
        return Fit(max(available, 0), kv_bytes, page, 0, 0, 0, str(error))
    most = int(available * EXPLICIT_FRACTION) // page // 16 * 16
    return Fit(available, kv_bytes, page, tokens, max(most, tokens), min(tokens, facts.positions))


def _config(path: str, name: str, trust: bool) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust)
    except Exception as error:  # transformers raises many types for bad files
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise TrialError(
            f"The configuration of {name} cannot be read: {reason.rstrip('.')}; give the folder of a model, or a name "
            "on the Hub that this machine can reach or has cached."
        ) from None


def _cached(name: str) -> Path | None:
    """The folder of a Hub model that was downloaded with its weights, or None."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except Exception:  # any part may be missing
        return None
    return folder if weights(folder) else None
