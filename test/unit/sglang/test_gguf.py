"""GGUF files: which are served, their configuration, and the layers that hold their blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import gguf_files
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from refusals import one_sentence
from sglang.srt.layers import linear
from sglang.srt.layers.linear import MergedColumnParallelLinear, ReplicatedLinear
from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from torch import nn
from torch.nn import functional as F

from fluxion_sglang.commands.document import local_tokenizer
from fluxion_sglang.commands.trial import facts as trial_facts
from fluxion_sglang.commands.trial.results import TrialError
from fluxion_sglang.config import ConfigError
from fluxion_sglang.sglang.start import gguf_model
from fluxion_sglang.sglang.weights import gguf as weights
from fluxion_sglang.sglang.weights.gguf import Blocks, GgufConfig
from fluxion_sglang.sglang.weights.methods import parts_of
from fluxion_sglang.weights import ggml

ARGS = SimpleNamespace(tp_size=1, quantization=None)
COMMON: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 300, "max_position_embeddings": 512,
}  # fmt: skip
POSITIONS = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**COMMON, tie_word_embeddings=False),
    "qwen2": lambda: transformers.Qwen2Config(**COMMON, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, tie_word_embeddings=False),
    "qwen3moe": lambda: transformers.Qwen3MoeConfig(
        **COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **COMMON, sliding_window=32, query_pre_attn_scalar=32, rope_parameters=POSITIONS
    ),
}


def random(family: str) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[family]()).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def write(folder: Path, family: str = "llama", name: str = "model.gguf", **given: Any) -> Path:
    gguf_files.write(random(family), folder / name, **given)
    return folder / name


def by_sglangs_names(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """All experts' weights under the first one's name, with gates and ups separate."""
    for name, weight in state.items():
        stem, kind = name.rsplit(".", 1)
        if kind == "gate_up_proj":
            for part, half in zip(("gate", "up"), weight.chunk(2, 1), strict=True):
                yield f"{stem}.0.{part}_proj.weight", half.flatten(0, 1)
        elif kind == "down_proj":
            yield f"{stem}.0.down_proj.weight", weight.flatten(0, 1)
        else:
            yield name, weight


@pytest.mark.parametrize("family", MODELS)
class TestAModel:
    def test_has_the_weights_that_were_written(self, family: str, tmp_path: Path) -> None:
        twin = dict(by_sglangs_names(gguf_files.write(random(family), tmp_path / "model.gguf").state_dict()))
        header = gguf_model.check(tmp_path / "model.gguf", ARGS)
        names = gguf_model.names_of(header)
        assert {*names.values()} | {"lm_head.weight"} == twin.keys()
        for name, loaded in weights._weights(header, names):
            blocks = getattr(loaded, "ggml", None)
            wide = loaded if blocks is None else ggml.decode(loaded, blocks.kind).wide()
            torch.testing.assert_close(wide.float(), twin[name], rtol=0, atol=1e-6, msg=name)

    def test_has_its_configuration(self, family: str, tmp_path: Path) -> None:
        config = MODELS[family]()
        header = gguf_model.check(write(tmp_path, family), ARGS)
        found = type(config)(**gguf_model.config_of(header)).to_dict()
        written = config.to_dict()
        assert found.pop("rms_norm_eps") == pytest.approx(written.pop("rms_norm_eps"))  # float32 in the file
        other = {key for key in written if found[key] != written[key]}
        assert other <= {"architectures", "dtype", "bos_token_id", "eos_token_id", "pad_token_id"}
        assert found["architectures"] == [type(random(family)).__name__] and found["eos_token_id"] == [2]


class TestPositions:
    def test_of_llama_3_are_found_from_what_they_divide(self, tmp_path: Path) -> None:
        header = gguf_model.check(write(tmp_path), ARGS)
        rope = {"rope_theta": 500000.0, "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        config = transformers.LlamaConfig(**COMMON, rope_parameters=rope)
        scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        plain = 500000.0 ** -(torch.arange(0, 32, 2).float() / 32)
        factors = np.memmap(tmp_path / "factors", np.float32, "w+", shape=(16,))
        factors[:] = (plain / scaled).numpy()
        header = ggml.Header(tmp_path / "factors", header.values | {"llama.rope.freq_base": 500000.0}, header.tensors)
        header.tensors["rope_freqs.weight"] = ggml.Tensor((16,), 0, 0)
        assert gguf_model._rope(header) == rope
        factors[3] *= 1.01
        assert gguf_model._rope(header) is None

    def test_that_are_linear_are_scaled(self, tmp_path: Path) -> None:
        header = gguf_model.check(write(tmp_path, "gemma3"), ARGS)
        header.values.update({"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0})
        found = gguf_model.config_of(header)["rope_parameters"]
        assert found["full_attention"] == {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
        assert found["sliding_attention"]["rope_type"] == "default"


class TestRefusals:
    @pytest.mark.parametrize(
        ("given", "says"),
        [
            ({"name": "model-00001-of-00002.gguf"}, "a part of a split file, with llama-gguf-split --merge"),
            ({"split.count": 3}, "a part of a split file"),
            ({"llama.expert_count": 8}, r"its model \(llama\) has experts, .* of qwen3moe alone"),
            ({"types": lambda _: Type.MXFP4}, r"weights of the type MXFP4, and only F32, F16, .* are served"),
            ({"llama.rope.scaling.type": "yarn"}, "scales positions in a way .* put the model's config.json beside it"),
        ],
    )
    def test_of_a_file(self, given: dict[str, Any], says: str, tmp_path: Path) -> None:
        path = write(tmp_path, **given)
        with pytest.raises(ConfigError, match=says.split(", with")[0]) as told:
            gguf_model.check(path, ARGS)
        one_sentence(str(told.value))

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"tp_size": 2}, "its blocks cannot be divided among ranks; leave --tp-size out"),
            ({"quantization": "fluxion-int8"}, "quantised already and --quantization is fluxion-int8; leave that"),
        ],
    )
    def test_of_an_option(self, options: dict[str, Any], says: str, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=says) as told:
            gguf_model.check(write(tmp_path), SimpleNamespace(**{**vars(ARGS), **options}))
        one_sentence(str(told.value))

    @pytest.mark.parametrize(
        ("architecture", "says"),
        [
            ("phi3", r"architecture is phi3, and only llama .*, qwen3moe and gemma3 are served"),
            ("qwen2moe", r"model \(qwen2moe\) has experts, which are served from GGUF files of qwen3moe alone"),
        ],
    )
    def test_of_another_architecture(self, architecture: str, says: str, tmp_path: Path) -> None:
        writer = gguf.GGUFWriter(tmp_path / "other.gguf", architecture)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with pytest.raises(ConfigError, match=says) as told:
            gguf_model.check(tmp_path / "other.gguf", ARGS)
        one_sentence(str(told.value))

    def test_of_tensors_too_few_or_too_many(self, tmp_path: Path) -> None:
        header = ggml.read_header(write(tmp_path))
        header.tensors["blk.0.attn_q.bias"] = header.tensors["output_norm.weight"]
        assert gguf_model._unserved(header, ARGS) == (
            "it has blk.0.attn_q.bias, which a llama model does not",
            "give another GGUF file of it, or the model in bfloat16",
        )
        del header.tensors["blk.0.attn_q.bias"]
        header.values["llama.feed_forward_length"] = ggml.Array(2)
        assert "it has no number llama.feed_forward_length" in str(gguf_model._unserved(header, ARGS))
        header.tensors["output_norm.weight"] = ggml.Tensor((64,), 8, 0)
        assert "output_norm.weight has 64 inputs" in str(gguf_model._unserved(header, ARGS))
        header.tensors["output_norm.weight"] = ggml.Tensor((64,), 0, 0)
        del header.tensors["blk.1.ffn_up.weight"]
        why = gguf_model._unserved(header, ARGS)
        assert why is not None and why[0] == "it has no blk.1.ffn_up.weight"

    @pytest.mark.parametrize(
        ("key", "value", "says"),
        [
            ("llama.block_count", 1 << 31, "it says that it has 2147483648 layers, and has"),
            ("llama.attention.head_count", 0, "no number llama.attention.head_count above 0"),
            ("llama.attention.layer_norm_rms_epsilon", float("nan"), "no number .*epsilon above 0"),
            ("llama.rope.freq_base", "text", "no number llama.rope.freq_base above 0"),
            ("llama.attention.key_length", ggml.Array(2), "no number llama.attention.key_length above 0"),
            ("tokenizer.ggml.eos_token_id", ggml.Array(2), "tokenizer.ggml.eos_token_id is no token"),
            ("split.count", "text", "a part of a split file"),
            ("llama.embedding_length", 96, "its token_embd.weight is 300 x 64 and its header says that it is 300 x 96"),
            ("llama.attention.head_count_kv", 4, "its blk.0.attn_k.weight is 64 x 64 and .* 128 x 64"),
            ("llama.feed_forward_length", 64, "its blk.0.ffn_gate.weight is 96 x 64 and .* 64 x 64"),
        ],
    )
    def test_of_a_header_that_lies(
        self, key: str, value: Any, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        header = ggml.read_header(write(tmp_path))
        header.values[key] = value
        monkeypatch.setattr(ggml, "read_header", lambda _: header)
        with pytest.raises(ConfigError, match=says) as told:
            gguf_model.check(tmp_path / "model.gguf", ARGS)
        one_sentence(str(told.value))

    def test_of_frequencies_that_are_not_of_the_heads(self, tmp_path: Path) -> None:
        header = ggml.read_header(write(tmp_path))
        for tensor in (ggml.Tensor((0,), 0, 0), ggml.Tensor((1 << 40,), 0, 0), ggml.Tensor((1, 32), 8, 0)):
            header.tensors["rope_freqs.weight"] = tensor
            why = gguf_model._unserved(header, ARGS)
            assert why is not None and why[0] == "it scales positions in a way that this version does not know"

    def test_of_a_file_that_cannot_be_read(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"it cannot be read \(Is a directory\); give a file") as told:
            gguf_model.check(tmp_path, ARGS)
        one_sentence(str(told.value))

    def test_of_a_file_that_is_cut_off(self, tmp_path: Path) -> None:
        path = write(tmp_path)
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(ConfigError, match=r"model.gguf ends before its tensor \S+ does; download it again\."):
            gguf_model.check(path, ARGS)

    @pytest.mark.parametrize("up", [Type.Q4_1, Type.Q5_0, Type.F16])
    def test_of_experts_whose_gate_and_up_have_two_formats(self, up: Type, tmp_path: Path) -> None:
        path = write(tmp_path, "qwen3moe", types=lambda name: up if "up_exps" in name else gguf_files.mixed(name))
        if up is not Type.Q4_1:  # Q5_0 has the format of Q8_0; F16 has none
            gguf_model.check(path, ARGS)
            return
        with pytest.raises(ConfigError, match=r"one type .*, and those of blk.0 have Q4_1 and Q8_0; give") as told:
            gguf_model.check(path, ARGS)
        one_sentence(str(told.value))


class TestTheFolder:
    @pytest.fixture(autouse=True)
    def cache(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def test_is_read_by_sglang_and_made_once(self, tmp_path: Path) -> None:
        from sglang.srt.utils.hf_transformers_utils import get_config, get_tokenizer

        header = gguf_model.check(write(tmp_path, **{"tokenizer.ggml.add_bos_token": True}), ARGS)
        path = gguf_model.prepared(header, tokenizer=True)
        assert path.resolve() == tmp_path / "model.gguf" and path.name == "model.gguf"
        config, tokenizer = get_config(str(path), False), get_tokenizer(str(path.parent))
        assert config.head_dim == 32 and config.architectures == ["LlamaForCausalLM"]
        ids = tokenizer.encode("ab ba")
        assert ids[0] == 1 and tokenizer.decode(ids[1:]) == "ab ba" and len(ids) == 5, "bos, ab, space, b, a"
        times = [file.stat().st_mtime_ns for file in sorted(path.parent.iterdir())]
        assert gguf_model.prepared(header, tokenizer=True) == path
        assert times == [file.stat().st_mtime_ns for file in sorted(path.parent.iterdir())]

    def test_is_where_sglang_loads_from(self, server_args: Any, tmp_path: Path) -> None:
        from sglang.srt.arg_groups.overrides import model_config_of, resolved_view

        path = str(write(tmp_path))
        args = server_args(model_path=path, device="cpu", enable_fluxion=True, skip_tokenizer_init=True)
        args.resolve_once()
        view = resolved_view(args)
        assert Path(view.model_path).resolve() == Path(path) and view.served_model_name == path
        assert view.tokenizer_path == str(Path(view.model_path).parent)
        assert (view.quantization, view.load_format) == ("gguf", "gguf")
        assert model_config_of(args).dtype is torch.bfloat16 and model_config_of(args).head_dim == 32

    def test_is_what_commands_read(self, tmp_path: Path) -> None:
        file = write(tmp_path)
        facts = trial_facts.read(str(file))
        assert facts.architecture == "LlamaForCausalLM" and facts.weights_bytes == file.stat().st_size
        tokenize, positions = local_tokenizer(str(file))
        assert len(tokenize("ab ba")) == 4 and positions == facts.positions
        (tmp_path / "other.gguf").write_bytes(b"no file")
        with pytest.raises(TrialError, match=r"other.gguf is not a .*GGUF"):
            trial_facts.read(str(tmp_path / "other.gguf"))

    def test_has_what_lies_beside_the_file(self, tmp_path: Path) -> None:
        path = write(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "mark": 1}))
        made = gguf_model.prepared(gguf_model.check(path, ARGS), tokenizer=False)
        assert json.loads((made.parent / "config.json").read_text())["mark"] == 1
        assert not (made.parent / "tokenizer_config.json").exists()

    def test_has_what_is_put_beside_the_file_later(self, tmp_path: Path) -> None:
        header = gguf_model.check(write(tmp_path), ARGS)
        config = gguf_model.prepared(header, tokenizer=False).parent / "config.json"
        made = config.read_text()
        (tmp_path / "config.json").write_text("{}")
        gguf_model.prepared(header, tokenizer=False)
        assert config.read_text() == "{}"
        (tmp_path / "config.json").unlink()
        gguf_model.prepared(header, tokenizer=False)
        assert config.read_text() == made and not config.is_symlink()

    def test_needs_a_home_or_a_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        header = gguf_model.check(write(tmp_path), ARGS)
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", lambda: Path("~no-such-user").expanduser())
        with pytest.raises(ConfigError, match="this user has no home; set XDG_CACHE_HOME") as told:
            gguf_model.prepared(header, tokenizer=False)
        one_sentence(str(told.value))

    def test_that_cannot_be_written_is_refused(self, tmp_path: Path) -> None:
        header = gguf_model.check(write(tmp_path), ARGS)
        (tmp_path / "cache").write_text("a file")
        with pytest.raises(ConfigError, match="set XDG_CACHE_HOME to a folder that can") as told:
            gguf_model.prepared(header, tokenizer=False)
        one_sentence(str(told.value))


# --- Layers ---


def blocks(outputs: int, inputs: int, kind: Type) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor as the loader reads it, and its dequantised weight."""
    weight = np.random.default_rng(outputs).normal(size=(outputs, inputs)).astype(np.float32)
    stored = gguf.quants.quantize(weight, kind)
    wide = torch.from_numpy(gguf.quants.dequantize(stored, kind))
    if kind in (Type.F32, Type.F16, Type.BF16):
        return wide.to(ggml.DENSE[int(kind)]), wide
    loaded = torch.from_numpy(stored)
    loaded.ggml = Blocks(int(kind), inputs)  # type: ignore[attr-defined]
    return loaded, wide


