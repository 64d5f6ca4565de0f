"""Puts hooks around SGLang's functions, and tells whether this process needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fluxion_sglang.sglang import compat

Hooks = Mapping[compat.Need, Callable[..., Any]]


def enabled_here() -> bool:
    """Whether this process has installed a configuration with the flag."""
    from sglang.srt.runtime_context import get_context

    try:
        return bool(get_context().server_args.enable_fluxion)
    except ValueError:  # no configuration is installed
        return False


def attention_of(runner: Any) -> Any:
    """A model runner's attention backend. SGLang wraps it if other layers keep states."""
    backend = runner.attn_backend
    return getattr(backend, "full_attn_backend", backend)


def put_in(hooks: Hooks) -> None:
    """Call each hook in place of its function, with the function as the first argument. A second call changes
    nothing."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    source = HookSource(plugin_name="fluxion", dist_name="fluxion-sglang")
    absent = {need: hook for need, hook in hooks.items() if not compat.is_applied(need, hook)}
    for need, hook in absent.items():
        HookRegistry.register(need.path, hook, HookType.AROUND, source=source)
    if absent:
        HookRegistry.apply_hooks()


def assert_applied(hooks: Hooks) -> None:
    """Raise CompatError unless every hook is in place, because SGLang only logs a hook that fails."""
    for need, hook in hooks.items():
        if not compat.is_applied(need, hook):
            raise compat.CompatError(
                f"--enable-fluxion could not hook {need.path}, which another plug-in may have taken first; "
                "see the log for 'Failed to apply hooks', and name the plug-ins to load in SGLANG_PLUGINS."
            )
