#include "device/steady_step.h"

#include <stdexcept>
#include <string>

namespace fluxion {

namespace {

void attend(const Mailbox& mailbox, Engine& engine, const SteadyStep& step, uint32_t sequence, int layer) {
  const MailboxShape& s = mailbox.shape();
  const MailboxSlot at = mailbox_slot(s, sequence);
  char* arena = mailbox.arena();
  if (const int published = *reinterpret_cast<const int32_t*>(arena + at.layer); published != layer) {
    throw std::runtime_error("The device published layer " + std::to_string(published) + " where layer " +
                             std::to_string(layer) + " comes next.");
  }
  const int64_t row = int64_t{s.head_dim} * s.element;
  const AttentionLayer of{.index = layer, .scale = step.scale};
  LayerInput in{};
  in.q = arena + at.q;
  in.q_stride = s.q_heads * row;
  in.k = {arena + at.k, s.kv_heads * row, row};
  in.v = {arena + at.v, s.kv_heads * row, row};
  LayerOutput to;
  to.o = reinterpret_cast<float*>(arena + at.o);
  to.lse = reinterpret_cast<float*>(arena + at.lse);
  engine.begin(of, in, to, step.plans[sequence % 2]);
  engine.finish();
}

}  // namespace

Served serve(Mailbox& mailbox, Engine& engine, const SteadyStep& step) {
  Served served{0, Wait::kReady, true};
  for (; served.layers < step.layers && served.taken; ++served.layers) {
    const uint32_t sequence = step.sequence + static_cast<uint32_t>(served.layers);
    served.wait = mailbox.wait(kPublished, sequence, step.timeout_ns);
    if (served.wait != Wait::kReady) break;
    try {
      attend(mailbox, engine, step, sequence, served.layers);
    } catch (...) {
      mailbox.fail(sequence);
      throw;
    }
    served.taken = mailbox.answer(sequence);
  }
  return served;
}

}  // namespace fluxion