def process(layer: nn.Module) -> None:
    layer.quant_method.process_weights_after_loading(layer)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_resolve_linear_group", lambda group: group)
    monkeypatch.setattr(linear, "get_group_rank_size", lambda _: (0, 1))


GIVEN: dict[str, Any] = {"bias": False, "params_dtype": torch.float32, "quant_config": GgufConfig()}


@pytest.mark.usefixtures("alone")
class TestAMergedLayer:
    @pytest.mark.parametrize(
        ("kinds", "parts"),
        [
            ((Type.Q4_0, Type.Q4_0, Type.Q4_0), 1),
            ((Type.Q5_0, Type.Q8_0, Type.Q4_1), 2),  # Q5_0 has the format of Q8_0
            ((Type.Q8_0, Type.Q5_1, Type.Q8_0), 3),
        ],
    )
    def test_has_a_part_a_format(self, kinds: tuple[Type, ...], parts: int) -> None:
        layer = MergedColumnParallelLinear(64, [32, 48, 20], **GIVEN)
        found = [blocks(outputs, 64, kind) for outputs, kind in zip((32, 48, 20), kinds, strict=True)]
        for shard in (2, 0, 1):
            layer.weight.weight_loader(layer.weight, found[shard][0], shard)
        process(layer)
        x = torch.randn(5, 64)
        torch.testing.assert_close(layer(x)[0], F.linear(x, torch.cat([wide for _, wide in found])))
        assert len(parts_of(layer)) == parts and layer.weight.shape == (0, 64)
        process(layer)  # repeating it changes nothing
        assert len(parts_of(layer)) == parts

    def test_with_a_part_that_is_not_quantised_is_sglangs_own(self) -> None:
        layer = MergedColumnParallelLinear(64, [32, 16], **GIVEN)
        found = [blocks(32, 64, Type.Q8_0), blocks(16, 64, Type.F16)]
        for shard, (loaded, _) in enumerate(found):
            layer.weight.weight_loader(layer.weight, loaded, shard)
        process(layer)
        assert type(layer.quant_method) is UnquantizedLinearMethod and not parts_of(layer)
        torch.testing.assert_close(layer.weight.data, torch.cat([wide for _, wide in found]))


