"""GGUF files on a CPU: hooks in SGLang's loader for them, and methods for its layers.

SGLang has kernels for such files only on GPUs. It also does not undo the changes of llama.cpp's converter to the rows
of queries and keys and to the weights of norms. Here, blocks become packed integers after loading, with no rounding but
that of `weights/ggml.py`. SGLang's own layers hold the embedding and weights that the file does not quantise, in the
model's dtype. If the embedding also makes the logits, its blocks are packed as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.platforms import current_platform
from torch import nn
from torch.nn import functional as F

from fluxion_sglang.config import ConfigError
from fluxion_sglang.sglang.start import gguf_model
from fluxion_sglang.sglang.weights.experts import PackedExpertsMethod, computes_experts, hold_experts
from fluxion_sglang.sglang.weights.methods import PlainConfig, QuantisedMethod, hold
from fluxion_sglang.weights import ggml
from fluxion_sglang.weights.quantised import Quantised, pack, slices

# --- loading ---


@dataclass(frozen=True)
class Blocks:
    """The attribute `ggml` of a tensor of blocks, [outputs, bytes] uint8.

    Attributes:
        kind: number of the blocks' type. inputs: of the weight.
    """

    kind: int
    inputs: int


def _is_ours() -> bool:
    return bool(current_platform.is_out_of_tree() and current_platform.device_type == "cpu")


def get_gguf_weights_map(original: Callable[..., Any], loader: Any, model_config: Any) -> Any:
    """AROUND GGUFModelLoader._get_gguf_weights_map: names from the header; SGLang builds a second model."""
    if not _is_ours():
        return original(loader, model_config)
    names = gguf_model.names_of(ggml.read_header(Path(model_config.model_path)))
    return names | {gguf_model.HEAD: "lm_head.weight"}


def get_gguf_extra_tensor_names(original: Callable[..., Any], gguf_file: str, gguf_to_hf_name_map: Any) -> Any:
    """The names that the file lacks, read from the header; SGLang reads the whole vocabulary to find them."""
    if not _is_ours():
        return original(gguf_file, gguf_to_hf_name_map)
    found = ggml.read_header(Path(gguf_file)).tensors
    return [ours for name, ours in gguf_to_hf_name_map.items() if name not in found]


def get_weights_iterator(original: Callable[..., Any], loader: Any, path: str, names: dict[str, str]) -> Any:
    return _weights(ggml.read_header(Path(path)), names) if _is_ours() else original(loader, path, names)


def _weights(header: ggml.Header, names: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name in filter(names.__contains__, header.tensors):
        loaded = _loaded(header, name)
        if name == gguf_model.EMBEDDING or name.endswith(gguf_model.ROUTER):
            # For layers of SGLang or PyTorch. SGLang loads weights with the model's dtype as PyTorch's default.
            loaded = _wide(loaded, torch.get_default_dtype())
        yield names[name], loaded


def _loaded(header: ggml.Header, name: str) -> torch.Tensor:
    loaded, tensor = gguf_model.load(header, name), header.tensors[name]
    if tensor.kind in ggml.KINDS:
        loaded.ggml = Blocks(tensor.kind, tensor.shape[-1])  # type: ignore[attr-defined]
    return loaded


def load_model(original: Callable[..., Any], loader: Any, *, model_config: Any, device_config: Any) -> Any:
    """Also pack the embedding's blocks if it makes the logits."""
    model = original(loader, model_config=model_config, device_config=device_config)
    if _is_ours() and gguf_model.is_tied(header := ggml.read_header(Path(model_config.model_path))):
        blocks = _loaded(header, gguf_model.EMBEDDING)
        if hasattr(blocks, "ggml"):
            embedding = model.get_submodule("model.embed_tokens")
            _hold(embedding, [blocks])
            embedding.quant_method = GgufHeadMethod()
    return model


# --- layers ---


class GgufConfig(PlainConfig):
    """SGLang's configuration class of the format."""

    def get_name(self) -> str:
        return "gguf"

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, LinearBase):
            return GgufLinearMethod()
        if isinstance(layer, FusedMoE):
            return GgufExpertsMethod(layer.use_triton_kernels)
        return GgufHeadMethod() if isinstance(layer, ParallelLMHead) else None


class _Shards:
    """A weight loader that keeps the shards of a weight, as blocks or plain tensors, by SGLang's names for them.

    A tensor that is loaded for the first expert has the weights of all experts.
    """

    def __init__(self) -> None:
        self._found: dict[Any, torch.Tensor] = {}

    def __call__(
        self, param: nn.Parameter, loaded: torch.Tensor, shard: Any = None, shard_id: Any = None, expert_id: int = 0
    ) -> None:
        self._found[shard_id or shard] = loaded

    def in_order(self, outputs: Sequence[int], inputs: int) -> list[torch.Tensor]:
        """The shards in the order of the layer's outputs. Raises ConfigError if their shapes differ."""
        found = [self._found[shard] for shard in sorted(self._found, key=lambda name: _ORDER.get(name, name))]
        shapes, wanted = [_shape(shard) for shard in found], [[each, inputs] for each in outputs]
        if shapes != wanted:
            raise ConfigError(
                f"--enable-fluxion cannot serve this GGUF file, because it has {shapes} outputs and inputs for a layer "
                f"that has {wanted}, so the config.json beside it is of another model; remove it, or put the right one "
                "there."
            )
        return found


def _shape(stored: torch.Tensor) -> list[int]:
    """Outputs and inputs of a shard."""
    blocks: Blocks | None = getattr(stored, "ggml", None)
    return [*stored.shape] if blocks is None else [len(stored), blocks.inputs]


