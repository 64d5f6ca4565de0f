#include "emulate/fibers.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <new>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#define FLUXION_UNSEEN __attribute__((no_sanitize("thread")))
#else
#define FLUXION_UNSEEN
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

// How a fiber is entered and left. Only the scheduler, in the stream's thread, enters a fiber, and a fiber
// leaves only to the scheduler. What both touch is hidden from ThreadSanitizer, which sees them as different
// threads, on purpose.
namespace fluxion::emulate {

namespace {

constexpr size_t kStack = 256 << 10, kGuard = 4096;

enum class State { kReady, kInBlock, kInWarp, kDone };

struct Context {
#if defined(__x86_64__)
  void* sp = nullptr;
#else
  ucontext_t context;
#endif
  const void* stack_bottom = nullptr;
  size_t stack_size = 0;
  void* fake_stack = nullptr;
  void* tsan = nullptr;
};

struct Warp {
  uint32_t slots[2][32];
  int lanes = 0, live = 0, arrived = 0;
  char order;  // what ThreadSanitizer orders the warp's lanes by
};

struct Block {
  Context* scheduler = nullptr;
  const std::function<void()>* thread = nullptr;
  std::vector<Warp> warps;
  int live = 0, arrived = 0;
  bool running = false;
  std::vector<unsigned char> shared;
  char order;  // the same for the block
};

void release(void* token) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(token);
#else
  (void)token;
#endif
}

void acquire(void* token) {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(token);
#else
  (void)token;
#endif
}

thread_local Block* block = nullptr;
thread_local Fiber* running = nullptr;

#if defined(__x86_64__)
// Saves the registers that a function must keep by the ABI, and goes on where `to` stopped.
extern "C" void fluxion_switch_stack(void** save, void* to);
asm(R"(
.pushsection .text
.hidden fluxion_switch_stack
.globl fluxion_switch_stack
.type fluxion_switch_stack, @function
fluxion_switch_stack:
  endbr64
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size fluxion_switch_stack, .-fluxion_switch_stack
.popsection
)");
#endif

}  // namespace

constinit thread_local Thread* current = nullptr;

struct Fiber {
  Context context;
  Thread thread;
  State state = State::kDone;
  int lane = 0, turn = 0;
  Warp* warp = nullptr;
  Block* block = nullptr;
  char* memory = nullptr;

  Fiber() {
    void* mapped = mmap(nullptr, kGuard + kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    memory = static_cast<char*>(mapped);
    mprotect(memory, kGuard, PROT_NONE);
    context.stack_bottom = memory + kGuard;
    context.stack_size = kStack;
#if defined(__SANITIZE_THREAD__)
    context.tsan = __tsan_create_fiber(0);
#endif
#if defined(__x86_64__)
    // As if `enter` had been called and had switched away at once: six registers, then where to go on.
    auto* top = reinterpret_cast<void**>(memory + kGuard + kStack);
    *--top = nullptr;  // the return address of `enter`: the stack is as the ABI has it at a function's start
    *--top = reinterpret_cast<void*>(&Fiber::enter);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    context.sp = top;
#else
    getcontext(&context.context);
    context.context.uc_stack.ss_sp = memory + kGuard;
    context.context.uc_stack.ss_size = kStack;
    context.context.uc_link = nullptr;
    makecontext(&context.context, &Fiber::enter, 0);
#endif
  }
  ~Fiber() {
#if defined(__SANITIZE_THREAD__)
    __tsan_destroy_fiber(context.tsan);
#endif
    munmap(memory, kGuard + kStack);
  }

  // A fiber lives for many blocks: this never returns.
  FLUXION_UNSEEN static void enter() {
    Fiber* self = running;
    self->entered();
    for (;;) {
      work(self);
      self->leave(State::kDone);
    }
  }

  // From the scheduler into the fiber; returns when it has left again.
  FLUXION_UNSEEN void go() {
    Context& from = *block->scheduler;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&from.fake_stack, context.stack_bottom, context.stack_size);
#endif
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(context.tsan, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__x86_64__)
    fluxion_switch_stack(&from.sp, context.sp);
#else
    swapcontext(&from.context, &context.context);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
  }

  // Back to the scheduler; returns when the fiber is entered again, maybe for another block.
  FLUXION_UNSEEN void leave(State next) {
    state = next;
    Context& to = *block->scheduler;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&context.fake_stack, to.stack_bottom, to.stack_size);
#endif
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(to.tsan, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__x86_64__)
    fluxion_switch_stack(&context.sp, to.sp);
#else
    swapcontext(&context.context, &to.context);
#endif
    entered();
  }

  FLUXION_UNSEEN void entered() {
#if defined(__SANITIZE_ADDRESS__)
    Context& from = *block->scheduler;
    __sanitizer_finish_switch_fiber(context.fake_stack, &from.stack_bottom, &from.stack_size);
#endif
  }

  FLUXION_UNSEEN static void work(Fiber* self) {
    acquire(&self->block->order);
    (*self->block->thread)();
    release(&self->block->order);
  }
};