def test_a_layer_takes_no_other_weights() -> None:
    from sglang.srt.model_executor.model_runner_components.weight_updater import _unsupported_derived_weight_cache_error

    layer = ReplicatedLinear(64, 32, **GIVEN)
    loaded, _ = blocks(32, 64, Type.Q8_0)
    layer.weight.weight_loader(layer.weight, loaded)
    process(layer)
    with pytest.raises(ValueError, match="cannot be updated while the server runs"):
        layer.weight.weight_loader(layer.weight, loaded)
    told = _unsupported_derived_weight_cache_error(nn.Sequential(layer))
    assert told is not None and told.endswith("; start a server with the other model.")


def test_a_layer_of_another_size_is_refused() -> None:
    layer = ReplicatedLinear(64, 48, **GIVEN)
    layer.weight.weight_loader(layer.weight, blocks(32, 64, Type.Q8_0)[0])
    with pytest.raises(ConfigError, match=r"has \[\[32, 64\]\] outputs .* for a layer that has \[\[48, 64\]\]") as told:
        process(layer)
    one_sentence(str(told.value))
    layer = ReplicatedLinear(64, 32, **GIVEN)
    layer.weight.weight_loader(layer.weight, blocks(32, 96, Type.Q8_0)[0])
    with pytest.raises(ConfigError, match=r"has \[\[32, 96\]\] outputs .* for a layer that has \[\[32, 64\]\]"):
        process(layer)


