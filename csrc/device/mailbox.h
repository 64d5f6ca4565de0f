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

// When a layer was where, in nanoseconds of two clocks.
struct LayerTimes {
  int64_t sequence, layer;
  int64_t published, wait_begin, wait_end;  // the device's: q, k, v were out; take waited, and had the answer
  int64_t seen, planned, answered;  // now_ns(): before each of these the host had nothing of the layer,
                                    // no plan, nothing to say
};

// Owns the arena. Of the functions any thread may call cancel() and load(); the others belong to the thread
// that serves the layers, but for what makes the mailbox anew.
class Mailbox {
 public:
  // Throws std::invalid_argument for a shape that cannot be.
  explicit Mailbox(const MailboxShape& shape);

  const MailboxShape& shape() const { return shape_; }
  char* arena() const { return arena_.get(); }
  // Whole pages from a page's start, to be registered with a device.
  int64_t bytes() const { return bytes_; }

  // word: kPublished or kObserved. Looks without a pause at first, then gives its core away, then sleeps.
  // Sequence numbers are waited for in their order.
  Wait wait(MailboxWord word, uint32_t sequence, int64_t timeout_ns);
  // False: the device has given up. planned_ns: when the layer was planned; 0: it was not.
  bool answer(uint32_t sequence, int64_t planned_ns = 0);
  // The same with nothing for every request: lse is -inf.
  bool fail(uint32_t sequence);
  // Ends every wait of either side, until reset().
  void cancel();
  void reset();

  // Of the layers that were answered with a result which the device took, oldest first: up to `most` into
  // out, which are forgotten; returns how many. The newest is among them once the next one was published, or
  // after settled(). Where kTimes wait to be taken, further ones are dropped.
  int64_t take_times(LayerTimes* out, int64_t most);
  // The device has done everything that it was given.
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
  LayerTimes open_{};  // of the layer that was published last; answered 0: it is not, or failed
  std::vector<LayerTimes> times_;
};

}  // namespace fluxion
