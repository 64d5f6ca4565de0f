"""Parses and checks the --fluxion-config of a server, once a process."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

from fluxion_sglang.config import ConfigError, FluxionConfig
from fluxion_sglang.policy import AUTO, Policy, check_spec
from fluxion_sglang.sglang.memory import capacity


def options_of(server_args: Any, *, again: bool = False) -> FluxionConfig:
    """The options of a server, from ServerArgs or one of SGLang's views of them.

    Args:
        again: read them again for a new server, because the file that they name may have changed.

    Raises:
        ConfigError: one sentence that names the key and its legal values.
    """
    if again:
        _read.cache_clear()
    return _read(server_args.fluxion_config)


def rank_options(server_args: Any) -> FluxionConfig:
    """The options of one rank.

    `host_memory_gb` is for all ranks of the host together. `--max-total-tokens`, SGLang's own option for the capacity
    in tokens, is the default of `host_tokens`.
    """
    config = options_of(server_args)
    if config.host_memory_gb is not None:
        return dataclasses.replace(config, host_memory_gb=config.host_memory_gb / capacity.ranks_on_host(server_args))
    if config.host_tokens is None and server_args.max_total_tokens is not None:
        return dataclasses.replace(config, host_tokens=server_args.max_total_tokens)
    return config


@lru_cache(maxsize=1)
def _read(text: str | None) -> FluxionConfig:
    config = FluxionConfig.parse(text)
    named = None
    try:
        if config.policy != AUTO:
            named = check_spec(config.policy)
    except ValueError as error:
        raise ConfigError(f'{str(error).rstrip(".")}; or "{AUTO}".') from None
    _check_sketches(config.policy, named, config)
    for spec in config.request_policies if isinstance(config.request_policies, list) else ():
        try:
            policy = check_spec(spec)
        except ValueError as error:
            raise ConfigError(f"in request_policies, {error}") from None
        _check_sketches(spec, policy, config)
        if policy is not None and policy.yardstick and config.audit is None and spec != config.policy:
            raise ConfigError(
                f"request_policies has {spec!r}, which reads everything to decide, and requests may name such a policy "
                "only where the option audit is set; set it, or leave the policy out."
            )
    return config


def _check_sketches(spec: str, policy: Policy | None, config: FluxionConfig) -> None:
    if policy is not None and policy.sketches and not config.sketched:
        raise ConfigError(
            f"the policy {spec!r} reads sketches of keys, and the host pool keeps none; set sketches to true, or leave "
            "the policy out."
        )
