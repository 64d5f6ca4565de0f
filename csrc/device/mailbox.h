// The host's side of a mailbox: its arena, and waiting for the device.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "device/layout.h"
#include "device/protocol.h"

namespace fluxion {

// The words in an arena of host memory.
class ArenaMemory {
 public:
  explicit ArenaMemory(char* arena) : arena_(arena) {}
  std::atomic_ref<uint32_t> word(MailboxWord word) const {
    return std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(arena_ + word * kWordBytes));
  }
  void fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }

 private:
  char* arena_;
};
using HostWords = AtomicWords<ArenaMemory>;

// Time stamps of a layer, in nanoseconds of two clocks.
struct LayerTimes {
  int64_t sequence, layer;
  int64_t published, wait_begin, wait_end;  // the device's: q, k, v were out; take waited, and had the answer
  int64_t seen, planned, answered;  // now_ns(): before each of these the host had nothing of the layer,
                                    // no plan, nothing to say
};

// Owns the arena. Any thread may call cancel() and load(). The other functions, except reset(), belong to the
// thread that serves the layers.
class Mailbox {
 public:
  // Throws std::invalid_argument for an invalid shape.
  explicit Mailbox(const MailboxShape& shape);

  const MailboxShape& shape() const { return shape_; }
  char* arena() const { return arena_.get(); }
  // Whole pages, page-aligned, to be registered with a device.
  int64_t bytes() const { return bytes_; }

  // word: kPublished or kObserved. Polls without a pause at first, then yields the core, then sleeps.
  // Sequence numbers must be waited for in order.
  Wait wait(MailboxWord word, uint32_t sequence, int64_t timeout_ns);
  // Returns false if the device has given up. planned_ns: when the layer was planned; 0: never.
  bool answer(uint32_t sequence, int64_t planned_ns = 0);
  // Answers a layer that could not be computed: lse is -inf for every request.
  bool fail(uint32_t sequence);
  // Ends every wait of both sides, until reset().
  void cancel();
  void reset();

  // Moves up to `most` time stamps to out, oldest first, and returns how many. They are of layers that were
  // answered with a result which the device took. The newest is there once the next layer was published, or
  // after settled(). If kTimes are waiting, further ones are dropped.
  int64_t take_times(LayerTimes* out, int64_t most);
  // Call when the device has done everything that it was given.
  void settled();

  uint32_t load(MailboxWord word) const { return HostWords(ArenaMemory(arena())).load(word); }
  // For a device that is simulated by host code.
  void store(MailboxWord word, uint32_t value) { HostWords(ArenaMemory(arena())).store(word, value); }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  static constexpr size_t kTimes = 1024;

  MailboxShape shape_;
  int64_t bytes_;
  std::unique_ptr<char, Free> arena_;
  LayerTimes open_{};  // of the layer published last; answered 0: not answered, or failed
  std::vector<LayerTimes> times_;
};

}  // namespace fluxion