_ORDER: dict[Any, int] = {"q": 0, "k": 1, "v": 2, None: 0, "w1": 0, "w3": 1, "w2": 0}


class GgufLinearMethod(QuantisedMethod):
    """Keeps the blocks of a layer as they are loaded, and packs them when all are loaded."""

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        layer.gguf_outputs = output_partition_sizes  # type: ignore[assignment]
        layer.weight = _weight(torch.empty(0, input_size, dtype=params_dtype), _Shards())

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if (found := _take(layer, layer.gguf_outputs)) is None:
            return
        if all(hasattr(shard, "ggml") for shard in found):
            _hold(layer, found)
        else:
            assert isinstance(layer.weight, torch.Tensor)
            _be_dense(layer, torch.cat([_wide(shard, layer.weight.dtype) for shard in found]))
            layer.quant_method = UnquantizedLinearMethod()


class GgufHeadMethod(GgufLinearMethod):
    """The method of the layer that makes logits. If it is also the embedding, its `weight` serves the look-ups."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        assert isinstance(layer, ParallelLMHead)
        if (found := _take(layer, [layer.org_vocab_size])) is None:
            return
        if hasattr(found[0], "ggml"):
            _hold(layer, found)
        else:
            rows = layer.num_embeddings_per_partition - len(found[0])
            _be_dense(layer, F.pad(_wide(found[0], layer.weight.dtype), (0, 0, 0, rows)))
            layer.quant_method = UnquantizedEmbeddingMethod()

    def embedding(self, layer: nn.Module, input_: torch.Tensor) -> torch.Tensor:
        assert isinstance(layer.weight, torch.Tensor)
        return F.embedding(input_, layer.weight)


class GgufExpertsMethod(PackedExpertsMethod):
    """The method of experts. If the file does not quantise one of their matrices, all stay plain here."""

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        with_bias: bool = False,
        **extra_weight_attrs: Any,
    ) -> None:
        if not computes_experts(layer):
            raise ValueError(
                "experts of a GGUF file are computed in one process by kernels of the CPU alone, and options ask for "
                "other ones; leave --moe-runner-backend and --ep-size out."
            )
        inner = intermediate_size_per_partition
        sizes = {"w13_weight": ([inner, inner], hidden_size), "w2_weight": ([hidden_size], inner)}
        layer.gguf_outputs = {name: outputs for name, (outputs, _) in sizes.items()}  # type: ignore[assignment]
        for name, (_, inputs) in sizes.items():
            setattr(layer, name, _weight(torch.empty(0, inputs, dtype=params_dtype), _Shards()))

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        held: Any = layer
        sizes, experts = held.gguf_outputs, held.num_local_experts
        found: Any = {name: _take(layer, [experts * one for one in each], name) for name, each in sizes.items()}
        if None in found.values():
            return
        packs = all(hasattr(shard, "ggml") for shards in found.values() for shard in shards)
        for name, shards in found.items():
            weight = getattr(held, name)
            made = [_packed(shard) if packs else _wide(shard, weight.dtype) for shard in shards]
            whole = torch.cat([matrix.unflatten(0, (experts, -1)) for matrix in made], 1)
            if packs:
                size, form = (sum(sizes[name]), weight.shape[1]), ggml.KINDS[shards[0].ggml.kind].format
                hold_experts(layer, name, whole, size, form).weight_loader = _refuse
            else:
                setattr(layer, name, _weight(whole, _refuse))
        if not packs:
            super().process_weights_after_loading(layer)


def _weight(data: torch.Tensor, load: Callable[..., None]) -> nn.Parameter:
    weight = nn.Parameter(data, requires_grad=False)
    weight.weight_loader = load  # type: ignore[attr-defined]
    return weight


def _take(layer: nn.Module, outputs: Any, name: str = "weight") -> list[torch.Tensor] | None:
    """Take the shards of a layer, which accepts no further ones; None if they were taken before."""
    weight: Any = getattr(layer, name)
    load = weight.weight_loader
    if not isinstance(load, _Shards):
        return None
    found = load.in_order(outputs, weight.shape[1])
    setattr(layer, name, _weight(weight.data, _refuse))
    layer._derived_weight_cache_error = _NO_UPDATE  # type: ignore[assignment]  # SGLang asks for it before an update
    return found


def _be_dense(layer: nn.Module, weight: torch.Tensor) -> None:
    layer.weight = _weight(weight, _refuse)


def _hold(layer: nn.Module, found: Sequence[torch.Tensor]) -> None:
    """Set a layer's weight from shards of blocks."""
    hold(layer, (weight for shard in found for weight in _decoded(shard)))


def _decoded(shard: torch.Tensor) -> Iterator[Quantised]:
    blocks: Blocks = shard.ggml  # type: ignore[attr-defined]
    return (ggml.decode(shard[rows], blocks.kind) for rows in slices(len(shard), blocks.inputs))


def _packed(shard: torch.Tensor) -> torch.Tensor:
    """Blocks as panels; an expert fills whole panels."""
    return torch.cat([pack(weight) for weight in _decoded(shard)])


def _wide(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight in this dtype, as a copy."""
    blocks: Blocks | None = getattr(stored, "ggml", None)
    if blocks is None:
        return stored.to(dtype, copy=True)
    return torch.cat([weight.wide().to(dtype) for weight in _decoded(stored)])


_NO_UPDATE = (
    "The weights are those of a GGUF file, which cannot be updated while the server runs; start a server with the "
    "other model."
)


def _refuse(*_: Any, **__: Any) -> None:
    raise ValueError(_NO_UPDATE)
