// What lfps.cc and lfps_plan.cc share.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "lab/lfps.h"

namespace fluxion {
namespace lfps {

inline constexpr float kNothing = -std::numeric_limits<float>::infinity();

inline double log_add(double a, double b) {
  const double most = std::max(a, b);
  return std::isinf(most) ? most : most + std::log(std::exp(a - most) + std::exp(b - most));
}

inline double element(const char* row, int d, DType dtype) {
  if (dtype == DType::kF32) return reinterpret_cast<const float*>(row)[d];
  return std::bit_cast<float>(static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(row)[d]) << 16);
}

inline double squared_norm(const char* q, int D, DType dtype) {
  double sum = 0;
  for (int d = 0; d < D; ++d) sum += element(q, d, dtype) * element(q, d, dtype);
  return sum;
}

[[noreturn]] inline void refuse(const std::string& sentence) { throw std::invalid_argument(sentence); }

}  // namespace lfps

// Calls body(i, scratch) for i in [0, count), over the workers, or in the caller alone while they are busy.
// wake: also wakes workers that sleep.
template <class Body>
void Lfps::for_groups(int count, const Body& body, bool wake) {
  struct Job {
    Lfps* self;
    const Body* body;
    int count;
    std::atomic<int> next{0};
  } job{this, &body, count};
  const auto run = [](void* ctx, int worker) {
    Job* job = static_cast<Job*>(ctx);
    for (int i; (i = job->next.fetch_add(1, std::memory_order_relaxed)) < job->count;)
      (*job->body)(i, &job->self->scratch_[worker]);
  };
  if (count > 1 && pool_->workers().launch(run, &job, wake)) return pool_->workers().join();
  run(&job, 0);
}

}  // namespace fluxion
