"""What this plug-in needs of SGLang, checked by name before it is used.

Nothing here runs, and nothing here can fail, unless the server was started with --enable-fluxion.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

_OLDEST, _NEWEST = (0, 5, 22), (0, 5, 23)
SUPPORTED = "{}.{}.{} to {}.{}.{}".format(*_OLDEST, *_NEWEST)
REQUIREMENT = "sglang>={}.{}.{},<{}.{}.{}".format(*_OLDEST, *_NEWEST[:2], _NEWEST[2] + 1)
"""What to install, as pyproject.toml has it; the pages that name it have this one."""

_ACCEPT = "FLUXION_ACCEPT_SGLANG"
"""An environment variable that names one version more: `make test-sglang` tries those that are new with it."""

_CPU_RANKS = (0, 5, 23)
"""The first version that can divide a model among ranks on a CPU: 0.5.22 sets up NCCL whatever the device."""

BACKEND = "fluxion"
"""The name of the attention backend."""

# Why the bootstrap could not do its work, if it could not. It must not stop an SGLang that does not ask for
# Fluxion.
activation_problem: str | None = None


class CompatError(RuntimeError):
    """This SGLang is not one that the plug-in fits. The message is one sentence."""


@dataclass(frozen=True)
class Need:
    """One name of SGLang's that is used here.

    Attributes:
        module, name: where it lives; `name` may have dots (a method).
        parameters: exact parameter names for what is wrapped or called by keyword, else None.
    """

    module: str
    name: str
    parameters: tuple[str, ...] | None = None

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"

    def problem(self) -> str | None:
        """None, or what is wrong with it in a few words."""
        try:
            value: Any = importlib.import_module(self.module)
        except ImportError as error:
            return f"the module {self.module} does not import ({error})"
        for part in self.name.split("."):
            if not hasattr(value, part):
                return f"{self.path} does not exist"
            value = getattr(value, part)
        if self.parameters is not None:
            # The function under wrappers: another plug-in may have hooked it as well.
            found = tuple(inspect.signature(inspect.unwrap(value)).parameters)
            if found != self.parameters:
                return f"{self.path} takes ({', '.join(found)}) and not ({', '.join(self.parameters)})"
        return None


_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator"
RESOLVE_POOL = Need(_CONFIGURATOR, "KVCacheConfigurator._resolve_memory_pool_config", ("self", "pre_model_load_memory"))
BUILD_POOL = Need(
    _CONFIGURATOR,
    "KVCacheConfigurator._build_token_to_kv_pool",
    ("self", "sizes", "is_dsa_model", "is_dsv4_model", "req_to_token_pool"),
)
FUSED_KV_WRITE = Need("sglang.srt.models.utils", "enable_fused_set_kv_buffer", ("forward_batch",))
RUN_BATCH = Need(
    "sglang.srt.managers.tp_worker",
    "TpModelWorker.forward_batch_generation",
    (
        *("self", "batch", "forward_batch", "pp_proxy_tensors"),
        *("is_verify", "skip_attn_backend_init", "capture_hidden_mode", "return_kv_loc_plan"),
    ),
)
CHECK_PROMPT = Need(
    "sglang.srt.managers.tokenizer_manager", "TokenizerManager._validate_one_request", ("self", "obj", "input_ids")
)
END_CHUNKED = Need("sglang.srt.managers.scheduler", "Scheduler.process_pending_chunked_abort", ("self",))
_TABLE = "sglang.srt.mem_cache.memory_pool"
FREE_ROWS = Need(_TABLE, "ReqToTokenPool.free_rows", ("self", "indices"))
CLEAR_ROWS = Need(_TABLE, "ReqToTokenPool.clear", ("self",))
_SESSION = "sglang.srt.session.streaming_session"
MATCH_SESSION = Need(_SESSION, "StreamingSession.try_match_prefix", ("self", "params"))
END_TURN = Need(_SESSION, "StreamingSession.try_cache_finished_req", ("self", "req"))

# Of NGRAM speculative decoding on a CPU (`speculation.py`), checked where a server asks for it.
_NGRAM_SINCE = (0, 5, 23)
"""The first version whose platforms may bring the worker of a speculative algorithm."""
TREE_MODULE = "sglang.kernels.ops.speculative.reconstruct_tree"
NGRAM_SAMPLING = "sglang.srt.speculative.eagle_utils"
NGRAM_WORKER = "sglang.srt.speculative.ngram_worker"
LAST_SLOT = Need(
    "sglang.srt.mem_cache.allocation",
    "get_last_loc",
    ("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"),
)
ASSIGN_SLOTS = Need(
    "sglang.srt.mem_cache.allocation",
    "assign_req_to_token_pool_func",
    ("req_pool_indices", "req_to_token", "start_offset", "end_offset", "out_cache_loc", "batch_size"),
)
VERIFY_GREEDY = Need(
    "sglang.kernels.ops.speculative.spec_tree",
    "verify_tree_greedy_func",
    (
        *("predicts", "accept_index", "accept_token_num", "candidates", "retrieve_index", "retrieve_next_token"),
        *("retrieve_next_sibling", "target_predict", "topk"),
    ),
)
MOVE_ACCEPTED = Need(
    "sglang.srt.speculative.spec_utils",
    "move_accept_tokens_to_target_kvcache",
    ("batch", "accept_index", "num_correct_drafts", "token_to_kv_pool_allocator"),
)
NGRAM_NEEDS = (
    LAST_SLOT,
    ASSIGN_SLOTS,
    VERIFY_GREEDY,
    MOVE_ACCEPTED,
    Need(NGRAM_SAMPLING, "tree_speculative_sampling_target_only"),
    Need(NGRAM_SAMPLING, "top_k_renorm_prob"),
    Need(NGRAM_SAMPLING, "top_p_renorm_prob"),
    Need(NGRAM_WORKER, "NGRAMWorker"),
    Need(NGRAM_WORKER, "USE_FULL_MASK"),
)

# Of KV that outlives the server (`disk.py`), checked where a server asks for it.
_DISK_SINCE = (0, 5, 23)
"""The first version that takes linkers to external caches from other packages."""
LINKER_OPTION = "enable_unified_cache_external_linker"
_LINKER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker"
DISK_NEEDS = (
    Need(_LINKER, "UnifiedCacheLinker.lookup", ("self", "rid", "transfers")),
    Need(_LINKER, "UnifiedCacheLinker.load", ("self", "rid", "transfers")),
    Need(_LINKER, "UnifiedCacheLinker.cancel_queued_load", ("self", "rid")),
    Need(_LINKER, "UnifiedCacheLinker.start_layer_wise_loading", ("self",)),
    Need(_LINKER, "UnifiedCacheLinker.finish_layer_wise_loading", ("self", "counter_index")),
    Need(_LINKER, "UnifiedCacheLinker.offload", ("self", "transfers", "session_id")),
    Need(_LINKER, "UnifiedCacheLinker.num_completed_offloads", ("self",)),
    Need(_LINKER, "UnifiedCacheLinker.pop_completed_offload", ("self",)),
    Need(_LINKER, "LayerWiseLoadCounter", ("num_layers", "on_layer_ready")),
    Need("sglang.srt.mem_cache.hicache_storage", "PoolName.KV"),
    Need(
        "sglang.srt.mem_cache.unified_cache.linker_factory",
        "create_unified_cache_linker",
        ("server_args", "params", "backend", "config", "components", "forward_stream"),
    ),
)

# Of prompts that another server prefills (`transfer.py`), checked where a server asks for it.
_TRANSFER_SINCE = (0, 5, 23)
"""The first version whose decode side was looked at."""
_DECODE = "sglang.srt.disaggregation.decode"
_TRANSFER = "sglang.srt.disaggregation.utils"
KV_CLASS = Need(_TRANSFER, "get_kv_class", ("transfer_backend", "class_type"))
COMMIT_TRANSFER = Need(_DECODE, "DecodeTransferQueue._commit_transfer_to_req", ("self", "decode_req"))
FREE_DECODE_ROW = Need(_DECODE, "DecodeReqToTokenPool.free", ("self", "req"))
CLEAR_DECODE_ROWS = Need(_DECODE, "DecodeReqToTokenPool.clear", ("self",))
_RECEIVER = "sglang.srt.disaggregation.common.conn"
TRANSFER_NEEDS = (
    KV_CLASS,
    COMMIT_TRANSFER,
    FREE_DECODE_ROW,
    CLEAR_DECODE_ROWS,
    Need(_TRANSFER, "prepare_abort"),
    Need(_TRANSFER, "TransferBackend.FAKE"),
    Need(_TRANSFER, "KVClassType.RECEIVER"),
    Need("sglang.srt.disaggregation.base", "KVPoll.Failed"),
    *(
        Need(_RECEIVER, f"CommonKVReceiver.{name}")
        for name in ("send_metadata", "poll", "abort", "ensure_abort_notified", "clear", "failure_exception")
    ),
    *(Need(_RECEIVER, f"CommonKVManager.{name}") for name in ("record_failure", "update_status")),
)

_SRT = "sglang.srt."
# By module, the names of which existence is all that we need.
_NAMES = {
    "plugins.hook_registry": ("HookRegistry.register", "HookRegistry.apply_hooks", "HookType.AROUND"),
    "layers.attention.attention_registry": ("ATTENTION_BACKENDS",),
    "layers.attention.base_attn_backend": ("AttentionBackend.init_forward_metadata",),
    "layers.logits_processor": ("LogitsProcessor",),
    "arg_groups.overrides": ("declare_resolution", "resolving_view", "attention_backends_of", "model_config_of"),
    "model_executor.cuda_graph_config": ("with_phase", "Phase.ALL", "Backend.DISABLED", "Backend.FULL"),
    "configs.model_config": ("AttentionArch.MHA",),
    "environ": ("envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING",),
    "runtime_context": ("get_context", "get_disagg", "get_parallel"),
    "mem_cache.memory_pool": ("KVCache",),
    "managers.schedule_batch": ("FINISH_ABORT", "ScheduleBatch.decoding_reqs"),
    "session.streaming_session": ("StreamingSession.release_session",),
}

NEEDS = (
    RESOLVE_POOL,
    BUILD_POOL,
    FUSED_KV_WRITE,
    RUN_BATCH,
    CHECK_PROMPT,
    FREE_ROWS,
    CLEAR_ROWS,
    MATCH_SESSION,
    END_TURN,
    END_CHUNKED,
    Need(_SRT + "plugins.hook_registry", "HookSource", ("plugin_name", "dist_name")),
    Need(_SRT + "layers.attention.attention_registry", "register_attention_backend", ("name",)),
    Need(
        _SRT + "layers.attention.base_attn_backend",
        "AttentionBackend.init_forward_metadata_out_graph",
        ("self", "forward_batch", "in_capture"),
    ),
    Need(_SRT + "mem_cache.host_memory", "available_host_memory_bytes", ("allow_cgroup_fallback",)),
    Need(_SRT + "models.utils", "get_token_to_kv_pool", ()),
    Need(_SRT + "layers.quantization.unquant", "UnquantizedLinearMethod.apply", ("self", "layer", "x", "bias")),
    Need(_SRT + "layers.quantization.unquant", "UnquantizedEmbeddingMethod.apply", ("self", "layer", "x", "bias")),
    Need(_SRT + "layers.logits_processor", "should_apply_lm_head_quant_method", ("lm_head", "quant_method")),
    Need("sglang.kernels.fused_op", "BaseFusedOp.register_oot_forward", ("op_cls", "fn", "platform_key")),
    Need(
        _SRT + "layers.layernorm",
        "RMSNorm.forward_native",
        ("self", "x", "residual", "post_residual_addition", "quant_linear"),
    ),
    Need(_SRT + "layers.activation", "SiluAndMul.forward_native", ("self", "x")),
    Need(
        _SRT + "layers.rotary_embedding.base",
        "RotaryEmbedding.forward_native",
        ("self", "positions", "query", "key", "offsets", "fused_set_kv_buffer_arg"),
    ),
    *(Need(_SRT + module, name) for module, names in _NAMES.items() for name in names),
)


def import_sglang() -> str | None:
    """Import SGLang as a server process does, which activates the plug-in; None, or why that fails."""
    try:
        importlib.import_module("sglang.srt.server_args")
    except Exception as error:
        return f"SGLang itself does not import ({type(error).__name__}: {error}); reinstall it."
    return None


def sglang_version() -> str:
    """The installed version; raises CompatError when there is none."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        raise CompatError(f"sglang is not installed; install it with: pip install '{REQUIREMENT}'") from None


