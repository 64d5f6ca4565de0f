"""What this plug-in needs of SGLang, checked by name before it is used.

Nothing here runs, and nothing here can fail, unless the server was started with --enable-fluxion.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

SUPPORTED = "0.5.22 to 0.5.23"
_OLDEST, _NEWEST = (0, 5, 22), (0, 5, 23)

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
        "self",
        "batch",
        "forward_batch",
        "pp_proxy_tensors",
        "is_verify",
        "skip_attn_backend_init",
        "capture_hidden_mode",
        "return_kv_loc_plan",
    ),
)

NEEDS = (
    RESOLVE_POOL,
    BUILD_POOL,
    FUSED_KV_WRITE,
    RUN_BATCH,
    Need("sglang.srt.plugins.hook_registry", "HookRegistry.register"),
    Need("sglang.srt.plugins.hook_registry", "HookRegistry.apply_hooks"),
    Need("sglang.srt.plugins.hook_registry", "HookType.AROUND"),
    Need("sglang.srt.plugins.hook_registry", "HookSource", ("plugin_name", "dist_name")),
    Need("sglang.srt.layers.attention.attention_registry", "register_attention_backend", ("name",)),
    Need("sglang.srt.layers.attention.attention_registry", "ATTENTION_BACKENDS"),
    Need("sglang.srt.layers.attention.base_attn_backend", "AttentionBackend.init_forward_metadata"),
    Need("sglang.srt.arg_groups.overrides", "declare_resolution"),
    Need("sglang.srt.arg_groups.overrides", "resolving_view"),
    Need("sglang.srt.arg_groups.overrides", "attention_backends_of"),
    Need("sglang.srt.arg_groups.overrides", "model_config_of"),
    Need("sglang.srt.model_executor.cuda_graph_config", "with_phase"),
    Need("sglang.srt.model_executor.cuda_graph_config", "Phase.ALL"),
    Need("sglang.srt.model_executor.cuda_graph_config", "Backend.DISABLED"),
    Need("sglang.srt.model_executor.cuda_graph_config", "Backend.FULL"),
    Need(
        "sglang.srt.layers.attention.base_attn_backend",
        "AttentionBackend.init_forward_metadata_out_graph",
        ("self", "forward_batch", "in_capture"),
    ),
    Need("sglang.srt.configs.model_config", "AttentionArch.MHA"),
    Need("sglang.srt.environ", "envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"),
    Need("sglang.srt.runtime_context", "get_context"),
    Need("sglang.srt.runtime_context", "get_parallel"),
    Need("sglang.srt.mem_cache.host_memory", "available_host_memory_bytes", ("allow_cgroup_fallback",)),
    Need("sglang.srt.mem_cache.memory_pool", "KVCache"),
    Need("sglang.srt.models.utils", "get_token_to_kv_pool", ()),
    Need("sglang.srt.managers.schedule_batch", "FINISH_ABORT"),
    Need("sglang.srt.managers.schedule_batch", "ScheduleBatch.decoding_reqs"),
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
        raise CompatError("sglang is not installed; install it with: pip install 'sglang>=0.5.22,<0.5.24'") from None


def version_problem(version: str) -> str | None:
    """None, or one sentence on why this version of SGLang is not supported."""
    from packaging.version import InvalidVersion, Version

    try:
        # The release alone: a pre-release of the next version already has that version's insides.
        release = (*Version(version).release, 0, 0)[:3]
    except InvalidVersion:
        release = (0, 0, 0)
    if _OLDEST <= release <= _NEWEST:
        return None
    return (
        f"--enable-fluxion works with SGLang {SUPPORTED}, and this is {version}; install a supported version "
        "(pip install 'sglang>=0.5.22,<0.5.24') or leave the option out."
    )


def has_cpu_ranks(version: str) -> bool:
    """Whether this SGLang can divide a model among ranks on a CPU: 0.5.22 sets up NCCL whatever the device."""
    from packaging.version import Version

    return (*Version(version).release, 0, 0)[:3] >= (0, 5, 23)


def problems(needs: tuple[Need, ...] = NEEDS) -> Iterator[str]:
    """Every reason, a sentence each, why the plug-in cannot work with the installed SGLang."""
    version = sglang_version()
    if (problem := version_problem(version)) is not None:
        yield problem
    if activation_problem is not None:
        yield activation_problem
    for need in needs:
        if (problem := need.problem()) is not None:
            yield (
                f"--enable-fluxion does not fit this SGLang {version}, because {problem}; reinstall SGLang "
                f"{SUPPORTED} or leave the option out."
            )


def check() -> None:
    """Raise CompatError with the first problem, if there is one."""
    for problem in problems():
        raise CompatError(problem)


def missing(what: str) -> CompatError:
    """The error for something of SGLang's (an option, an attribute) that is not there under its name."""
    return CompatError(
        f"--enable-fluxion does not fit this SGLang {sglang_version()}, because {what} does not exist; "
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
