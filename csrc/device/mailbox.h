// The host's side of a mailbox: its arena, and waiting for the device.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

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
  Wait wait(MailboxWord word, uint32_t sequence, int64_t timeout_ns) const;
  // False: the device has given up.
  bool answer(uint32_t sequence);
  // The same with nothing for every request: lse is -inf.
  bool fail(uint32_t sequence);
  // Ends every wait of either side, until reset().
  void cancel();
  void reset();

  uint32_t load(MailboxWord word) const { return HostWords(ArenaMemory(arena())).load(word); }
  // For a device that is simulated by host code.
  void store(MailboxWord word, uint32_t value) { HostWords(ArenaMemory(arena())).store(word, value); }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  MailboxShape shape_;
  int64_t bytes_;
  std::unique_ptr<char, Free> arena_;
};

}  // namespace fluxion
