#include "model/rows.h"

#include <algorithm>

namespace fluxion {
namespace {

// Elements that justify another worker, and that a worker takes at a time.
constexpr int64_t kPart = 32 << 10;

// Calls one(row) for each of `count` rows of `elements` elements.
template <typename One>
void for_rows(WorkerPool& workers, int64_t count, int64_t elements, const One& one) {
  struct Parts {
    const One& one;
    int64_t count, size;
  } parts{one, count, std::max<int64_t>(1, kPart / std::max<int64_t>(elements, 1))};
  const auto part = [](void* ctx, int i) {
    const auto* p = static_cast<const Parts*>(ctx);
    const int64_t end = std::min(p->count, (i + 1) * p->size);
    for (int64_t row = i * p->size; row < end; ++row) p->one(row);
  };
  workers.parallel_for(static_cast<int>((count + parts.size - 1) / parts.size), part, &parts);
}

}  // namespace

void norm_rows(WorkerPool& workers, const KernelTable& kernels, int64_t count, const NormRows& rows) {
  for_rows(workers, count, rows.size, [&](int64_t i) {
    const bool added = rows.residual.at != nullptr;
    kernels.rms_norm(rows.x[i], added ? rows.residual[i] : nullptr, rows.weight, rows.size, rows.epsilon,
                     rows.gemma, rows.out[i], added ? rows.sum[i] : nullptr);
  });
}

void gate_rows(WorkerPool& workers, const KernelTable& kernels, int64_t count, const GateRows& rows) {
  const auto mul = rows.gelu ? kernels.gelu_mul : kernels.silu_mul;
  for_rows(workers, count, rows.size,
           [&](int64_t i) { mul(rows.gate[i], rows.up[i], rows.size, rows.out[i]); });
}

void rope_rows(WorkerPool& workers, const KernelTable& kernels, int64_t count, const RopeRows& rows) {
  const int64_t heads = rows.q_heads + rows.k_heads;
  for_rows(workers, count, heads * rows.head_dim, [&](int64_t i) {
    const void* cos_sin = rows.cos_sin[rows.positions[i]];
    kernels.rope(rows.q[i], cos_sin, rows.q_heads, rows.head_dim, rows.rotary, rows.halves, rows.q_out[i]);
    kernels.rope(rows.k[i], cos_sin, rows.k_heads, rows.head_dim, rows.rotary, rows.halves, rows.k_out[i]);
  });
}

}  // namespace fluxion
