"""Operators of other libraries, called as their users call them. Attention operators take q [B, H, G, D] and k, v [B,
H, n, D] bfloat16, copy them into their own layout, and compute [B, H, G, D] when called."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

import torch
from roofline import workers
from torch import Tensor


class OnnxAttention:
    """GroupQueryAttention of ONNX Runtime in float32; the last token of k and v belongs to the query."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        import onnxruntime
        from onnx import TensorProto, helper

        B, H, G, D = q.shape
        n = k.shape[2]
        names = ("query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length")
        kinds = [TensorProto.FLOAT] * 5 + [TensorProto.INT32] * 2
        results = ("output", "present_key", "present_value")
        options = {"num_heads": H * G, "kv_num_heads": H, "scale": scale}
        node = helper.make_node("GroupQueryAttention", list(names), list(results), domain="com.microsoft", **options)
        info = helper.make_tensor_value_info
        graph = helper.make_graph(
            [node],
            "attention",
            [info(name, kind, None) for name, kind in zip(names, kinds, strict=True)],
            [info(name, TensorProto.FLOAT, None) for name in results],
        )
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = workers(0).count
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")  # spinning takes cores
        self.session = onnxruntime.InferenceSession(
            model.SerializeToString(), settings, providers=["CPUExecutionProvider"]
        )

        def value(tensor: Tensor) -> Any:
            return onnxruntime.OrtValue.ortvalue_from_numpy(tensor.contiguous().numpy())

        # Past and present share one buffer, which is the usual binding: only the last token is copied.
        past = [value(part.float()) for part in (k, v)]
        last = [part[:, :, -1].float().reshape(B, 1, -1) for part in (k, v)]
        lengths = [torch.full((B,), n - 1, dtype=torch.int32), torch.tensor([n], dtype=torch.int32)]
        self.shape = q.shape
        self.out = value(torch.empty(B, 1, H * G * D))
        inputs = [value(q.float().reshape(B, 1, -1)), *map(value, last), *past, *map(value, lengths)]
        self.binding = self.session.io_binding()
        for name, held in zip(names, inputs, strict=True):
            self.binding.bind_ortvalue_input(name, held)
        for name, held in zip(results, (self.out, *past), strict=True):
            self.binding.bind_ortvalue_output(name, held)
        self.held = inputs

    def __call__(self) -> Tensor:
        self.session.run_with_iobinding(self.binding)
        return torch.from_numpy(self.out.numpy()).view(self.shape)


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class _Ggml:
    """One operation of llama.cpp on its CPU backend, from the libraries of llama-cpp-python; the result is float32."""

    F32, F16, BF16 = 0, 1, 30

    def __init__(self, nbytes: int) -> None:
        """nbytes: total bytes of all tensors."""
        spec = importlib.util.find_spec("llama_cpp")
        assert spec is not None and spec.submodule_search_locations
        folder = Path(spec.submodule_search_locations[0]) / "lib"
        base, cpu = (
            ctypes.CDLL(str(folder / f"libggml-{part}.so"), mode=ctypes.RTLD_GLOBAL) for part in ("base", "cpu")
        )
        pointer, real, wide = ctypes.c_void_p, ctypes.c_float, ctypes.c_int64
        for library, name, result, arguments in (
            (base, "ggml_init", pointer, [_InitParams]),
            (base, "ggml_new_tensor_4d", pointer, [pointer, ctypes.c_int, wide, wide, wide, wide]),
            (base, "ggml_get_data", pointer, [pointer]),
            (base, "ggml_flash_attn_ext", pointer, [*[pointer] * 5, real, real, real]),
            (base, "ggml_mul_mat", pointer, [pointer] * 3),
            (base, "ggml_new_graph", pointer, [pointer]),
            (base, "ggml_build_forward_expand", None, [pointer, pointer]),
            (base, "ggml_backend_graph_compute", ctypes.c_int, [pointer, pointer]),
            (cpu, "ggml_backend_cpu_init", pointer, []),
            (cpu, "ggml_backend_cpu_set_n_threads", None, [pointer, ctypes.c_int]),
        ):
            found = getattr(library, name)
            found.restype, found.argtypes = result, arguments
        self.base = base
        self.context = base.ggml_init(_InitParams(nbytes + (16 << 20), None, False))
        self.backend = cpu.ggml_backend_cpu_init()
        cpu.ggml_backend_cpu_set_n_threads(self.backend, workers(0).count)

    def tensor(self, part: Tensor, kind: int) -> Any:
        """A copy of a tensor with four dimensions."""
        made = self.base.ggml_new_tensor_4d(self.context, kind, *reversed(part.shape))
        ctypes.memmove(self.base.ggml_get_data(made), part.contiguous().data_ptr(), part.nbytes)
        return made

    def finish(self, out: Any, shape: torch.Size) -> None:
        """Build the graph that computes `out`. shape: of the result, without dimensions of size one."""
        self.shape = shape
        self.graph = self.base.ggml_new_graph(self.context)
        self.base.ggml_build_forward_expand(self.graph, out)
        self.out = self.base.ggml_get_data(out)

    def __call__(self) -> Tensor:
        if self.base.ggml_backend_graph_compute(self.backend, self.graph) != 0:
            raise RuntimeError("ggml could not compute this.")
        count = self.shape.numel()
        return torch.frombuffer((ctypes.c_float * count).from_address(self.out), dtype=torch.float32).view(self.shape)


class GgmlAttention(_Ggml):
    """ggml_flash_attn_ext with KV in float16."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        super().__init__(2 * (k.nbytes + v.nbytes) + 4 * q.nbytes)
        B, H, G, D = q.shape
        # q [B, Hq, 1, D]: one query per head, as in llama.cpp's decode steps.
        queries = self.tensor(q.float().reshape(B, H * G, 1, D), self.F32)
        keys, values = (self.tensor(part.to(torch.float16), self.F16) for part in (k, v))
        out = self.base.ggml_flash_attn_ext(self.context, queries, keys, values, None, scale, 0.0, 0.0)
        self.finish(out, q.shape)


class GgmlLinear(_Ggml):
    """ggml_mul_mat: x [rows, in] times weights [outputs, in] in bfloat16; returns [rows, outputs]."""

    def __init__(self, x: Tensor, weights: Tensor) -> None:
        super().__init__(weights.nbytes + 4 * x.nbytes + 8 * len(x) * len(weights))
        left = self.tensor(weights[None, None], self.BF16)
        right = self.tensor(x.float()[None, None], self.F32)
        self.finish(self.base.ggml_mul_mat(self.context, left, right), torch.Size((len(x), len(weights))))
