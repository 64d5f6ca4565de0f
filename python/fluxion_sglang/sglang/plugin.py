"""The hooks on SGLang's internals, listed in `HOOKS`; docs/dev/hooks.md explains each.

They and the attention backend are installed when a process installs a configuration with the flag (`server_fields`).
Without the flag SGLang's functions are unchanged. The modules with the hooks are imported on first use.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from fluxion_sglang.sglang import compat
from fluxion_sglang.sglang.hooking import assert_applied, enabled_here, put_in


def _ours(module: str, name: str) -> Callable[..., Any]:
    """A hook that calls a function of a module of this package, imported on first use. Without the flag it calls
    SGLang's function."""

    found: list[Callable[..., Any]] = []

    def hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not enabled_here():
            return original(*args, **kwargs)
        if not found:
            found.append(getattr(import_module(f"{__package__}.{module}"), name))
        return found[0](original, *args, **kwargs)

    return hook


def _chain(name: str, *modules: str) -> Callable[..., Any]:
    """Chain the hooks of this name in several modules around one function, the outermost first."""

    hooks = [_ours(module, name) for module in modules]

    def hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for inner in reversed(hooks):
            original = partial(inner, original)
        return original(*args, **kwargs)

    return hook


def _make_backend(runner: Any) -> Any:
    from fluxion_sglang.sglang.steps.backend import FluxionAttnBackend

    return FluxionAttnBackend(runner)


HOOKS: dict[compat.Need, Callable[..., Any]] = {
    compat.RESOLVE_POOL: _ours("memory.pools", "resolve_memory_pool_config"),
    compat.BUILD_POOL: _ours("memory.pools", "build_token_to_kv_pool"),
    compat.FUSED_KV_WRITE: _ours("memory.pools", "enable_fused_set_kv_buffer"),
    compat.RUN_BATCH: _chain("forward_batch_generation", "pacing.pacer", "containment.passes", "requests.requests"),
    compat.MAKE_LORA: _ours("steps.stand_ins", "make_lora_manager"),
    compat.FREE_ROWS: _ours("requests.rows", "free_rows"),
    compat.CLEAR_ROWS: _ours("requests.rows", "clear"),
    compat.MATCH_SESSION: _ours("requests.sessions", "try_match_prefix"),
    compat.END_TURN: _ours("requests.sessions", "try_cache_finished_req"),
    compat.MAKE_SCHEDULER: _ours("start.refusals", "make_scheduler"),
    compat.AWAIT_SCHEDULERS: _ours("start.refusals", "wait_for_schedulers"),
    compat.PLAN_PREFILL: _ours("pacing.pacer", "get_new_batch_prefill"),
    compat.CHUNK_LIMIT: _ours("pacing.pacer", "shortest_prefill_chunk_limit"),
    compat.GGUF_NAMES: _ours("weights.gguf", "get_gguf_weights_map"),
    compat.GGUF_WEIGHTS: _ours("weights.gguf", "get_weights_iterator"),
    compat.GGUF_MODEL: _ours("weights.gguf", "load_model"),
    compat.GGUF_ABSENT: _ours("weights.gguf", "get_gguf_extra_tensor_names"),
    compat.WEIGHTS: _ours("start.language_model", "get_weights_iterator"),
    # Containment (containment/__init__.py), in the order in which a request passes the rings.
    compat.GENERATE: _ours("containment.door", "generate_request"),
    compat.COUNT_ANSWERS: _ours("containment.door", "normalize_batch_and_arguments"),
    compat.NAME_REQUEST: _ours("containment.door", "init_req_state"),
    compat.OLLAMA_GENERATE: _ours("containment.door", "answer_ollama"),
    compat.OLLAMA_CHAT: _ours("containment.door", "answer_ollama"),
    compat.CHECK_PROMPT: _ours("containment.door", "validate_one_request"),
    compat.MAKE_MESSAGE: _ours("containment.door", "create_tokenized_object"),
    compat.RELEASE_MEMORY: _ours("containment.door", "no_memory_saver"),
    compat.RESUME_MEMORY: _ours("containment.door", "no_memory_saver"),
    compat.TAKE_IN: _ours("containment.arrivals", "process_input_requests"),
    compat.ABORT: _ours("containment.arrivals", "abort_request"),
    compat.MAKE_REQUEST: _ours("containment.ledger", "create_generation_req"),
    compat.ANSWER_ABORT: _ours("containment.ledger", "send_abort_output"),
    compat.SORT_QUEUE: _chain("calc_priority", "containment.suspects", "pacing.pacer"),
    compat.ADMIT: _chain("add_one_req", "containment.suspects", "pacing.pacer"),
    compat.IDLE: _ours("containment.admission", "on_idle"),
    compat.LOOP: _ours("containment.loop", "dispatch_event_loop"),
    compat.END_CHUNKED: _chain("process_pending_chunked_abort", "containment.passes", "pacing.pacer"),
    compat.LOGITS: _ours("containment.logits", "preprocess_logits"),
    compat.ACCEPT_TOKEN: _ours("containment.budgets", "accept_token"),
    compat.KEEP_GRAMMAR: _ours("containment.budgets", "set_cache"),
    compat.SEND_OUTPUT: _ours("containment.outputs", "stream_output"),
    compat.DETOKENIZE: _ours("containment.outputs", "handle_batch_token_id_out"),
    compat.TOKENIZER_LOOP: _chain("handle_loop", "pacing.pacer", "containment.outputs"),
    compat.HAND_OVER: _ours("containment.outputs", "handle_batch_output"),
}


def load() -> None:
    """Entry point of the group `sglang.srt.plugins`.

    SGLang calls it at the start of a process, usually before the process has its options; then there is nothing to do.
    A process that already has its options gets its hooks here.
    """
    if enabled_here():
        install()


def install_if_enabled(config: Any) -> bool:
    """Called by SGLang when a process installs its configuration; the result is kept as `fluxion.hooked`.

    Raises:
        CompatError: the flag is on, and a name that the hooks need is missing.
    """
    if not config.enable_fluxion:
        return False
    try:
        install()
    except compat.CompatError:
        from fluxion_sglang.sglang.start import refusals

        refusals.print_as_sentence(compat.CompatError)
        raise
    return True


def install() -> None:
    """Install the hooks; a second call changes nothing. Raises CompatError, and leaves SGLang unchanged."""
    compat.check()
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

    from fluxion_sglang.sglang.start import language_model
    from fluxion_sglang.sglang.weights import quantised_checkpoints, rounding

    rounding.register()
    quantised_checkpoints.register()
    language_model.register()
    put_in(HOOKS)
    if compat.BACKEND not in ATTENTION_BACKENDS:
        register_attention_backend(compat.BACKEND)(_make_backend)
    assert_hooks_applied()


def assert_hooks_applied() -> None:
    """Raise CompatError unless every hook is in place, because SGLang only logs a hook that fails."""
    assert_applied(HOOKS)
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    if compat.BACKEND not in ATTENTION_BACKENDS:
        raise compat.CompatError(
            f"--enable-fluxion could not register the attention backend {compat.BACKEND!r}; see the log."
        )
