#include "runtime/canary.h"

#include <algorithm>

#include "runtime/failure.h"
#include "runtime/pool.h"
#include "runtime/prefetch.h"
#include "runtime/sums.h"

namespace fluxion {
namespace {

constexpr int kSketch = kPage + kLevels;

// The place that a sum belongs to. part: the token of a page, 16 + the level of an entry, or kSketch.
uint64_t place(int layer, int head, int page, int part) {
  const uint64_t group = static_cast<uint64_t>(layer) << 16 | static_cast<uint64_t>(head);
  return mix(group, static_cast<uint64_t>(page) << 8 | static_cast<uint64_t>(part));
}

uint64_t random_word() {
  thread_local uint64_t state = 0;
  if (state == 0) state = mix(reinterpret_cast<uintptr_t>(&state), static_cast<uint64_t>(now_ns())) | 1;
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

std::string where(int layer, int head, int page) {
  return "layer " + std::to_string(layer) + ", KV head " + std::to_string(head) + ", page " +
         std::to_string(page);
}

std::string sentence(const std::string& what) {
  return "KV in host memory is not what was written there (" + what +
         "); empty the cache (POST /flush_cache), and test the machine's memory.";
}

std::string of_token(int layer, int head, int page, int offset) {
  return sentence(where(layer, head, page) + ", token " + std::to_string(offset));
}

std::string of_entry(int layer, int head, int level, int page) {
  return sentence(where(layer, head, page) + ", metadata of its block of " + std::to_string(kPage << level) +
                  " tokens");
}

std::string of_sketch(int layer, int head, int page) {
  return sentence(where(layer, head, page) + ", sketch of its keys");
}

}  // namespace

Canary::Canary(const PoolShape& shape, double share) : shape_(shape), period_(1 / share) {
  for (int j = 0; j < kLevels; ++j) entry_sums_[j + 1] = entry_sums_[j] + shape.entries(j);
  const int64_t groups = int64_t{shape.layers} * shape.kv_heads;
  const int64_t tokens = groups * shape.pages * kPage;
  const int64_t entries = groups * entry_sums_[kLevels], sketches = shape.sketched ? groups * shape.pages : 0;
  memory_ = HostMemory((tokens + entries + sketches) * static_cast<int64_t>(sizeof(uint64_t)));
  tokens_ = reinterpret_cast<uint64_t*>(memory_.data());
  entries_ = tokens_ + tokens;
  sketches_ = entries_ + entries;
}

uint64_t& Canary::token_sum(int layer, int head, int page, int offset) const {
  const int64_t tile = (int64_t{layer} * shape_.kv_heads + head) * shape_.pages + page;
  return tokens_[tile * kPage + offset];
}

uint64_t& Canary::entry_sum(int layer, int head, int level, int page) const {
  const int64_t group = int64_t{layer} * shape_.kv_heads + head;
  return entries_[group * entry_sums_[kLevels] + entry_sums_[level] + (page >> level)];
}

uint64_t& Canary::sketch_sum(int layer, int head, int page) const {
  return sketches_[(int64_t{layer} * shape_.kv_heads + head) * shape_.pages + page];
}

uint64_t Canary::sum_of(int layer, int head, int page, int offset, const char* tile) const {
  Sums sums(place(layer, head, page, offset));
  if (shape_.dtype != DType::kInt8) {
    const int64_t bytes = shape_.token_bytes();
    sums.add(tile + offset * bytes, bytes);
    sums.add(tile + (kPage + offset) * bytes, bytes);
    return sums.take();
  }
  // The integers of a token are not contiguous, nor are its scales.
  const int D = shape_.head_dim;
  alignas(8) char all[round_up(2 * stored_bytes(DType::kInt8, kMaxHeadDim), kSumBytes)] = {};
  char* to = all;
  for (int row = offset; row < 2 * kPage; row += kPage) {
    for (int d = 0; d < D; ++d) *to++ = tile[int8_at(row, d, D)];
    for (int b = 0; b < 2; ++b) *to++ = tile[2 * kPage * D + 2 * row + b];
  }
  sums.add(all, round_up(to - all, kSumBytes));
  return sums.take();
}

void Canary::wrote_token(int layer, int head, int page, int offset, const char* tile) const {
  token_sum(layer, head, page, offset) = sum_of(layer, head, page, offset, tile);
}

void Canary::forget_tokens(int layer, int head, int page) const {
  std::fill_n(&token_sum(layer, head, page, 0), kPage, uint64_t{0});
}

void Canary::wrote_entry(int layer, int head, int level, int page, const char* entry) const {
  Sums sums(place(layer, head, page, 16 + level));
  sums.add(entry, shape_.entry_bytes());
  entry_sum(layer, head, level, page) = sums.take();
}

void Canary::wrote_sketch(int layer, int head, int page, const char* sketch) const {
  Sums sums(place(layer, head, page, kSketch));
  sums.add(sketch, shape_.sketch_bytes());
  sketch_sum(layer, head, page) = sums.take();
}

bool Canary::same_token(const HostPool& pool, int layer, int head, int page, int offset) const {
  return sum_of(layer, head, page, offset, pool.tile(layer, head, page)) ==
         token_sum(layer, head, page, offset);
}

bool Canary::same_entry(const HostPool& pool, int layer, int head, int level, int page) const {
  Sums sums(place(layer, head, page, 16 + level));
  sums.add(pool.entry(layer, head, level, page), shape_.entry_bytes());
  return sums.take() == entry_sum(layer, head, level, page);
}

bool Canary::same_sketch(const HostPool& pool, int layer, int head, int page) const {
  Sums sums(place(layer, head, page, kSketch));
  sums.add(pool.sketches(layer, head) + page * shape_.sketch_bytes(), shape_.sketch_bytes());
  return sums.take() == sketch_sum(layer, head, page);
}

// 0 to 2 periods - 2 reads lie between two checks: on average one check per period, in no regular pattern.
// fetch(i) prefetches for check(i): unlike the data just read, its sums are in no cache, and the hardware
// cannot foresee a random sample.
template <typename Fetch, typename Check>
void Canary::sample(int64_t reads, const Fetch& fetch, const Check& check) const {
  constexpr int kAhead = 8;
  thread_local double skip = 0;  // reads until the next check
  if (skip >= static_cast<double>(reads)) {
    skip -= static_cast<double>(reads);
    return;
  }
  double at = skip;
  skip = 0;  // in case a check throws
  int64_t checks = 0;
  while (at < static_cast<double>(reads)) {
    int64_t chosen[kAhead];
    int count = 0;
    for (; count < kAhead && at < static_cast<double>(reads); ++count) {
      fetch(chosen[count] = static_cast<int64_t>(at));
      at += 1 + static_cast<double>(random_word() >> 11) * 0x1p-53 * 2 * (period_ - 1);
    }
    for (int i = 0; i < count; ++i) check(chosen[i]);
    checks += count;
  }
  skip = at - static_cast<double>(reads);
  checks_.fetch_add(checks, std::memory_order_relaxed);
}

void Canary::check_token(const HostPool& pool, int layer, int head, int page, int offset) const {
  if (same_token(pool, layer, head, page, offset)) return;
  mismatches_.fetch_add(1, std::memory_order_relaxed);
  throw CorruptMemory(of_token(layer, head, page, offset));
}

void Canary::read_tiles(const HostPool& pool, int layer, int head, const int32_t* pages,
                        int64_t tokens) const {
  const auto fetch = [&](int64_t i) {
    for (int t = 0; t < kPage; t += 8) prefetch(&token_sum(layer, head, pages[i], t));
  };
  sample((tokens + kPage - 1) / kPage, fetch, [&](int64_t i) {
    const int count = static_cast<int>(std::min<int64_t>(kPage, tokens - i * kPage));
    for (int t = 0; t < count; ++t) check_token(pool, layer, head, pages[i], t);
  });
}

void Canary::read_tokens(const HostPool& pool, int layer, int head, const int32_t* tokens,
                         int64_t count) const {
  const auto fetch = [&](int64_t i) {
    prefetch(&token_sum(layer, head, tokens[i] / kPage, tokens[i] % kPage));
  };
  sample(count, fetch,
         [&](int64_t i) { check_token(pool, layer, head, tokens[i] / kPage, tokens[i] % kPage); });
}

void Canary::read_entries(const HostPool& pool, int layer, int head, int level, const int32_t* pages,
                          int64_t stride, int64_t count) const {
  const auto fetch = [&](int64_t i) { prefetch(&entry_sum(layer, head, level, pages[i * stride])); };
  sample(count, fetch, [&](int64_t i) {
    const int page = pages[i * stride];
    if (same_entry(pool, layer, head, level, page)) return;
    mismatches_.fetch_add(1, std::memory_order_relaxed);
    throw CorruptMemory(of_entry(layer, head, level, page));
  });
}

void Canary::read_sketches(const HostPool& pool, int layer, int head, const int32_t* pages,
                           int64_t count) const {
  const auto fetch = [&](int64_t i) { prefetch(&sketch_sum(layer, head, pages[i])); };
  sample(count, fetch, [&](int64_t i) {
    if (same_sketch(pool, layer, head, pages[i])) return;
    mismatches_.fetch_add(1, std::memory_order_relaxed);
    throw CorruptMemory(of_sketch(layer, head, pages[i]));
  });
}

std::vector<std::string> Canary::sweep(const HostPool& pool, int64_t most, int64_t* checked) const {
  std::vector<std::string> found;
  const auto wrong = [&](bool same, const auto& text) {
    ++*checked;
    if (same) return;
    mismatches_.fetch_add(1, std::memory_order_relaxed);
    if (std::ssize(found) < most) found.push_back(text());
  };
  for (int l = 0; l < shape_.layers; ++l) {
    for (int h = 0; h < shape_.kv_heads; ++h) {
      for (int p = 0; p < shape_.pages; ++p) {
        for (int t = 0; t < kPage; ++t) {
          if (token_sum(l, h, p, t) == 0) continue;
          wrong(same_token(pool, l, h, p, t), [&] { return of_token(l, h, p, t); });
        }
        if (shape_.sketched && sketch_sum(l, h, p) != 0)
          wrong(same_sketch(pool, l, h, p), [&] { return of_sketch(l, h, p); });
        if (entry_sum(l, h, 0, p) == 0) continue;
        wrong(same_entry(pool, l, h, 0, p), [&] { return of_entry(l, h, 0, p); });
      }
      for (int j = 1; j < kLevels; ++j) {
        for (int64_t i = 0; i < shape_.entries(j); ++i) {
          const int32_t page = pool.tags(l, j)[i];
          if (entry_sum(l, h, j, static_cast<int>(i << j)) == 0) continue;
          const bool there = page >= 0 && page < shape_.pages && page >> j == i;
          wrong(there && same_entry(pool, l, h, j, page),
                [&] { return of_entry(l, h, j, static_cast<int>(i << j)); });
        }
      }
    }
  }
  return found;
}

}  // namespace fluxion