FLUXION_UNSEEN void wait_block() {
  Fiber* self = running;
  release(&self->block->order);
  self->leave(State::kInBlock);
  acquire(&self->block->order);
}

FLUXION_UNSEEN void wait_warp() {
  Fiber* self = running;
  release(&self->warp->order);
  self->leave(State::kInWarp);
  acquire(&self->warp->order);
}

FLUXION_UNSEEN uint32_t* exchange() {
  Fiber* self = running;
  if (self->warp->lanes < 32) std::abort();  // a shuffle would read a value that no lane gave
  self->turn ^= 1;
  return self->warp->slots[self->turn];
}

FLUXION_UNSEEN int lane() { return running->lane; }
FLUXION_UNSEEN void* shared_memory() { return running->block->shared.data(); }

Fibers::Fibers() = default;
Fibers::~Fibers() = default;

void Fibers::run(dim3 grid, dim3 size, size_t shared_bytes, const std::function<void()>& thread) {
  const int threads = static_cast<int>(size.x * size.y * size.z);
  while (static_cast<int>(fibers_.size()) < threads) fibers_.push_back(std::make_unique<Fiber>());
  Context scheduler;
#if defined(__SANITIZE_THREAD__)
  scheduler.tsan = __tsan_get_current_fiber();
#endif
  Block here;
  here.scheduler = &scheduler;
  here.thread = &thread;
  here.warps.resize(static_cast<size_t>(threads + 31) / 32);
  here.shared.resize(shared_bytes);
  Block* const outer = block;
  block = &here;
  for (int t = 0; t < threads; ++t) {
    Fiber& fiber = *fibers_[t];
    const unsigned i = static_cast<unsigned>(t);
    fiber.thread = {dim3(i % size.x, i / size.x % size.y, i / size.x / size.y), dim3(), grid};
    fiber.lane = t % 32;
    fiber.warp = &here.warps[t / 32];
    fiber.block = &here;
  }
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        for (int t = 0; t < threads; ++t) fibers_[t]->thread.block = dim3(x, y, z);
        run_block(thread, threads);
      }
    }
  }
  block = outer;
}

FLUXION_UNSEEN void Fibers::run_block(const std::function<void()>&, int threads) {
  Block& here = *block;
  std::fill(here.shared.begin(), here.shared.end(), 0xff);
  here.live = threads;
  here.arrived = 0;
  for (size_t w = 0; w < here.warps.size(); ++w) {
    Warp& warp = here.warps[w];
    warp.lanes = warp.live = std::min(32, threads - 32 * static_cast<int>(w));
    warp.arrived = 0;
  }
  for (int t = 0; t < threads; ++t) fibers_[t]->state = State::kReady;
  release(&here.order);
  for (bool forward = true; here.live > 0; forward = !forward) {
    bool ran = false;
    for (int i = 0; i < threads; ++i) {
      Fiber& fiber = *fibers_[forward ? i : threads - 1 - i];
      if (fiber.state != State::kReady) continue;
      ran = true;
      running = &fiber;
      current = &fiber.thread;
      fiber.go();
      running = nullptr;
      current = nullptr;
      if (fiber.state == State::kInBlock) ++here.arrived;
      if (fiber.state == State::kInWarp) ++fiber.warp->arrived;
      if (fiber.state == State::kDone) --here.live, --fiber.warp->live;
    }
    // Fibers whose warp or block has arrived completely go on in the next round.
    for (int t = 0; t < threads; ++t) {
      Fiber& fiber = *fibers_[t];
      const bool warp = fiber.state == State::kInWarp && fiber.warp->arrived == fiber.warp->live;
      if (warp || (fiber.state == State::kInBlock && here.arrived == here.live)) {
        fiber.state = State::kReady;
        ran = true;
      }
    }
    for (int w = 0; w < static_cast<int>(here.warps.size()); ++w) {
      if (here.warps[w].arrived == here.warps[w].live) here.warps[w].arrived = 0;
    }
    if (here.arrived == here.live) here.arrived = 0;
    if (!ran) {
      std::fputs("The threads of a block wait at different barriers.\n", stderr);
      std::abort();
    }
  }
  acquire(&here.order);
}

}  // namespace fluxion::emulate
