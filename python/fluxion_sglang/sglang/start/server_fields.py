"""Adds the two options as fields of SGLang's ServerArgs.

SGLang assembles ServerArgs from namespace Structs when `sglang.srt.server_args` is imported. A Struct added before
that works like SGLang's own: command line, `--config` YAML, `sgl.Engine(...)`, pickling to spawned processes.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Optional

import msgspec
from sglang.srt.arg_groups import fields
from sglang.srt.arg_groups.arg_utils import A, Arg, Derived


class Fluxion(msgspec.Struct):
    """Namespace `fluxion`."""

    _NS_PATH = "fluxion"

    enable_fluxion: A[
        bool,
        "Keep the KV cache in host memory and only sinks and a window of every request on the device (Fluxion).",
    ] = False
    fluxion_config: A[
        # Optional[str], as in SGLang's own namespaces: its command-line deriver reads this spelling.
        Optional[str],  # noqa: UP045
        Arg(
            help="Options of --enable-fluxion: a JSON object, or @file.json. All keys have defaults.",
            # A YAML --config may contain the object itself; SGLang's merger passes it on as text.
            type_parser=str,
        ),
    ] = None

    # SGLang computes this once in every process that installs a configuration, before it builds a model runner. It is
    # the first moment at which a process knows the flag, so the hooks are installed here, and only with the flag.
    hooked = Derived(
        doc="Whether Fluxion's hooks are in this process.",
        fn="fluxion_sglang.sglang.plugin.install_if_enabled",
    )


def install() -> None:
    """Add the namespace. Raises RuntimeError if `sglang.srt.server_args` is already imported."""
    if "sglang.srt.server_args" in sys.modules:
        raise RuntimeError("sglang.srt.server_args was imported before the plug-in was activated")
    if getattr(fields.collect_input_fields, "_fluxion", False):
        return
    original = fields.collect_input_fields

    @functools.wraps(original)
    def collect_input_fields(sources: list[type]) -> Any:
        # Extend the list in place, because the same object becomes ServerArgs._NAMESPACES.
        if Fluxion not in sources:
            sources.append(Fluxion)
        return original(sources)

    collect_input_fields._fluxion = True  # type: ignore[attr-defined]
    fields.collect_input_fields = collect_input_fields
