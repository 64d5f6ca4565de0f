// The fuzzed scenario: the code of a device, a layer server, its worker, a foreign executor and a canceller,
// on csrc/device/protocol.h and csrc/engine/task_queue.h. Numbers replace attention.
//
// Sync provides synchronisation and choices: `Simulated` (fuzz.cc) or real threads (stress.cc).
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "device/protocol.h"
#include "engine/task_queue.h"

namespace fuzz {

using namespace fluxion;

struct Rules {
  int layers = 2;
  int tasks = 2;        // one of them is only for the foreign executor
  bool own = false;     // the other tasks are only for the workers
  int blocks = 1;       // of a take, 1 or 2; the first one polls
  bool parts = false;   // the host reads them
  bool copies = false;  // the device keeps a copy of its own word kLate in its memory
  bool faults = false;  // time-outs, and failed, forgotten and late tasks
  bool cancels = false;
};

inline constexpr int kMaxLayers = 8, kMaxTasks = 5, kMaxBlocks = 2;
inline constexpr uint32_t kNothing = 0xffffffff;  // represents an lse of -inf

template <class Sync>
class Scenario {
  template <class T>
  using Atomic = typename Sync::template Atomic<T>;
  template <class T>
  using Cell = typename Sync::template Cell<T>;
  using Mutex = typename Sync::Mutex;
  using Patience = typename Sync::Patience;
  using Queue = BasicTaskQueue<Sync>;

  struct Memory {
    Scenario* of;
    Atomic<uint32_t>& word(MailboxWord word) const { return of->words_[word]; }
    void fence() { Sync::fence(); }
  };
  using Words = AtomicWords<Memory>;

  struct DeviceWords {
    Scenario* of;
    uint32_t load(MailboxWord word) const {
      return word == kLate && of->rules_.copies ? of->late_here_.load(std::memory_order_acquire)
                                                : of->words().load(word);
    }
    void store(MailboxWord word, uint32_t value) {
      of->words().store(word, value);
      if (word != kLate || !of->rules_.copies) return;
      fence();
      of->late_here_.store(value, std::memory_order_release);
    }
    void fence() { Sync::fence(); }
  };

  enum class End : uint8_t { kNone, kAnswered, kFailed, kGaveUp };

 public:
  Scenario() { queue_.reserve(kMaxTasks); }

  // The threads of a pass of `rules.layers` layers; all must run concurrently. Call check() afterwards.
  std::vector<std::function<void()>> threads(const Rules& rules) {
    rules_ = rules;
    first_layer_ += kMaxLayers;
    stop_.store(false);
    launched_.store(0);
    finished_.store(0);
    looked_.store(0);
    go_.store(0);
    left_.store(0);
    host_ = {};
    for (auto& ends : device_) ends = {};
    std::vector<std::function<void()>> bodies = {[this] { device(); }, [this] { server(); },
                                                 [this] { worker(); }, [this] { puller(); }};
    if (rules.blocks > 1) bodies.push_back([this] { second_block(); });
    if (rules.cancels) bodies.push_back([this] { cancel(); });
    return bodies;
  }

  // Call after the threads have ended. Returns "" or the error.
  std::string check(bool nothing_went_wrong) const {
    for (int s = 1; s <= rules_.layers; ++s) {
      for (int block = 0; block < rules_.blocks; ++block) {
        const End end = device_[block][s];
        if (end == End::kNone) return "the device did not come to its end";
        if ((host_[s] == End::kAnswered || host_[s] == End::kFailed) && end != host_[s])
          return "the host says that a layer was answered, and the device did not take it";
        if (end != End::kGaveUp && host_[s] == End::kNone) return "the device took what was not answered";
      }
      if (nothing_went_wrong && host_[s] != End::kAnswered) return "a layer failed without a reason";
    }
    return "";
  }

  // Call between two passes.
  void reset_mailbox() {
    Words words = this->words();
    reset(words);
    late_here_.store(0);
  }

 private:
  Words words() { return Words(Memory{this}); }
  Cell<uint32_t>& cell(int64_t offset) { return cells_[offset / 256]; }
  static MailboxSlot slot(uint32_t sequence) { return mailbox_slot(kShape, sequence); }
  // Numbers that represent a layer's data, different for each field.
  static uint32_t parts_of(uint32_t sequence) { return sequence | 0x100; }
  static uint32_t output_of(uint32_t sequence) { return sequence | 0x200; }
  static uint32_t begin_of(uint32_t sequence) { return sequence | 0x400; }

  // ---- The device: one stream.

