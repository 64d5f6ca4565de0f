"""llama.cpp by the low-level interface of llama-cpp-python.

Options: flash_attention, kv (f16 or bf16), file (of the checkpoint's GGUF files).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_cpp
from driver import Plan, run
from ggml import BATCH, KV_TYPES, Ggml


class LlamaCpp(Ggml):
    def open(self, plan: Plan, tokens: int) -> tuple[Any, dict[str, Any]]:
        api, options = self._api, plan.options
        params = api.llama_model_default_params()
        params.n_gpu_layers = 0
        model = api.llama_model_load_from_file(str(Path(plan.model) / options["file"]).encode(), params)
        if not model:
            raise SystemExit("llama.cpp did not load the model")
        wanted = api.llama_context_default_params()
        # A sequence has a buffer of its own: requests of unlike prompts share nothing.
        wanted.kv_unified = False
        wanted.n_seq_max = plan.batches[0]
        wanted.n_ctx = plan.batches[0] * tokens
        wanted.n_batch = BATCH
        wanted.n_threads = wanted.n_threads_batch = plan.threads
        wanted.type_k = wanted.type_v = KV_TYPES[options["kv"]]
        wanted.flash_attn_type = 1 if options["flash_attention"] else 0
        context = api.llama_init_from_model(model, wanted)
        if not context:
            raise SystemExit("llama.cpp made no context")
        self._memory = api.llama_get_memory(context)
        has = [part.strip().removesuffix(" = 1") for part in api.llama_print_system_info().decode().split("|")]
        settings = {"n_ubatch": wanted.n_ubatch, "kv": options["kv"], "flash_attention": options["flash_attention"]}
        return context, {**settings, "built_with": ", ".join(name for name in has if name and "=" not in name)}

    def copy(self, sequence: int) -> None:
        self._api.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)

    def clear(self) -> None:
        self._api.llama_memory_clear(self._memory, True)


if __name__ == "__main__":
    run(LlamaCpp(llama_cpp))
