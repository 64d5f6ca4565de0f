// Tasks on their way from the workers, which chose what to read, to the dispatcher, which has it read.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "device/costs.h"
#include "engine/task_reader.h"

namespace fluxion {

// A copy of all that it takes to read for a task: the layer may end before it is read.
struct Offer {
  int64_t claim = 0;
  int layer = 0, head = 0;
  uint32_t step = 0;  // changes with the decode step
  Scale scale{};
  Selection chosen;
  std::vector<char> q;          // [G][D] KV dtype
  std::vector<int32_t> pages;   // [chosen.count]
  std::vector<uint16_t> masks;  // [chosen.count][G], if chosen.masked
};

// Workers put tasks in, the dispatcher's thread takes them out, oldest first. What it takes of those that
// anyone may read is Division's to say. Room is for a few: when there is none, a worker keeps its task, or
// waits with one that is for the reader alone.
class Offers : public TaskReader {
 public:
  // room: offers. longest: pages of a task, at most. patience_s: how long a worker waits for room.
  Offers(const Division& division, int64_t least_bytes, int room, int longest, double patience_s);

  bool open(const ReadableLoad& load) noexcept override;
  bool take(const ChosenTask& task) noexcept override;
  void close() noexcept override;

  enum State { kTakes, kHangs, kEnded };  // in the last two, workers keep their tasks

  // From any thread; what has ended stays so. Once it has returned, next() gives what is left, and nothing
  // comes after it.
  void become(State state) noexcept;

  // The dispatcher's thread. The oldest, which is its own until it puts it back, or nullptr.
  Offer* next();
  void put_back(Offer* offer);
  void returned(int64_t bytes, double hit_share);
  // Changes when a layer opens that may have something for the reader, with every offer, and with wake().
  uint32_t news() const { return news_.load(std::memory_order_acquire); }
  // Until news() is not `seen`: sleeps.
  void wait_for_news(uint32_t seen) const { news_.wait(seen, std::memory_order_acquire); }
  void wake() noexcept;

 private:
  Offer* room_for(const ChosenTask& task) noexcept;

  const int64_t least_;
  const int longest_;
  const int64_t patience_ns_;
  std::atomic<State> state_{kTakes};  // changes under mutex_
  std::vector<Offer> offers_;
  int last_layer_ = -1;  // the stepping thread's
  std::atomic<uint32_t> step_{0};
  alignas(64) std::atomic<uint32_t> news_{0};

  alignas(64) std::mutex mutex_;  // of what follows
  Division division_;
  std::vector<Offer*> free_;
  std::vector<Offer*> ready_;  // a ring with room for all of them
  size_t first_ = 0, waiting_ = 0;
};

}  // namespace fluxion