  void device() {
    DeviceWords words{this};
    for (uint32_t s = 1; s <= static_cast<uint32_t>(rules_.layers); ++s) {
      const MailboxSlot at = slot(s);
      if (!gave_up(words)) {
        for (int64_t offset : {at.q, at.k, at.v, at.layer, at.published_at}) cell(offset).write(s);
        cell(at.taken_at).write(0);
        announce(words, kPublished, s);
      }
      if (rules_.parts && !gave_up(words)) {
        cell(at.parts).write(parts_of(s));
        announce(words, kObserved, s);
      }
      launched_.store(s, std::memory_order_release);
      take(s, 0);
      while (rules_.blocks > 1 && finished_.load(std::memory_order_acquire) != s) Sync::pause();
    }
  }

  void second_block() {
    for (uint32_t s = 1; s <= static_cast<uint32_t>(rules_.layers); ++s) {
      while (launched_.load(std::memory_order_acquire) != s) Sync::pause();
      take(s, 1);
      finished_.store(s, std::memory_order_release);
    }
  }

  // For the first block: whether the answer is there.
  bool wait_for_host(uint32_t s) {
    DeviceWords words{this};
    Patience patience;
    const bool stamps = !gave_up(words);
    if (stamps) cell(slot(s).taken_at).write(begin_of(s));
    Take look;
    while ((look = look_for_answer(words, s, patience.spent())) == Take::kWait) patience.pause();
    const bool taken = look == Take::kTaken;
    looked_.store(look_of(s, taken), std::memory_order_release);
    if (stamps && taken) cell(slot(s).taken_at).write(s);
    return taken;
  }

  bool wait_for_first(uint32_t s) {
    uint32_t found;
    while (!is_look_of(found = looked_.load(std::memory_order_acquire), s)) Sync::pause();
    return found_answer(found);
  }

  void take(uint32_t s, int block) {
    DeviceWords words{this};
    if (!(block == 0 ? wait_for_host(s) : wait_for_first(s))) {
      device_[block][s] = End::kGaveUp;
      return;
    }
    const uint32_t lse = cell(slot(s).lse).read();
    if (lse == kNothing) {
      Sync::check(reached(words.load(kFailed), s), "a layer has no result and did not fail");
      device_[block][s] = End::kFailed;
      return;
    }
    Sync::check(lse == s && cell(slot(s).o).read() == output_of(s),
                "the device takes the result of another layer");
    device_[block][s] = End::kAnswered;
  }

  // ---- The host.

  void server() {
    for (uint32_t s = 1; s <= static_cast<uint32_t>(rules_.layers); ++s) {
      if (serve(s)) continue;
      words().store(kCancel, 1);
      break;
    }
    go_.store(kNothing, std::memory_order_release);
    stop_.store(true, std::memory_order_release);
  }

  bool serve(uint32_t s) {
    Words words = this->words();
    const MailboxSlot at = slot(s);
    if (wait_for(words, kPublished, s, Patience()) != Wait::kReady) return false;
    if (s > 1) {
      Sync::check(cell(slot(s - 1).taken_at).read() == s - 1,
                  "the times of a layer that was taken are another's");
    }
    for (int64_t offset : {at.q, at.k, at.v, at.layer, at.published_at})
      Sync::check(cell(offset).read() == s, "the host reads what another layer published");
    if (rules_.parts) {
      if (wait_for(words, kObserved, s, Patience()) != Wait::kReady) return false;
      Sync::check(cell(at.parts).read() == parts_of(s), "the host reads another layer's parts");
    }
    const bool whole = compute(s);
    bool heard;
    if (whole) {
      cell(at.o).write(output_of(s));
      cell(at.lse).write(s);
      heard = answer(words, s);
    } else {
      cell(at.lse).write(kNothing);
      heard = answer_failed(words, s);
    }
    // A policy may look at its layer until the next one is answered.
    Sync::check(cell(at.q).read() == s, "a layer was published over the one at hand");
    if (rules_.parts)
      Sync::check(cell(at.parts).read() == parts_of(s), "parts of the layer at hand were written over");
    host_[s] = !heard ? End::kGaveUp : whole ? End::kAnswered : End::kFailed;
    return heard;
  }

  // The work of Engine from layer_begin to layer_finish. False: the layer failed.
  bool compute(uint32_t s) {
    const uint32_t layer = first_layer_ + s;
    args_.write(layer);
    failed_.write(false);
    for (int t = 0; t < rules_.tasks; ++t) {
      results_[t].write(0);
      ends_[t] = 0;
    }
    {
      const std::lock_guard lock(foreign_);
      std::array<int, kLanes> lanes{};
      lanes[static_cast<int>(Executor::kTorch)] = 1;
      lanes[static_cast<int>(rules_.own ? Executor::kCpu : Executor::kAny)] = rules_.tasks - 1;
      queue_.open(lanes);
      open_.store(true, std::memory_order_release);
    }
    go_.store(s, std::memory_order_release);
    work();
    while (left_.load(std::memory_order_acquire) != s) Sync::pause();
    Patience patience;
    while (!queue_.all_done() && !patience.spent()) patience.pause();
    bool lost = false;
    if (!queue_.all_done()) {
      revoke_rest(queue_, foreign_, [&](int task, Executor) {
        ++ends_[task];
        lost = true;
      });
    }
    {
      const std::lock_guard lock(foreign_);
      queue_.close();
      open_.store(false, std::memory_order_release);
    }
    for (int t = 0; t < rules_.tasks; ++t) Sync::check(ends_[t] == 1, "a task was not ended exactly once");
    if (lost || failed_.read()) return false;
    for (int t = 0; t < rules_.tasks; ++t)
      Sync::check(results_[t].read() == layer, "a task has the result of another layer");
    return true;
  }

