// The operations of both sides of a mailbox (layout.h), one function each: for kernels, for the host, and for
// test/fuzz, which runs them under its own scheduler.
//
// `Words` is one side's access to the mailbox's words:
//   uint32_t load(MailboxWord) const   acquire; relaxed if a fence() follows the last poll
//   void store(MailboxWord, uint32_t)  release: a thread that loads it sees this side's earlier writes
//   void fence()                       sequentially consistent, between this side's stores and later loads
//
// Giving up. A device that has waited enough, or is cancelled, sets kLate and polls once more. A host that
// has answered checks whether the device gave up. Both fence in between, so at least one sees the other: the
// device takes the answer, or the host knows that it was not taken. A layer that the host counts as answered
// is never lost; the device may have taken one that the host counts as lost. If a device keeps a copy of
// kLate, it writes the copy after the host's word and a fence, because a reader of the copy tells the host
// nothing.
//
// Only one thread of a take polls, because a poll crosses the link. It leaves its result for the other blocks
// in the device's own memory (look_of).
#pragma once

#include <atomic>

#include "device/layout.h"

#if defined(__CUDACC__)
#define FLUXION_BOTH_SIDES __host__ __device__
#else
#define FLUXION_BOTH_SIDES
#endif

namespace fluxion {

// Whether a word that counts sequence numbers has reached this one. They wrap.
FLUXION_BOTH_SIDES constexpr bool reached(uint32_t word, uint32_t sequence) {
  return static_cast<int32_t>(word - sequence) >= 0;
}

// A sequence number in a word in which 0 means "none".
FLUXION_BOTH_SIDES constexpr uint32_t mark_of(uint32_t sequence) { return sequence != 0 ? sequence : 1; }

// ---- The device, in the order of its stream: publish, look at parts, take.

// Whether the device has given up: then it writes no slots and announces nothing.
template <class Words>
FLUXION_BOTH_SIDES bool gave_up(const Words& words) {
  return words.load(kLate) != 0;
}

// Call after q, k, v and the layer were written (kPublished), or the parts (kObserved).
template <class Words>
FLUXION_BOTH_SIDES void announce(Words& words, MailboxWord word, uint32_t sequence) {
  words.store(word, sequence);
}

enum class Take { kWait, kTaken, kGaveUp };

// One poll of a device that waits for an answer. kTaken: o and lse of the slot may be read.
template <class Words>
FLUXION_BOTH_SIDES Take look_for_answer(Words& words, uint32_t sequence, bool waited_enough) {
  if (reached(words.load(kAnswered), sequence)) return Take::kTaken;
  const bool late = gave_up(words);
  if (!late && !waited_enough && words.load(kCancel) == 0) return Take::kWait;
  if (!late) words.store(kLate, mark_of(sequence));
  words.fence();
  return reached(words.load(kAnswered), sequence) ? Take::kTaken : Take::kGaveUp;
}

// The result of the polling thread, released by it. After a device has given up, takes come without a publish
// and share one sequence, so they may find the result of an earlier take. Their pass has failed anyway.
FLUXION_BOTH_SIDES constexpr uint32_t look_of(uint32_t sequence, bool taken) {
  return sequence << 1 | (taken ? 1u : 0u);
}
// Whether an acquired word is the result for this take; found_answer: whether the answer may be read.
FLUXION_BOTH_SIDES constexpr bool is_look_of(uint32_t word, uint32_t sequence) {
  return word >> 1 == (sequence & 0x7fffffffu);
}
FLUXION_BOTH_SIDES constexpr bool found_answer(uint32_t word) { return (word & 1u) != 0; }

// ---- The host.

// `Words` over atomics: Memory has word(MailboxWord), which loads and stores as std::atomic does, and
// fence().
template <class Memory>
class AtomicWords {
 public:
  explicit AtomicWords(Memory memory) : memory_(memory) {}
  uint32_t load(MailboxWord word) const { return memory_.word(word).load(std::memory_order_acquire); }
  void store(MailboxWord word, uint32_t value) { memory_.word(word).store(value, std::memory_order_release); }
  void fence() { memory_.fence(); }

 private:
  Memory memory_;
};

enum class Wait { kReady, kLate, kCancelled, kTimedOut };

// Waits until the device has announced `sequence` in `word`: kReady. Then the slot is the host's until its
// answer. Patience: bool spent(), asked at every poll, and void pause() between two polls.
template <class Words, class Patience>
Wait wait_for(const Words& words, MailboxWord word, uint32_t sequence, Patience patience) {
  for (;; patience.pause()) {
    if (reached(words.load(word), sequence)) return Wait::kReady;
    if (gave_up(words)) return Wait::kLate;
    if (words.load(kCancel) != 0) return Wait::kCancelled;
    if (patience.spent()) return Wait::kTimedOut;
  }
}

// Call after o and lse were written; the slot becomes the device's. Returns false if the device has given up
// and may not have taken the answer.
template <class Words>
bool answer(Words& words, uint32_t sequence) {
  words.store(kAnswered, sequence);
  words.fence();
  return !gave_up(words);
}

// The same for a layer that could not be computed; lse is -inf.
template <class Words>
bool answer_failed(Words& words, uint32_t sequence) {
  words.store(kFailed, mark_of(sequence));
  return answer(words, sequence);
}

// Only while neither side uses the mailbox.
template <class Words>
void reset(Words& words) {
  for (int word = 0; word < kMailboxWords; ++word) words.store(static_cast<MailboxWord>(word), 0);
}

}  // namespace fluxion
