// The CPU's half of a step whose tiles a device has chosen (far_tiles.h): the CPU has nothing to decide.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "device/mailbox.h"
#include "engine/engine.h"

namespace fluxion {

struct SteadyStep {
  std::array<std::shared_ptr<const LayerPlan>, 2> plans;  // for even and odd sequence numbers
  uint32_t sequence;                                      // of the first layer
  int layers;
  float scale;
  int64_t timeout_ns;  // how long to wait for a layer
};

struct Served {
  int layers;  // answered layers
  Wait wait;   // of the next one; kReady: there is none, or the device did not take the last answer
  bool taken;
};

// Waits for each layer of the engine's step and answers it. If a layer throws, answers it as failed and
// rethrows.
Served serve(Mailbox& mailbox, Engine& engine, const SteadyStep& step);

}  // namespace fluxion