  // The work of a native worker.
  void work() {
    for (int64_t claim; (claim = queue_.pop(Executor::kCpu)) >= 0;) {
      const int task = Queue::task_of(claim);
      results_[task].write(args_.read());
      ++ends_[task];
      queue_.finish(claim);
    }
  }

  void worker() {
    for (uint32_t seen = 0;;) {
      const uint32_t s = go_.load(std::memory_order_acquire);
      if (s == kNothing) return;
      if (s == seen) {
        Sync::pause();
        continue;
      }
      seen = s;
      work();
      left_.store(s, std::memory_order_release);
    }
  }

  struct Claim {
    int64_t claim;
    uint32_t layer;
  };

  void puller() {
    while (!stop_.load(std::memory_order_acquire)) {
      const int64_t claim = claim_next(queue_, foreign_, Executor::kTorch);
      const uint32_t layer = claim < 0 ? 0 : layer_of(claim);
      // Deliver a forgotten task now: in this layer or a later one, in this pass or the next.
      if (!late_.empty() && Sync::choose(3) != 1) {
        const Claim then = late_.back();
        late_.pop_back();
        deliver(then);
      }
      if (layer == 0) {
        Sync::pause();
        continue;
      }
      switch (rules_.faults && Sync::seldom() ? 1 + Sync::choose(3) : 0) {
        case 1:
          Sync::fault();
          settle(queue_, foreign_, claim, [&](int task, Executor) {
            ++ends_[task];
            failed_.write(true);
          });
          break;
        case 2:
          Sync::fault();
          late_.push_back({claim, layer});
          break;
        case 3:
          deliver({claim, layer});
          Sync::check(!deliver({claim, layer}), "a task is delivered twice");
          break;
        default:
          deliver({claim, layer});
      }
    }
  }

  // Layer of a claim that holds; 0: it does not hold. See Engine::task.
  uint32_t layer_of(int64_t claim) {
    const std::lock_guard lock(foreign_);
    Executor executor;
    if (!open_.load(std::memory_order_acquire) || !queue_.holds(claim, &executor)) return 0;
    Sync::check(executor == Executor::kTorch, "a claim is another executor's");
    return args_.read();
  }

  bool deliver(const Claim& claim) {
    return settle(queue_, foreign_, claim.claim, [&](int task, Executor executor) {
      Sync::check(executor == Executor::kTorch, "a claim is another executor's");
      Sync::check(args_.read() == claim.layer, "a delivery for another layer is accepted");
      results_[task].write(claim.layer);
      ++ends_[task];
    });
  }

  void cancel() {
    Sync::fault();
    words().store(kCancel, 1);
  }

  static constexpr MailboxShape kShape{1, 1, 1, 16, 4};
  static constexpr int64_t kCells = mailbox_bytes(kShape) / 256;

  Rules rules_;
  uint32_t first_layer_ = 0;  // base of the pass; layer numbers are unique
  std::array<Atomic<uint32_t>, kMailboxWords> words_;
  std::array<Cell<uint32_t>, kCells> cells_;
  Atomic<uint32_t> late_here_{0};
  Atomic<uint32_t> launched_{0}, finished_{0};  // by the takes of the stream
  Atomic<uint32_t> looked_{0};
  Atomic<uint32_t> go_{0}, left_{0};  // WorkerPool: launched, and joined
  Atomic<bool> stop_{false}, open_{false};
  Queue queue_;
  Mutex foreign_;
  Cell<uint32_t> args_;  // LayerInput
  Cell<bool> failed_;
  std::array<Cell<uint32_t>, kMaxTasks> results_;
  std::vector<Claim> late_;  // claims not yet delivered
  // Results of the pass, outside the protocol's shared memory. ends_ has one writer at a time if the protocol
  // is right.
  std::array<int, kMaxTasks> ends_{};
  std::array<End, kMaxLayers + 1> host_{};
  std::array<std::array<End, kMaxLayers + 1>, kMaxBlocks> device_{};
};

}  // namespace fuzz
