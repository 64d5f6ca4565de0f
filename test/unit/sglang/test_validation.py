"""Refusals of --enable-fluxion: options, and an SGLang with moved names."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from places import NEEDLE
from refusals import one_sentence

from fluxion_sglang.config import ConfigError, FluxionConfig
from fluxion_sglang.device import library, maker
from fluxion_sglang.predictor.artifact import PredictorError
from fluxion_sglang.sglang.compat import CompatError
from fluxion_sglang.sglang.start import resolution, validation

# A refused value of every option, and words that the message must contain. The test fails if an option has no row here.
REFUSED_OPTIONS: dict[str, tuple[Any, str]] = {
    "attention_backend": ("triton", "leave --attention-backend out"),
    "prefill_attention_backend": ("fa3", "leave --prefill-attention-backend out"),
    "decode_attention_backend": ("flashinfer", "leave --decode-attention-backend out"),
    "page_size": (1, "--page-size 16"),
    "kv_cache_dtype": ("fp8_e4m3", "--kv-cache-dtype auto, and for KV in 8 bits"),
    "dtype": ("float16", "--dtype bfloat16 or --dtype float32"),
    "speculative_algorithm": ("EAGLE", "leave --speculative-algorithm out"),
    "enable_hierarchical_cache": (True, "leave --enable-hierarchical-cache out"),
    "enable_hisparse": (True, "leave --enable-hisparse out"),
    "enable_unified_memory": (True, "leave --enable-unified-memory out"),
    "enable_page_major_kv_layout": (True, "leave --enable-page-major-kv-layout out"),
    "enable_lmcache": (True, "leave --enable-lmcache out"),
    "enable_flexkv": (True, "leave --enable-flexkv out"),
    "enable_unified_cache_external_linker": (True, "leave --enable-unified-cache-external-linker out"),
    "radix_cache_backend": ("flexkv", "leave --radix-cache-backend out"),
    "disaggregation_mode": ("prefill", "start the prefill server without --enable-fluxion"),
    "disaggregation_decode_enable_offload_kvcache": (True, "leave --disaggregation-decode-enable"),
    "decoupled_spec_role": ("verifier", "leave --decoupled-spec-role out"),
    "encoder_only": (True, "leave --encoder-only out"),
    "is_embedding": (True, "leave --is-embedding out"),
    "enable_pdmux": (True, "leave --enable-pdmux out"),
    "dcp_size": (2, "--dcp-size 1"),
    "attn_cp_size": (2, "--attn-cp-size 1"),
    "attn_dp_size": (2, "--dp-size for replicas"),
    "enable_prefill_cp": (True, "leave --enable-prefill-cp out"),
    "enable_kv_cache_sharding": (True, "leave --enable-kv-cache-sharding out"),
    "enable_two_batch_overlap": (True, "leave --enable-two-batch-overlap out"),
    "enable_memory_saver": (True, "leave --enable-memory-saver out"),
    "prefill_only_disable_kv_cache": (True, "leave --prefill-only-disable-kv-cache out"),
    "enable_deterministic_inference": (True, "leave --enable-deterministic-inference out"),
    "enable_mis": (True, "leave --enable-mis out"),
    "dllm_algorithm": ("LowConfidence", "leave --dllm-algorithm out"),
    "enable_return_routed_experts": (True, "leave --enable-return-routed-experts out"),
    "enable_return_indexer_topk": (True, "leave --enable-return-indexer-topk out"),
    "kv_canary": ("log", "--kv-canary none"),
}


def test_every_option_has_a_row() -> None:
    assert set(validation.OPTIONS) == set(REFUSED_OPTIONS)
    listed = [field for fields in validation._GIVEN.values() for field in fields]
    assert len(listed) == len(set(listed)), "an option has two reasons"


@pytest.mark.parametrize("field", REFUSED_OPTIONS)
def test_a_server_with_the_option_does_not_start(field: str, server_args: Any) -> None:
    value, instead = REFUSED_OPTIONS[field]
    args = server_args(model_path=NEEDLE, device="cpu", enable_fluxion=True, **{field: value})
    with pytest.raises(ConfigError) as caught:
        args.resolve_once()
    message = str(caught.value)
    one_sentence(message)
    assert "--" + field.replace("_", "-") in message
    assert instead in message
    assert value is True or str(value) in message


def test_the_defaults_are_accepted(server_args: Any) -> None:
    validation.check_options(server_args(model_path=NEEDLE))
    legal = {
        "page_size": 16,
        "kv_cache_dtype": "bfloat16",
        "dtype": "float32",
        "attention_backend": "fluxion",
        "prefill_attention_backend": "fluxion",
        "decode_attention_backend": "fluxion",
    }
    validation.check_options(server_args(model_path=NEEDLE, **legal))


def test_post_capture_sizing_is_refused(server_args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "1")
    with pytest.raises(ConfigError, match="SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=1") as caught:
        validation.check_options(server_args(model_path=NEEDLE))
    one_sentence(str(caught.value))
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    with pytest.raises(ConfigError, match="SGLANG_RUST_SERVER, because") as caught:
        validation.check_options(server_args(model_path=NEEDLE))
    one_sentence(str(caught.value))


def test_a_renamed_option_is_a_failure_and_not_an_option_that_is_off() -> None:
    with pytest.raises(CompatError, match="--attention-backend does not exist") as caught:
        validation.check_options(SimpleNamespace())
    one_sentence(str(caught.value))


def test_config_without_the_flag_is_refused(server_args: Any) -> None:
    args = server_args(model_path=NEEDLE, device="cpu", fluxion_config="{}")
    with pytest.raises(ConfigError, match="has no effect without --enable-fluxion"):
        args.resolve_once()


@pytest.mark.parametrize(
    ("config", "words"), [('{"windw": 1}', "did you mean 'window'"), ('{"policy": "ful"}', "'ful'")]
)
def test_a_wrong_config_is_refused_before_anything_else(config: str, words: str, server_args: Any) -> None:
    args = server_args(model_path=NEEDLE, device="cpu", enable_fluxion=True, fluxion_config=config)
    with pytest.raises(ConfigError, match=words):
        args.resolve_once()


def test_a_missing_native_library_is_refused(server_args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class NativeLibraryError(RuntimeError):
        pass

    def library() -> None:
        raise NativeLibraryError("The native library is missing; reinstall fluxion-sglang.")

    module: Any = ModuleType("fluxion_sglang.native")
    module.library = library
    monkeypatch.setitem(sys.modules, "fluxion_sglang.native", module)
    monkeypatch.setattr("fluxion_sglang.native", module, raising=False)
    args = server_args(model_path=NEEDLE, device="cpu", enable_fluxion=True)
    with pytest.raises(NativeLibraryError):
        args.resolve_once()


def test_what_follows_from_the_flag(server_args: Any) -> None:
    from sglang.srt.arg_groups.overrides import resolving_view

    args = server_args(model_path=NEEDLE, device="cpu", enable_fluxion=True, dtype="float32")
    args.resolve_once()
    view = resolving_view(args)
    assert (view.attention_backend, view.page_size, view.device) == ("fluxion", 16, "cpu")
    assert view.cuda_graph_config.decode.backend == view.cuda_graph_config.prefill.backend == "disabled"
    assert view.disable_overlap_schedule is False  # unchanged: overlap works on the CPU
    assert (args.attention_backend, args.page_size) == (None, None)  # the record keeps the operator's values


@pytest.mark.parametrize(
    ("gib", "asked", "taken"),
    [(512, None, 4096), (512, 512, 512), (512, 8192, 8192), (512, -1, -1), (24, None, 4096), (8, None, 2048)],
)
def test_a_machine_of_much_memory_gets_no_longer_passes(
    server_args: Any, monkeypatch: pytest.MonkeyPatch, gib: int, asked: int | None, taken: int
) -> None:
    """SGLang derives pass sizes from the memory, as on a GPU."""
    from sglang.srt.arg_groups import memory_hook
    from sglang.srt.arg_groups.overrides import resolving_view

    monkeypatch.setattr(memory_hook, "get_device_memory_capacity", lambda device: gib * 1024)
    args = server_args(model_path=NEEDLE, device="cpu", enable_fluxion=True, chunked_prefill_size=asked)
    args.resolve_once()
    assert resolving_view(args).chunked_prefill_size == taken


@pytest.mark.parametrize(("given", "taken"), [({}, 3600), ({"watchdog_timeout": 60}, 60)])
def test_the_watchdog_waits_for_a_pass_of_a_cpu(server_args: Any, given: dict[str, Any], taken: float) -> None:
    from sglang.srt.arg_groups.overrides import resolving_view

    args = server_args(model_path=NEEDLE, device="cpu", enable_fluxion=True, **given)
    args.resolve_once()
    assert resolving_view(args).watchdog_timeout == taken


def test_other_devices_are_refused(server_args: Any) -> None:
    args = server_args(model_path=NEEDLE, device="xpu", enable_fluxion=True)
    with pytest.raises(ConfigError, match=r"serves on NVIDIA GPUs and on the CPU, and SGLang would use xpu"):
        resolution.run("handle_missing_default_values", args, lambda args: None)


def test_a_gpu_needs_its_library(server_args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "device_library_path", lambda backend: Path("/nowhere") / backend)
    library.load.cache_clear()
    args = server_args(model_path=NEEDLE, device="cuda", enable_fluxion=True)
    with pytest.raises(library.DeviceError, match="does not exist; build fluxion-sglang with FLUXION_CUDA=on"):
        resolution.run("handle_missing_default_values", args, lambda args: None)


def test_keys_that_do_not_go_with_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maker, "load", lambda backend: SimpleNamespace(backend=backend))
    with pytest.raises(ConfigError, match="SGLang would use cpu; leave the key out"):
        validation.check_device("cpu", FluxionConfig(cuda_graphs=True))
    for legal in ("cpu", "cuda"):
        validation.check_device(legal, FluxionConfig(cuda_graphs=legal == "cuda", audit="/tmp/audit.npy"))


# --- what resolution made of it


def resolved(**changes: Any) -> Any:
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig

    legal = {"attention_backend": "fluxion", "page_size": 16, "device": "cpu", "tp_size": 1, "pp_size": 1}
    for field, refusal in validation.OPTIONS.items():
        candidates = (None, False, "auto", "null", "none", 1)
        legal.setdefault(field, next(value for value in candidates if not refusal.refused(value)))
    graphs = CudaGraphConfig(PhaseConfig(backend="disabled"), PhaseConfig(backend="disabled"))
    return SimpleNamespace(**{**legal, "cuda_graph_config": graphs, **changes})


def test_resolution_as_declared_is_accepted() -> None:
    validation.check_resolved(resolved(), FluxionConfig())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_backend": "fa3"}, "--attention-backend fa3"),
        ({"attention_backend": None}, "lost its attention backend to None"),
        ({"page_size": None}, "SGLang chose None"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm EAGLE"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype fp8_e4m3"),
    ],
)
def test_a_model_that_decides_otherwise_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validation.check_resolved(resolved(**changes), FluxionConfig())
    assert words in str(caught.value)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_graphs_turned_on_again_are_refused(phase: str) -> None:
    args = resolved()
    args.cuda_graph_config[phase].backend = "full"
    with pytest.raises(ConfigError, match=f"--cuda-graph-backend-{phase} disabled"):
        validation.check_resolved(args, FluxionConfig())


def test_graphs_that_were_asked_for_are_accepted() -> None:
    args, asked = resolved(), FluxionConfig(cuda_graphs=True)
    args.cuda_graph_config.decode.backend = "full"
    validation.check_resolved(args, asked)
    args.cuda_graph_config.decode.backend = "breakable"
    with pytest.raises(ConfigError, match="graphs that are breakable, which SGLang chose for decode"):
        validation.check_resolved(args, asked)
    args.cuda_graph_config.decode.backend, args.cuda_graph_config.prefill.backend = "disabled", "full"
    with pytest.raises(ConfigError, match="which SGLang chose for prefill"):
        validation.check_resolved(args, asked)


# --- speculative decoding


def speculating(**changes: Any) -> Any:
    legal = {"speculative_algorithm": "NGRAM", "device": "cpu", "tp_size": 1, "pp_size": 1}
    return SimpleNamespace(**{**legal, "speculative_num_draft_tokens": 12, **changes})


def test_ngram_drafts_are_accepted() -> None:
    validation.check_options(resolved(speculative_algorithm="NGRAM"))
    validation.check_speculation(speculating(), FluxionConfig())
    validation.check_draft(speculating(speculative_num_draft_tokens=64))
    validation.check_draft(speculating(speculative_algorithm=None, speculative_num_draft_tokens=None))


@pytest.mark.parametrize(
    ("changes", "config", "words"),
    [
        ({"tp_size": 2}, {}, "on one rank alone"),
        ({"pp_size": 2}, {}, "on one rank alone"),
        ({}, {"audit": "here"}, "audit does not work"),
        ({}, {"record": "here"}, "record does not work"),
    ],
)
def test_what_does_not_go_with_drafts(changes: dict[str, Any], config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        validation.check_speculation(speculating(**changes), FluxionConfig(**config))
    assert str(caught.value).endswith(".") and "because" in str(caught.value) and "; " in str(caught.value)
    validation.check_speculation(speculating(speculative_algorithm=None, **changes), FluxionConfig(**config))


def test_drafts_need_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUXION_DEVICE", "sim")
    with pytest.raises(ConfigError, match="on a CPU alone"):
        validation.check_speculation(speculating(), FluxionConfig())


def test_drafts_that_are_too_large() -> None:
    with pytest.raises(ConfigError, match="at most 64 tokens"):
        validation.check_draft(speculating(speculative_num_draft_tokens=65))


def test_the_breadth_of_drafts_is_what_pages_allow(server_args: Any) -> None:
    from sglang.srt.arg_groups.overrides import resolving_view

    def narrowed(**options: Any) -> int:
        args = server_args(model_path=NEEDLE, device="cpu", **options)
        resolution._narrow_drafts(args, resolving_view(args))
        return int(resolving_view(args).speculative_ngram_max_bfs_breadth)

    assert narrowed(speculative_algorithm="NGRAM") == 1
    assert narrowed(speculative_algorithm="NGRAM", speculative_ngram_max_bfs_breadth=1) == 1
    assert narrowed() == 10
    with pytest.raises(ConfigError, match="breadth is 4"):
        narrowed(speculative_algorithm="NGRAM", speculative_ngram_max_bfs_breadth=4)


# --- prompts that another server prefills


def receiving(**changes: Any) -> Any:
    legal = {"disaggregation_mode": "decode", "device": "cpu", "pp_size": 1, "speculative_algorithm": None}
    legal |= {"enable_pd_role_switch": False, "disaggregation_enable_kv_checksum": False}
    legal |= {"disaggregation_decode_host_receive_threshold": 1.0, "disaggregation_decode_retraction_backup": None}
    legal |= {"disaggregation_transfer_backend": "mooncake"}
    return SimpleNamespace(**{**legal, **changes})


def test_a_decode_server_is_accepted(server_args: Any) -> None:
    validation.check_transfer(receiving(tp_size=2), FluxionConfig(canary=0.1))
    args = server_args(model_path=NEEDLE, device="cpu", enable_fluxion=True, disaggregation_mode="decode")
    args.resolve_once()
    from sglang.srt.arg_groups.overrides import resolving_view

    assert resolving_view(args).disaggregation_decode_retraction_backup == "cpu_tensor"
    assert resolving_view(args).page_size == 16


@pytest.mark.parametrize(
    ("changes", "config", "words"),
    [
        ({"pp_size": 2}, {}, "--pp-size 2, because"),
        ({"speculative_algorithm": "NGRAM"}, {}, "leave --speculative-algorithm out"),
        ({"enable_pd_role_switch": True}, {}, "leave --enable-pd-role-switch out"),
        ({"disaggregation_enable_kv_checksum": True}, {}, "leave --disaggregation-enable-kv-checksum out"),
        ({"disaggregation_decode_host_receive_threshold": 0.5}, {}, "leave --disaggregation-decode-host-"),
        ({"disaggregation_decode_retraction_backup": "host_pool"}, {}, "backup cpu_tensor or leave it out"),
        ({"disaggregation_transfer_backend": "nixl"}, {}, "backend mooncake, or mooncake_tcp"),
        ({}, {"disk": "here"}, "disk does not work"),
        ({}, {"record": "here"}, "record does not work"),
        ({}, {"prefill_budget": 0.5}, "prefill_budget does not work"),
    ],
)
def test_what_does_not_go_with_kv_from_another_server(
    changes: dict[str, Any], config: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        validation.check_transfer(receiving(**changes), FluxionConfig(**config))
    message = str(caught.value)
    assert message.endswith(".") and "because" in message and "; " in message and "decode" in message
    validation.check_transfer(receiving(disaggregation_mode="null", **changes), FluxionConfig(**config))


def test_kv_from_another_server_needs_the_cpu_and_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DISAGG_STAGING_BUFFER", "1")
    with pytest.raises(ConfigError, match=r"SGLANG_DISAGG_STAGING_BUFFER, because .*; unset"):
        validation.check_transfer(receiving(), FluxionConfig())
    monkeypatch.delenv("SGLANG_DISAGG_STAGING_BUFFER")
    monkeypatch.setenv("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE", "0")
    with pytest.raises(ConfigError, match=r"KV_RELEASE, which is 0, because .*; unset"):
        validation.check_transfer(receiving(), FluxionConfig())
    monkeypatch.setenv("FLUXION_DEVICE", "sim")
    with pytest.raises(ConfigError, match="on a CPU alone, because"):
        validation.check_transfer(receiving(), FluxionConfig())


def processes(**changes: Any) -> SimpleNamespace:
    one = dict.fromkeys(("tp_size", "pp_size", "dp_size", "nnodes"), 1)
    return SimpleNamespace(**{**one, "disable_radix_cache": False, "enable_lora": None, "lora_paths": None, **changes})


@pytest.mark.parametrize(
    ("key", "value", "option"),
    [("audit", "/tmp/audit.npy", option) for option in ("tp_size", "pp_size", "dp_size")]
    + [("canary", 0.1, "pp_size")],
)
def test_what_does_not_go_with_several_processes(key: str, value: Any, option: str) -> None:
    config, more = FluxionConfig(**{key: value}), {} if key == "audit" else {"tp_size": 2, "dp_size": 2}
    validation.check_config(config, processes(**more))
    validation.check_config(FluxionConfig(), processes(**{option: 2}))
    with pytest.raises(ConfigError, match=f"{key} does not work with --{option.replace('_', '-')} 2, because .*; "):
        validation.check_config(config, processes(**{**more, option: 2}))


def test_what_does_not_go_with_kv_in_files(tmp_path: Path) -> None:
    kept = FluxionConfig(disk=str(tmp_path / "new" / "folder"))
    validation.check_config(kept, processes(dp_size=2, tp_size=2))
    assert (tmp_path / "new" / "folder").is_dir()
    for changed, words in (
        ({"disable_radix_cache": True}, "--disable-radix-cache"),
        ({"pp_size": 2}, "--pp-size 2"),
        ({"enable_lora": True}, "LoRA"),
        ({"lora_paths": ["a"]}, "LoRA"),
    ):
        with pytest.raises(ConfigError, match=f"disk does not work with {words}, because .*; .*"):
            validation.check_config(kept, processes(**changed))
    with pytest.raises(ConfigError, match="disk does not work with prefill_budget below 1, because"):
        validation.check_config(FluxionConfig(disk=str(tmp_path), prefill_budget=0.5), processes())
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"disk is '.*file/below', where KV cannot be kept \(Not a directory\); name a"
    ):
        validation.check_config(FluxionConfig(disk=str(tmp_path / "file" / "below")), processes())


def test_ranks_divide_the_cores_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "topology", lambda: {"cores": list(range(8))})
    args = processes(tp_size=2, dp_size=2)
    for legal in ({"cores": "0-3"}, {"cores": "0-7", "workers": 2}, {"workers": 9}, {}):
        validation.check_config(FluxionConfig(**legal).validate(), args)
    for cores, workers, words in (("0-2", None, "need 1 each; name at least 4"), ("0-6", 2, "2 each; name at least 8")):
        with pytest.raises(ConfigError, match=f"names {3 if workers is None else 7}, but the 4 ranks .*{words}"):
            validation.check_config(FluxionConfig(cores=cores, workers=workers).validate(), args)
    with pytest.raises(ConfigError, match=r"^cores is '6-8', but this process may not run on core 8; name some of"):
        validation.check_config(FluxionConfig(cores="6-8").validate(), args)


def test_a_damaged_predictor_is_refused_before_anything_starts(tmp_path: Path) -> None:
    args = processes()
    shutil.copytree(Path(NEEDLE) / "fluxion", tmp_path / "predictor")
    config = FluxionConfig(predictor=str(tmp_path / "predictor"))
    validation.check_config(config.validate(), args)
    for file in (tmp_path / "predictor").glob("*.safetensors"):
        os.truncate(file, 100)
    with pytest.raises(PredictorError, match="truncated"):
        validation.check_config(config.validate(), args)
    validation.check_config(replace(config, policy="full").validate(), args)


def test_a_folder_of_temporary_files_that_is_too_deep(
    server_args: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 100)))
    with pytest.raises(ConfigError, match=r"^TMPDIR is .*; set TMPDIR to a folder of at most 95, such as /tmp\.$"):
        server_args(model_path=NEEDLE, device="cpu", enable_fluxion=True).resolve_once()


def test_a_server_asks_itself_without_a_proxy(
    server_args: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "example.org")
    monkeypatch.setenv("http_proxy", "http://proxy.invalid:3128")
    server_args(model_path=NEEDLE, device="cpu", enable_fluxion=True, host="10.0.0.7").resolve_once()
    expected = "example.org,127.0.0.1,localhost,::1,10.0.0.7"
    assert (os.environ["no_proxy"], os.environ["NO_PROXY"]) == (expected, expected)
    told = [record.getMessage() for record in caplog.records if "without a proxy" in record.getMessage()]
    assert len(told) == 1 and told[0].startswith("Fluxion: http_proxy is set")