def test_a_scale_that_is_not_finite_is_refused() -> None:
    layer = ReplicatedLinear(64, 32, **GIVEN)
    loaded, _ = blocks(32, 64, Type.Q8_0)
    loaded[3, :2] = torch.tensor([torch.nan], dtype=torch.float16).view(torch.uint8)
    layer.weight.weight_loader(layer.weight, loaded)
    with pytest.raises(ConfigError, match="a scale of the weights is not finite or above 65504, and") as told:
        process(layer)
    one_sentence(str(told.value))


def logits_of(layer: Any) -> torch.Tensor:
    x = torch.eye(64)
    if should_apply_lm_head_quant_method(layer, layer.quant_method):
        return layer.quant_method.apply(layer, x).T
    return F.linear(x, layer.weight).T


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0, Type.F16])
def test_a_head_makes_logits(kind: Type) -> None:
    layer = ParallelLMHead(100, 64, params_dtype=torch.float32, quant_config=GgufConfig(), enable_tp=False)
    loaded, wide = blocks(100, 64, kind)
    layer.weight.weight_loader(layer.weight, loaded)
    process(layer)
    torch.testing.assert_close(logits_of(layer)[:100], wide)
    assert len(layer.weight) == (128 if kind is Type.F16 else 0), "rows that SGLang adds"
    assert bool(parts_of(layer)) is (kind is not Type.F16)


