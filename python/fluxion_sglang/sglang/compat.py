"""Names of SGLang that this plug-in needs, checked before they are used.

The checks run, and can fail, only if the server was started with --enable-fluxion.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

_RELEASE = (0, 5, 23)
SUPPORTED = "{}.{}.{}".format(*_RELEASE)
REQUIREMENT = "sglang>={}.{}.{},<{}.{}.{}".format(*_RELEASE, *_RELEASE[:2], _RELEASE[2] + 1)
"""The requirement for pip, as in pyproject.toml; documentation pages quote it."""

_ACCEPT = "FLUXION_ACCEPT_SGLANG"
"""Environment variable with one more accepted version; `make test-sglang` uses it to try new versions."""

BACKEND = "fluxion"
"""The name of the attention backend."""

INT8_WEIGHTS = "fluxion-int8"
"""The value of --quantization for `weights/rounding.py`."""

# Why the bootstrap failed, or None. A failure must not stop an SGLang that does not use Fluxion.
activation_problem: str | None = None


class CompatError(RuntimeError):
    """The installed SGLang does not fit the plug-in. The message is one sentence."""


@dataclass(frozen=True)
class Need:
    """A name of SGLang that is used here.

    Attributes:
        module, name: its module and its name there; `name` may have dots (a method).
        parameters: exact parameter names of a function that is wrapped or called by keyword, else None.
    """

    module: str
    name: str
    parameters: tuple[str, ...] | None = None

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"

    def problem(self) -> str | None:
        """None, or what is wrong with the name, in a few words."""
        try:
            value: Any = importlib.import_module(self.module)
        except ImportError as error:
            return f"the module {self.module} does not import ({error})"
        for part in self.name.split("."):
            if not hasattr(value, part):
                return f"{self.path} does not exist"
            value = getattr(value, part)
        if self.parameters is not None:
            # Unwrap: another plug-in may also have hooked the function.
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
_LOADER = "sglang.srt.model_loader.loader"
GGUF_NAMES = Need(_LOADER, "GGUFModelLoader._get_gguf_weights_map", ("self", "model_config"))
GGUF_WEIGHTS = Need(
    _LOADER, "GGUFModelLoader._get_weights_iterator", ("self", "model_name_or_path", "gguf_to_hf_name_map")
)
GGUF_MODEL = Need(_LOADER, "GGUFModelLoader.load_model", ("self", "model_config", "device_config"))
GGUF_ABSENT = Need(
    "sglang.srt.model_loader.weight_utils", "get_gguf_extra_tensor_names", ("gguf_file", "gguf_to_hf_name_map")
)
WEIGHTS = Need(
    _LOADER,
    "DefaultModelLoader._get_weights_iterator",
    ("self", "source", "resolved_source", "startup_prefetch_started", "startup_prefetch_active"),
)
_TOKENIZER = "sglang.srt.managers.tokenizer_manager"
CHECK_PROMPT = Need(_TOKENIZER, "TokenizerManager._validate_one_request", ("self", "obj", "input_ids"))
MAKE_SCHEDULER = Need("sglang.srt.managers.scheduler", "Scheduler.__init__")
AWAIT_SCHEDULERS = Need(
    "sglang.srt.entrypoints.engine", "_wait_for_scheduler_ready", ("scheduler_pipe_readers", "scheduler_procs")
)
_SCHEDULER = "sglang.srt.managers.scheduler"
END_CHUNKED = Need(_SCHEDULER, "Scheduler.process_pending_chunked_abort", ("self",))
_TABLE = "sglang.srt.mem_cache.memory_pool"
FREE_ROWS = Need(_TABLE, "ReqToTokenPool.free_rows", ("self", "indices"))
CLEAR_ROWS = Need(_TABLE, "ReqToTokenPool.clear", ("self",))
MAKE_LORA = Need("sglang.srt.lora.lora_manager", "LoRAManager.__init__")
_SESSION = "sglang.srt.session.streaming_session"
MATCH_SESSION = Need(_SESSION, "StreamingSession.try_match_prefix", ("self", "params"))
END_TURN = Need(_SESSION, "StreamingSession.try_cache_finished_req", ("self", "req"))

# Functions that the hooks of `containment/` replace.
COUNT_ANSWERS = Need("sglang.srt.managers.io_struct", "GenerateReqInput.normalize_batch_and_arguments", ("self",))
NAME_REQUEST = Need(_TOKENIZER, "TokenizerManager._init_req_state", ("self", "obj", "request"))
MAKE_MESSAGE = Need(
    _TOKENIZER,
    "TokenizerManager._create_tokenized_object",
    ("self", "obj", "input_text", "input_ids", "input_embeds", "mm_inputs", "token_type_ids"),
)
_CONTROL = "sglang.srt.managers.tokenizer_control_mixin"
GENERATE = Need(_TOKENIZER, "TokenizerManager.generate_request", ("self", "obj", "request"))
_OLLAMA = "sglang.srt.entrypoints.ollama.serving"
OLLAMA_GENERATE = Need(_OLLAMA, "OllamaServing.handle_generate", ("self", "request", "raw_request"))
OLLAMA_CHAT = Need(_OLLAMA, "OllamaServing.handle_chat", ("self", "request", "raw_request"))
RELEASE_MEMORY = Need(_CONTROL, "TokenizerControlMixin.release_memory_occupation", ("self", "obj", "request"))
RESUME_MEMORY = Need(_CONTROL, "TokenizerControlMixin.resume_memory_occupation", ("self", "obj", "request"))
HAND_OVER = Need(_TOKENIZER, "TokenizerManager._handle_batch_output", ("self", "recv_obj"))
TOKENIZER_LOOP = Need(_TOKENIZER, "TokenizerManager.handle_loop", ("self",))
DETOKENIZE = Need(
    "sglang.srt.managers.detokenizer_manager",
    "DetokenizerManager.handle_batch_token_id_out",
    ("self", "recv_obj"),
)
MAKE_REQUEST = Need(_SCHEDULER, "Scheduler._create_generation_req", ("self", "recv_req", "args", "kwargs"))
ANSWER_ABORT = Need(_SCHEDULER, "Scheduler.send_abort_output", ("self", "abort_req", "req"))
TAKE_IN = Need(_SCHEDULER, "Scheduler.process_input_requests", ("self", "recv_reqs"))
ABORT = Need(_SCHEDULER, "Scheduler.abort_request", ("self", "recv_req"))
IDLE = Need(_SCHEDULER, "Scheduler.on_idle", ("self",))
LOOP = Need(_SCHEDULER, "dispatch_event_loop", ("scheduler",))
_POLICY = "sglang.srt.managers.schedule_policy"
SORT_QUEUE = Need(
    _POLICY, "SchedulePolicy.calc_priority", ("self", "waiting_queue", "running_batch", "processed_tokens")
)
ADMIT = Need(_POLICY, "PrefillAdder.add_one_req", ("self", "req", "has_chunked_req", "truncation_align_size"))
PLAN_PREFILL = Need(_SCHEDULER, "Scheduler.get_new_batch_prefill", ("self", "running_batch"))
CHUNK_LIMIT = Need(
    _POLICY,
    "SchedulePolicy.shortest_prefill_chunk_limit",
    ("self", "chunked_req", "waiting_queue", "budget", "page_size"),
)
SEND_OUTPUT = Need(
    "sglang.srt.managers.scheduler_components.output_streamer",
    "SchedulerOutputStreamer.stream_output",
    ("self", "reqs", "return_logprob", "skip_req"),
)
LOGITS = Need("sglang.srt.layers.sampler", "Sampler._preprocess_logits", ("self", "logits", "sampling_info"))
ACCEPT_TOKEN = Need("sglang.srt.constrained.xgrammar_backend", "XGrammarGrammar.accept_token", ("self", "token"))
KEEP_GRAMMAR = Need(
    "sglang.srt.constrained.base_grammar_backend", "BaseGrammarBackend.set_cache", ("self", "key", "value")
)
CONTAINMENT = (
    *(
        COUNT_ANSWERS,
        NAME_REQUEST,
        GENERATE,
        OLLAMA_GENERATE,
        OLLAMA_CHAT,
        MAKE_MESSAGE,
        RELEASE_MEMORY,
        RESUME_MEMORY,
        HAND_OVER,
        TOKENIZER_LOOP,
        DETOKENIZE,
    ),
    *(MAKE_REQUEST, ANSWER_ABORT, TAKE_IN, ABORT, IDLE, LOOP, SORT_QUEUE, ADMIT, SEND_OUTPUT, LOGITS, ACCEPT_TOKEN),
    KEEP_GRAMMAR,
)

# For layers with a state per request (`states.py`), checked if a model has them.
_HYBRID = "sglang.srt.layers.attention.hybrid_linear_attn_backend"
_DELTA_RULE = "sglang.srt.layers.attention.linear.gdn_backend"
STATE_NEEDS = (
    Need(_CONFIGURATOR, "KVCacheConfigurator._calculate_mamba_ratio", ("self",)),
    Need(_DELTA_RULE, "TritonGDNKernel"),
    Need(_DELTA_RULE, "causal_conv1d_fn"),
    Need(_DELTA_RULE, "causal_conv1d_update"),
    Need(_DELTA_RULE, "fused_gdn_gating"),
    Need(_HYBRID, "HybridLinearAttnBackend"),
    Need(_HYBRID, "track_mamba_states_all_layers"),
    Need(_HYBRID, "track_mamba_states_if_needed"),
    Need("sglang.srt.layers.attention.linear.kernels.kernel_backend", "LinearAttnKernelBase.extend"),
)

# For NGRAM speculative decoding on a CPU (`speculation.py`), checked if the server uses it.
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

# For KV that outlives the server (`disk.py`), checked if the server uses it.
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

# For prompts that another server prefills (`transfer.py`), checked if the server uses it.
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
# Names by module that only have to exist.
_NAMES = {
    "plugins.hook_registry": ("HookRegistry.register", "HookRegistry.apply_hooks", "HookType.AROUND"),
    "layers.attention.attention_registry": ("ATTENTION_BACKENDS",),
    "layers.attention.base_attn_backend": ("AttentionBackend.init_forward_metadata",),
    "layers.logits_processor": ("LogitsProcessor",),
    "layers.moe.fused_moe_triton": ("FusedMoE",),
    "layers.moe.token_dispatcher": ("StandardCombineInput", "StandardDispatchOutput"),
    "layers.moe.topk": ("TopKOutputChecker.format_is_standard",),
    "arg_groups.overrides": ("declare_resolution", "resolving_view", "attention_backends_of", "model_config_of"),
    "model_executor.cuda_graph_config": ("with_phase", "Phase.ALL", "Backend.DISABLED", "Backend.FULL"),
    "configs.model_config": ("AttentionArch.MHA",),
    "configs.model_config_parser_registry": ("ModelConfigParserBase", "register_model_config_parser"),
    "environ": ("envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING",),
    "utils.hf_transformers.config": ("HfModelConfigParser.parse",),
    "utils.hf_transformers_utils": ("get_hf_text_config",),
    "runtime_context": ("get_context", "get_disagg", "get_model", "get_parallel"),
    "mem_cache.memory_pool": ("KVCache",),
    "managers.schedule_batch": (
        *("FINISH_ABORT", "ScheduleBatch.decoding_reqs", "Req.reset_for_retract", "ReqKvInfo", "release_req", "re"),
    ),
    "managers.tokenizer_manager": ("_REQUEST_STATE_WAIT_TIMEOUT",),
    "managers.scheduler": ("_make_abort_req", "Scheduler._release_aborted_request"),
    "managers.schedule_policy": ("AddReqResult.OTHER", "CLIP_MAX_NEW_TOKENS"),
    "managers.io_struct": ("msgpack_encode", "msgpack_decode", "AbortReq", "SlowDownReqInput"),
    "managers.scheduler_components.invariant_checker": ("SchedulerInvariantChecker._check_all_pools",),
    "mem_cache.common": ("release_kv_cache", "match_kv_cache"),
    "sampling.sampling_params": ("TOP_K_ALL",),
    "constants": ("HEALTH_CHECK_RID_PREFIX",),
    "model_executor.model_runner_components.weight_updater": ("_unsupported_derived_weight_cache_error",),
    "session.streaming_session": ("StreamingSession.release_session",),
    # For quantised checkpoints (`weights/quantised_checkpoints.py`).
    "layers.linear": ("LinearBase.scheme",),
    "layers.parameter": ("BasevLLMParameter.load_merged_column_weight",),
    "layers.vocab_parallel_embedding": ("ParallelLMHead.scheme",),
    "layers.quantization": ("QUANTIZATION_METHODS",),
    "layers.quantization.base_scheme": ("BaseLinearScheme.requires_weight_loader_v2",),
    "layers.quantization.auto_round": ("AutoRoundConfig.get_quant_method",),
    "layers.quantization.awq": ("AWQConfig.get_quant_method", "AWQLinearMethod"),
    "layers.quantization.awq.schemes": ("AWQLinearScheme.create_weights", "AWQLinearScheme._init_kernel"),
    "layers.quantization.gptq.gptq": ("GPTQConfig.get_quant_method", "GPTQLinearMethod"),
    "layers.quantization.gptq.schemes": ("GPTQLinearScheme.create_weights", "GPTQLinearScheme._init_kernel"),
    "layers.quantization.compressed_tensors.compressed_tensors": (
        *("CompressedTensorsLinearMethod", "CompressedTensorsConfig._check_scheme_supported"),
    ),
    "layers.quantization.compressed_tensors.schemes": (
        *("CompressedTensorsW8A8Int8.create_weights", "CompressedTensorsWNA16.create_weights"),
    ),
}

NEEDS = (
    *CONTAINMENT,
    PLAN_PREFILL,
    CHUNK_LIMIT,
    Need(
        _SCHEDULER,
        "Scheduler.get_num_allocatable_reqs",
        ("self", "running_bs", "beam_width", "running_batch", "num_held_rows"),
    ),
    Need(_SRT + "constrained.grammar_manager", "GrammarManager.has_waiting_grammars", ("self",)),
    RESOLVE_POOL,
    BUILD_POOL,
    FUSED_KV_WRITE,
    RUN_BATCH,
    CHECK_PROMPT,
    GGUF_NAMES,
    GGUF_WEIGHTS,
    GGUF_MODEL,
    GGUF_ABSENT,
    WEIGHTS,
    MAKE_LORA,
    Need("sglang.srt.lora.backend.torch_backend", "TorchNativeLoRABackend"),
    FREE_ROWS,
    CLEAR_ROWS,
    MATCH_SESSION,
    END_TURN,
    END_CHUNKED,
    MAKE_SCHEDULER,
    AWAIT_SCHEDULERS,
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
    Need(
        _SRT + "layers.quantization.unquant",
        "UnquantizedFusedMoEMethod.forward_native",
        ("self", "layer", "dispatch_output"),
    ),
    Need(
        _SRT + "layers.moe.fused_moe_native",
        "moe_forward_native",
        ("layer", "x", "topk_output", "moe_runner_config"),
    ),
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
    Need(
        _SRT + "layers.quantization.compressed_tensors.compressed_tensors",
        "CompressedTensorsConfig._get_scheme_from_parts",
        ("self", "weight_quant", "input_quant", "format"),
    ),
    *(Need(_SRT + module, name) for module, names in _NAMES.items() for name in names),
)


def import_sglang() -> str | None:
    """Import SGLang like a server process, which activates the plug-in. Returns None, or why that fails."""
    try:
        importlib.import_module("sglang.srt.server_args")
    except Exception as error:
        return f"SGLang itself does not import ({type(error).__name__}: {error}); reinstall it."
    return None


def sglang_version() -> str:
    """The installed version. Raises CompatError if there is none."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        raise CompatError(f"sglang is not installed; install it with: pip install '{REQUIREMENT}'") from None


def _release(version: str) -> tuple[int, ...]:
    """The release number. A pre-release counts as the version that it precedes, because its code is that version's."""
    from packaging.version import InvalidVersion, Version

    try:
        return (*Version(version).release, 0, 0)[:3]
    except InvalidVersion:
        return (0, 0, 0)


def version_problem(version: str) -> str | None:
    """None, or one sentence on why this version of SGLang is not supported."""
    if _release(version) == _RELEASE or version == os.environ.get(_ACCEPT):
        return None
    return (
        f"--enable-fluxion works with SGLang {SUPPORTED}, and this is {version}; install a supported version "
        f"(pip install '{REQUIREMENT}') or leave the option out."
    )


def problems(needs: tuple[Need, ...] = NEEDS) -> Iterator[str]:
    """The reasons, one sentence each, why the plug-in cannot work with the installed SGLang."""
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
    """The error for an option or attribute of SGLang that does not exist under its name."""
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