def _release(version: str) -> tuple[int, ...]:
    """The release alone: a pre-release of the next version already has that version's insides."""
    from packaging.version import InvalidVersion, Version

    try:
        return (*Version(version).release, 0, 0)[:3]
    except InvalidVersion:
        return (0, 0, 0)


def version_problem(version: str) -> str | None:
    """None, or one sentence on why this version of SGLang is not supported."""
    if _OLDEST <= _release(version) <= _NEWEST or version == os.environ.get(_ACCEPT):
        return None
    return (
        f"--enable-fluxion works with SGLang {SUPPORTED}, and this is {version}; install a supported version "
        f"(pip install '{REQUIREMENT}') or leave the option out."
    )


def cpu_ranks_problem(version: str) -> str | None:
    """None, or why this SGLang cannot divide a model among ranks on a CPU; the sentence says which can."""
    lacks = "cannot divide a model among processes on a CPU, because it sets up NCCL there, too"
    return _too_old(version, _CPU_RANKS, lacks, "use --tp-size 1 and --pp-size 1")


def ngram_problem(version: str) -> str | None:
    """None, or why this SGLang cannot decode speculatively on a CPU; the sentence says which can."""
    lacks = "has no place for the worker of a speculative algorithm on a CPU"
    return _too_old(version, _NGRAM_SINCE, lacks, "leave --speculative-algorithm out")


