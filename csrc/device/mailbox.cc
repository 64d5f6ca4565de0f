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

// Other work of a layer (projections, MLP) takes a device 50 to 500 us; shorter waits are worth a core.
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
  times_.reserve(kTimes);
}

Wait Mailbox::wait(MailboxWord word, uint32_t sequence, int64_t timeout_ns) {
  const Wait outcome = wait_for(HostWords(ArenaMemory(arena())), word, sequence, HostPatience(timeout_ns));
  if (word != kPublished || outcome != Wait::kReady) return outcome;
  const int64_t now = now_ns();
  settled();
  const MailboxSlot at = mailbox_slot(shape_, sequence);
  open_ = {.sequence = sequence,
           .layer = *reinterpret_cast<const int32_t*>(arena() + at.layer),
           .published = *reinterpret_cast<const int64_t*>(arena() + at.published_at),
           .wait_begin = 0,
           .wait_end = 0,
           .seen = now,
           .planned = now,
           .answered = 0};
  return outcome;
}

bool Mailbox::answer(uint32_t sequence, int64_t planned_ns) {
  if (planned_ns != 0) open_.planned = planned_ns;
  open_.answered = now_ns();
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
  open_ = {};
}

void Mailbox::settled() {
  if (open_.answered == 0) return;
  const auto* taken_at = reinterpret_cast<const int64_t*>(
      arena() + mailbox_slot(shape_, static_cast<uint32_t>(open_.sequence)).taken_at);
  open_.wait_begin = taken_at[0];
  open_.wait_end = taken_at[1];
  // Not if the device records nothing, or gave up here.
  if (open_.wait_end != 0 && times_.size() < kTimes) times_.push_back(open_);
  open_ = {};
}

int64_t Mailbox::take_times(LayerTimes* out, int64_t most) {
  const auto end = times_.begin() + std::min(most, static_cast<int64_t>(times_.size()));
  std::copy(times_.begin(), end, out);
  const int64_t taken = end - times_.begin();
  times_.erase(times_.begin(), end);
  return taken;
}

}  // namespace fluxion
