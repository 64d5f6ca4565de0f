// A checksum that detects changed bytes; the canary keeps these.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

namespace fluxion {

inline constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;

// A bijection in each argument.
inline uint64_t mix(uint64_t sum, uint64_t word) { return std::rotl((sum ^ word) * kOdd, 29); }

// Independent sums, because each step of a sum waits for a product.
inline constexpr int kSums = 8;

inline void add_words(const char* data, int64_t bytes, uint64_t* sums) {
  for (const char* const end = data + bytes; data < end; data += kSums * sizeof(uint64_t)) {
    uint64_t words[kSums];
    std::memcpy(words, data, sizeof(words));
    for (int i = 0; i < kSums; ++i) sums[i] = mix(sums[i], words[i]);
  }
}

#if defined(__x86_64__)
// The same, in one register.
[[gnu::target("avx512f,avx512dq")]] inline void add_words_avx512(const char* data, int64_t bytes,
                                                                 uint64_t* sums) {
  using Words = uint64_t __attribute__((vector_size(kSums * sizeof(uint64_t)), aligned(1), may_alias));
  Words sum = *reinterpret_cast<const Words*>(sums);
  for (const char* const end = data + bytes; data < end; data += sizeof(Words)) {
    const Words mixed = (sum ^ *reinterpret_cast<const Words*>(data)) * kOdd;
    sum = mixed << 29 | mixed >> 35;
  }
  *reinterpret_cast<Words*>(sums) = sum;
}
#endif

using AddWords = void (*)(const char*, int64_t, uint64_t*);

inline AddWords best_add_words() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) return add_words_avx512;
#endif
  return add_words;
}

inline constexpr int64_t kSumBytes = 32;

// Adds bytes in multiples of kSumBytes.
class Sums {
 public:
  explicit Sums(uint64_t seed, AddWords add = best()) : add_(add) {
    for (int i = 0; i < kSums; ++i) sums_[i] = seed + i;
  }
  void add(const char* data, int64_t bytes) {
    constexpr int64_t kStep = sizeof(sums_);
    const int64_t whole = bytes / kStep * kStep;
    add_(data, whole, sums_);
    for (int64_t i = 0; i < (bytes - whole) / static_cast<int64_t>(sizeof(uint64_t)); ++i) {
      uint64_t word;
      std::memcpy(&word, data + whole + i * sizeof(word), sizeof(word));
      sums_[i] = mix(sums_[i], word);
    }
  }
  // Never 0, which means "never written".
  uint64_t take() const {
    uint64_t left[kSums];
    std::copy_n(sums_, kSums, left);
    for (int half = kSums / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) left[i] = mix(left[i], left[i + half]);
    }
    return left[0] == 0 ? 1 : left[0];
  }

 private:
  static AddWords best() {
    static const AddWords kBest = best_add_words();
    return kBest;
  }

  AddWords add_;
  alignas(64) uint64_t sums_[kSums];
};

}  // namespace fluxion
