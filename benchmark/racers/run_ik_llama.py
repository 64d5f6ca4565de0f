"""ik_llama.cpp, the fork of llama.cpp with kernels of its own for CPUs, by the bindings of ik-llama-cpp-python.

Options: file (of the checkpoint's GGUF files).
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from driver import Plan, run
from ggml import BATCH, KV_TYPES, Ggml
from ik_llama_cpp import _ctypes_api
from ik_llama_cpp._lib_loader import load_shared_library


class IkLlama(Ggml):
    def open(self, plan: Plan, tokens: int) -> tuple[Any, dict[str, Any]]:
        api = self._api
        self._library = load_shared_library()
        self._kept: ctypes.Array[ctypes.c_char] | None = None
        params = api.llama_model_default_params()
        params.n_gpu_layers = 0
        model = api.llama_model_load_from_file(str(Path(plan.model) / plan.options["file"]).encode(), params)
        if not model:
            raise SystemExit("ik_llama.cpp did not load the model")
        wanted = api.llama_context_default_params()
        wanted.n_seq_max = plan.batches[0]
        wanted.n_ctx = plan.batches[0] * tokens  # one buffer of all sequences: it has no other kind
        wanted.n_batch = BATCH
        wanted.n_threads = wanted.n_threads_batch = plan.threads
        wanted.type_k = wanted.type_v = KV_TYPES["f16"]
        wanted.flash_attn = True
        context = api.llama_init_from_model(model, wanted)
        if not context:
            raise SystemExit("ik_llama.cpp made no context")
        self._handle = ctypes.c_void_p(context)
        built_for = "this machine" if "IK_LLAMA_CPP_LIB_PATH" in os.environ else "AVX2"
        return context, {"n_ubatch": wanted.n_ubatch, "kv": "f16", "flash_attention": True, "built_for": built_for}

    def copy(self, sequence: int) -> None:
        """By a saved state: its own copy of a sequence shares the memory."""
        library = self._library
        if self._kept is None:
            library.llama_state_seq_get_size.restype = ctypes.c_size_t
            size = library.llama_state_seq_get_size(self._handle, 0, 0)
            self._kept = ctypes.create_string_buffer(size)
            library.llama_state_seq_get_data.restype = ctypes.c_size_t
            library.llama_state_seq_get_data(self._handle, self._kept, ctypes.c_size_t(size), 0, 0)
        library.llama_state_seq_set_data.restype = ctypes.c_size_t
        size = ctypes.c_size_t(len(self._kept))
        if not library.llama_state_seq_set_data(self._handle, self._kept, size, sequence, 0):
            raise SystemExit("ik_llama.cpp did not copy a sequence")

    def clear(self) -> None:
        self._kept = None
        self._api.llama_kv_cache_clear(self._context)


if __name__ == "__main__":
    run(IkLlama(_ctypes_api))