@pytest.mark.parametrize("of", ["SGLang", "PyTorch"])
@pytest.mark.parametrize("kind", [Type.Q8_0, Type.F16])
def test_an_embedding_makes_logits_as_well(of: str, kind: Type, tmp_path: Path) -> None:
    """SGLang's Gemma 3 uses PyTorch's embedding."""
    twin = gguf_files.write(random("qwen2"), tmp_path / "model.gguf", types=lambda _: kind)
    made = {
        "SGLang": lambda: VocabParallelEmbedding(300, 64, params_dtype=torch.float32, enable_tp=False),
        "PyTorch": lambda: nn.Embedding(300, 64),
    }
    model = nn.Module()
    model.model = nn.Module()
    model.model.embed_tokens = embedding = made[of]()
    path = str(tmp_path / "model.gguf")

    def load(loader: Any, model_config: Any, device_config: Any) -> nn.Module:
        names = weights.get_gguf_weights_map(pytest.fail, loader, model_config)
        assert weights.get_gguf_extra_tensor_names(pytest.fail, path, names) == ["lm_head.weight"]
        loaded = dict(weights.get_weights_iterator(pytest.fail, loader, path, names))
        embedding.weight.data[:300] = loaded["model.embed_tokens.weight"]
        return model

    given = {"model_config": SimpleNamespace(model_path=path), "device_config": None}
    assert weights.load_model(load, None, **given) is model
    want = twin.get_input_embeddings().weight.data
    ids = torch.tensor([3, 0, 99])
    found = embedding.quant_method.embedding(embedding, ids) if hasattr(embedding, "quant_method") else embedding(ids)
    assert torch.equal(found, want[ids])
    assert bool(parts_of(embedding)) is (kind is not Type.F16)
    if parts_of(embedding):
        torch.testing.assert_close(logits_of(embedding), want)
