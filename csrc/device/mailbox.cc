#include "device/mailbox.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>

#include "kernels/table.h"
#include "runtime/host_memory.h"
#include "runtime/worker_pool.h"

namespace fluxion {
namespace {

// A layer's other work (projections, MLP) takes a device 50 to 500 us: less than that is worth a core.
constexpr int64_t kSpinNs = 100'000;
constexpr int64_t kYieldNs = 2'000'000;
constexpr long kSleepNs = 20'000;
constexpr int kPausesALook = 8;  // the word's cache line is the device's to write

class HostPatience {
 public:
  explicit HostPatience(int64_t timeout_ns) : timeout_ns_(timeout_ns), start_(now_ns()) {}
  bool spent() const { return now_ns() - start_ >= timeout_ns_; }
  void pause() const {
    const int64_t waited = now_ns() - start_;
    if (waited < kSpinNs) {
      for (int i = 0; i < kPausesALook; ++i) cpu_pause();
    } else if (waited < kYieldNs) {
      sched_yield();
    } else {
      const timespec sleep{0, kSleepNs};
      nanosleep(&sleep, nullptr);
    }
  }

 private:
  int64_t timeout_ns_, start_;
};

void check(const MailboxShape& s) {
  const bool sizes = s.max_requests >= 1 && s.kv_heads >= 1 && s.head_dim >= 1 && s.q_heads >= 1;
  if (sizes && s.q_heads % s.kv_heads == 0 && (s.element == 2 || s.element == 4)) return;
  throw std::invalid_argument(
      "A mailbox for " + std::to_string(s.max_requests) + " requests, " + std::to_string(s.q_heads) +
      " query heads, " + std::to_string(s.kv_heads) + " KV heads of " + std::to_string(s.head_dim) +
      " numbers of " + std::to_string(s.element) +
      " bytes cannot be; every size must be at least 1, query heads a multiple of KV heads, and a number 2 "
      "or 4 bytes.");
}

}  // namespace

Mailbox::Mailbox(const MailboxShape& shape) : shape_(shape) {
  check(shape);
  bytes_ = round_up(mailbox_bytes(shape), kSmallPage);
  arena_.reset(static_cast<char*>(std::aligned_alloc(kSmallPage, bytes_)));
  if (arena_ == nullptr) throw std::bad_alloc();
  std::memset(arena_.get(), 0, bytes_);
}

Wait Mailbox::wait(MailboxWord word, uint32_t sequence, int64_t timeout_ns) const {
  return wait_for(HostWords(ArenaMemory(arena())), word, sequence, HostPatience(timeout_ns));
}

bool Mailbox::answer(uint32_t sequence) {
  HostWords words{ArenaMemory(arena())};
  return fluxion::answer(words, sequence);
}

bool Mailbox::fail(uint32_t sequence) {
  float* lse = reinterpret_cast<float*>(arena() + mailbox_slot(shape_, sequence).lse);
  std::fill_n(lse, int64_t{shape_.max_requests} * shape_.q_heads, -std::numeric_limits<float>::infinity());
  HostWords words{ArenaMemory(arena())};
  return answer_failed(words, sequence);
}

void Mailbox::cancel() { HostWords(ArenaMemory(arena())).store(kCancel, 1); }

void Mailbox::reset() {
  HostWords words{ArenaMemory(arena())};
  fluxion::reset(words);
}

}  // namespace fluxion
