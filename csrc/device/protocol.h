// The moves of both sides of a mailbox (layout.h), one function a move: for kernels, for the host, and for
// test/fuzz, which runs them under a scheduler of its own.
//
// `Words` is one side's access to the mailbox's words:
//   uint32_t load(MailboxWord) const   acquire; relaxed where a fence() follows the last look
//   void store(MailboxWord, uint32_t)  release: whoever loads it sees what this side wrote before
//   void fence()                       sequentially consistent, between this side's stores and later loads
//
// Who gives up. A device that has waited enough, or is cancelled, says so (kLate) and looks once more; a host
// that has answered looks whether the device gave up. Both fence between the two, so at least one sees the
// other: either the device takes the answer, or the host knows that it was not taken. A layer that the host
// calls answered is never lost, though the device may have taken one that the host calls lost. A device that
// keeps a copy of kLate near to it writes that copy after the host's word and a fence, for who believes the
// copy tells the host nothing.
//
// One thread of a take looks, because a look crosses the link. It leaves what it found for the other blocks
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

// Whether a word that counts sequence numbers has come to this one. They wrap.
FLUXION_BOTH_SIDES constexpr bool reached(uint32_t word, uint32_t sequence) {
  return static_cast<int32_t>(word - sequence) >= 0;
}

// A sequence number in a word where 0 says "none".
FLUXION_BOTH_SIDES constexpr uint32_t mark_of(uint32_t sequence) { return sequence != 0 ? sequence : 1; }

// ---- The device, in the order of its stream: publish, look at parts, take.

// Whether the device has given up: then it writes nothing into slots and says nothing.
template <class Words>
FLUXION_BOTH_SIDES bool gave_up(const Words& words) {
  return words.load(kLate) != 0;
}

// After q, k, v and the layer were written (word kPublished), or the parts (kObserved).
template <class Words>
FLUXION_BOTH_SIDES void announce(Words& words, MailboxWord word, uint32_t sequence) {
  words.store(word, sequence);
}

enum class Take { kWait, kTaken, kGaveUp };

// One look of a device that waits for an answer: kTaken: o and lse of the slot may be read.
template <class Words>
FLUXION_BOTH_SIDES Take look_for_answer(Words& words, uint32_t sequence, bool waited_enough) {
  if (reached(words.load(kAnswered), sequence)) return Take::kTaken;
  const bool late = gave_up(words);
  if (!late && !waited_enough && words.load(kCancel) == 0) return Take::kWait;
  if (!late) words.store(kLate, mark_of(sequence));
  words.fence();
  return reached(words.load(kAnswered), sequence) ? Take::kTaken : Take::kGaveUp;
}

// What the looking thread found, released by it. After a device has given up, takes come without a publish
// before them and have one sequence: what they find may be an earlier take's. Their pass has failed anyway.
FLUXION_BOTH_SIDES constexpr uint32_t look_of(uint32_t sequence, bool taken) {
  return sequence << 1 | (taken ? 1u : 0u);
}
// Whether an acquired word is what was found of this take; then, whether the answer may be read.
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

// Until the device has announced `sequence` in `word`: kReady, and the slot is the host's until its answer.
// Patience: bool spent(), asked at every look, and void pause() between two of them.
template <class Words, class Patience>
Wait wait_for(const Words& words, MailboxWord word, uint32_t sequence, Patience patience) {
  for (;; patience.pause()) {
    if (reached(words.load(word), sequence)) return Wait::kReady;
    if (gave_up(words)) return Wait::kLate;
    if (words.load(kCancel) != 0) return Wait::kCancelled;
    if (patience.spent()) return Wait::kTimedOut;
  }
}

// After o and lse were written: the slot is the device's. False: the device has given up and may not have
// taken it.
template <class Words>
bool answer(Words& words, uint32_t sequence) {
  words.store(kAnswered, sequence);
  words.fence();
  return !gave_up(words);
}

// The same of a layer that could not be computed; lse is -inf.
template <class Words>
bool answer_failed(Words& words, uint32_t sequence) {
  words.store(kFailed, mark_of(sequence));
  return answer(words, sequence);
}

// Of a mailbox that neither side uses.
template <class Words>
void reset(Words& words) {
  for (int word = 0; word < kMailboxWords; ++word) words.store(static_cast<MailboxWord>(word), 0);
}

}  // namespace fluxion