def disk_problem(version: str) -> str | None:
    """None, or why this SGLang cannot keep KV in files; the sentence says which can."""
    lacks = "has no place for an external cache of our own, which disk needs"
    return _too_old(version, _DISK_SINCE, lacks, "leave the key out")


def transfer_problem(version: str) -> str | None:
    """None, or why KV from another server cannot go into a host pool with this SGLang; the sentence says which can."""
    lacks = "has another way of taking over KV that another server computed"
    return _too_old(version, _TRANSFER_SINCE, lacks, "use --disaggregation-mode null")


def _too_old(version: str, since: tuple[int, ...], lacks: str, instead: str) -> str | None:
    if _release(version) >= since:
        return None
    return f"SGLang {version} {lacks}; install sglang {'.'.join(map(str, since))}, or {instead}."


def problems(needs: tuple[Need, ...] = NEEDS) -> Iterator[str]:
    """Every reason, a sentence each, why the plug-in cannot work with the installed SGLang."""
    if (problem := version_problem(sglang_version())) is not None:
        yield problem
    if activation_problem is not None:
        yield activation_problem
    for need in needs:
        if (problem := need.problem()) is not None:
            yield _misfit(problem)


def check(needs: tuple[Need, ...] = NEEDS) -> None:
    """Raise CompatError with the first problem, if there is one."""
    for problem in problems(needs):
        raise CompatError(problem)


def missing(what: str) -> CompatError:
    """The error for something of SGLang's (an option, an attribute) that is not there under its name."""
    return CompatError(_misfit(f"{what} does not exist"))


def _misfit(problem: str) -> str:
    return (
        f"--enable-fluxion does not fit this SGLang {sglang_version()}, because {problem}; "
        f"reinstall SGLang {SUPPORTED} or leave the option out."
    )


def is_applied(need: Need, hook: Callable[..., Any]) -> bool:
    """Whether `hook` is in the chain of wrappers of the named function."""
    value: Any = importlib.import_module(need.module)
    for part in need.name.split("."):
        value = getattr(value, part)
    while value is not None:
        if any(_content(cell) is hook for cell in getattr(value, "__closure__", None) or ()):
            return True
        value = getattr(value, "__wrapped__", None)
    return False


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None
