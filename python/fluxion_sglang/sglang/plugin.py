"""The hooks on SGLang's insides: what `HOOKS` names, each with its reason in docs/hooks.md.

They go in, and the attention backend with them, when a process installs a configuration that has the flag
(see `server_fields`), not before: without the flag SGLang's functions are SGLang's own. What they do is in
`pools`, `failures`, `requests`, `prompts`, `rows`, `sessions` and `backend`, imported when first needed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fluxion_sglang.sglang import compat
from fluxion_sglang.sglang.hooking import assert_applied, enabled_here, put_in


def _resolve_memory_pool_config(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    if not self.server_args.enable_fluxion:
        return original(self, *args, **kwargs)
    from fluxion_sglang.sglang import pools

    return pools.resolve_memory_pool_config(original, self, *args, **kwargs)


def _build_token_to_kv_pool(original: Callable[..., Any], self: Any, **kwargs: Any) -> Any:
    if not self.server_args.enable_fluxion:
        return original(self, **kwargs)
    from fluxion_sglang.sglang import pools

    return pools.build_token_to_kv_pool(original, self, **kwargs)


def _enable_fused_set_kv_buffer(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not enabled_here():
        return original(*args, **kwargs)
    from fluxion_sglang.sglang import pools

    return pools.enable_fused_set_kv_buffer(original, *args, **kwargs)


def _forward_batch_generation(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    if not enabled_here():
        return original(self, *args, **kwargs)
    from fluxion_sglang.sglang import failures, requests

    run = partial(requests.forward_batch_generation, original)
    return failures.forward_batch_generation(run, self, *args, **kwargs)


def _validate_one_request(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    if not enabled_here():
        return original(self, *args, **kwargs)
    from fluxion_sglang.sglang import prompts

    return prompts.validate_one_request(original, self, *args, **kwargs)


def _free_rows(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    from fluxion_sglang.sglang import rows

    return rows.free_rows(original, self, *args, **kwargs) if enabled_here() else original(self, *args, **kwargs)


def _clear_rows(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    from fluxion_sglang.sglang import rows

    return rows.clear(original, self, *args, **kwargs) if enabled_here() else original(self, *args, **kwargs)


def _try_match_prefix(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    if not enabled_here():
        return original(self, *args, **kwargs)
    from fluxion_sglang.sglang import sessions

    return sessions.try_match_prefix(original, self, *args, **kwargs)


def _make_backend(runner: Any) -> Any:
    from fluxion_sglang.sglang.backend import FluxionAttnBackend

    assert_hooks_applied()
    return FluxionAttnBackend(runner)


HOOKS: dict[compat.Need, Callable[..., Any]] = {
    compat.RESOLVE_POOL: _resolve_memory_pool_config,
    compat.BUILD_POOL: _build_token_to_kv_pool,
    compat.FUSED_KV_WRITE: _enable_fused_set_kv_buffer,
    compat.RUN_BATCH: _forward_batch_generation,
    compat.CHECK_PROMPT: _validate_one_request,
    compat.FREE_ROWS: _free_rows,
    compat.CLEAR_ROWS: _clear_rows,
    compat.MATCH_SESSION: _try_match_prefix,
}


def load() -> None:
    """Entry point of the group `sglang.srt.plugins`.

    SGLang calls it at the start of a process, as a rule before the process knows its options; there is
    nothing to do then. A process that has its options already gets its hooks here.
    """
    if enabled_here():
        install()


def install_if_enabled(config: Any) -> bool:
    """SGLang's call when a process installs its configuration; the answer is kept as `fluxion.hooked`.

    Raises:
        CompatError: the flag is on, and a name that the hooks need is not there.
    """
    if not config.enable_fluxion:
        return False
    install()
    return True


def install() -> None:
    """Put the hooks in; a second call changes nothing. Raises CompatError, and leaves SGLang as it was."""
    compat.check()
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

    put_in(HOOKS)
    if compat.BACKEND not in ATTENTION_BACKENDS:
        register_attention_backend(compat.BACKEND)(_make_backend)
    assert_hooks_applied()


def assert_hooks_applied() -> None:
    """Raise CompatError unless every hook is in place: SGLang logs a hook that fails and goes on."""
    assert_applied(HOOKS)
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    if compat.BACKEND not in ATTENTION_BACKENDS:
        raise compat.CompatError(
            f"--enable-fluxion could not register the attention backend {compat.BACKEND!r}; see the log."
        )
