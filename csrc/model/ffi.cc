// The C ABI of model layers. Arguments are checked here: each layer is checked once and becomes a step, which
// runs at once, or with every run of the program that it was added to.
#include <tvm/ffi/cast.h>
#include <tvm/ffi/optional.h>

#include <memory>
#include <utility>
#include <vector>

#include "ffi/program.h"
#include "model/delta_rule.h"
#include "model/experts.h"
#include "model/linear.h"
#include "model/rows.h"
#include "runtime/host_memory.h"

namespace fluxion {
namespace {

// Computes layers: workers, kernels by DType, and scratch memory for one layer at a time.
class LayersObj : public ffi::Object {
 public:
  LayersObj(std::shared_ptr<WorkerPool> w, const KernelTable* f32, const KernelTable* bf16)
      : workers(std::move(w)), tables{f32, bf16} {}
  std::shared_ptr<WorkerPool> workers;
  const KernelTable* tables[2];
  LinearScratch scratch;
  ExpertsScratch experts;
  DeltaRuleScratch delta_rule;
  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("fluxion.Layers", LayersObj, ffi::Object);

  const KernelTable& kernels(DType dtype) const { return *tables[static_cast<int>(dtype)]; }
};
class Layers : public ffi::ObjectRef {
 public:
  explicit Layers(ffi::ObjectPtr<LayersObj> object) : ffi::ObjectRef(std::move(object)) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(Layers, ffi::ObjectRef, LayersObj);
};

Layers layers_create(Workers workers, ffi::String isa) {
  if (!isa.empty() && kernel_table(isa.c_str(), DType::kF32) == nullptr) {
    Raise("ValueError") << "This CPU cannot run the instruction set \"" << isa.c_str()
                        << "\"; choose one of topology()[\"isas\"].";
  }
  return guarded([&] {
    const auto table = [&](DType dtype) {
      return isa.empty() ? best_kernel_table(dtype) : kernel_table(isa.c_str(), dtype);
    };
    return Layers(ffi::make_object<LayersObj>(workers->pool, table(DType::kF32), table(DType::kBF16)));
  });
}

// float32 or bfloat16, as x has it.
DType dtype_of(const TensorView& x) {
  if (same(x.dtype(), kBFloat16)) return DType::kBF16;
  if (same(x.dtype(), kFloat32)) return DType::kF32;
  Raise("ValueError") << "x has the dtype " << dtype_text(x.dtype())
                      << "; the kernels serve bfloat16 and float32.";
  TVM_FFI_UNREACHABLE();
}

DLDataType type_of(DType dtype) { return dtype == DType::kBF16 ? kBFloat16 : kFloat32; }

int int_size(int64_t size, const char* name) {
  if (size > INT32_MAX / 4)
    Raise("ValueError") << name << " is larger than the kernels count; use torch for it.";
  return static_cast<int>(size);
}

// Checks weights that may be packed: [outputs][in], contiguous, of a dtype and inputs that have panels.
DType expect_panels(const LayersObj& layers, const TensorView& weights) {
  const DType dtype = dtype_of(weights);
  expect(weights, "weights", type_of(dtype), {-1, -1}, 2);
  if (layers.kernels(dtype).panels.outputs == 0)
    Raise("ValueError") << "No weights of this dtype are packed for this instruction set.";
  if (weights.size(1) < 1 || weights.size(1) % kLinearPad != 0)
    Raise("ValueError") << "weights has " << weights.size(1) << " columns; packed ones have a multiple of "
                        << kLinearPad << ".";
  return dtype;
}

LinearLayer linear_layer(DType dtype, const TensorView& x, const TensorView& weights, int64_t outputs,
                         const ffi::Optional<TensorView>& bias, const TensorView& out) {
  const DLDataType type = type_of(dtype);
  expect(x, "x", type, {-1, -1}, 1);
  expect(out, "out", type, {x.size(0), outputs}, 1);
  if (bias.has_value()) expect(bias.value(), "bias", type, {outputs}, 1);
  LinearLayer layer{};
  layer.x = data<char>(x);
  layer.x_stride = x.stride(0);
  layer.rows = int_size(x.size(0), "x");
  layer.in = int_size(x.size(1), "x");
  layer.outputs = int_size(outputs, "weights");
  layer.weights = data<char>(weights);
  layer.stride = weights.stride(0);
  layer.bias = bias.has_value() ? data<char>(bias.value()) : nullptr;
  layer.out = data<char>(out);
  layer.out_stride = out.stride(0);
  if (layer.in < 1) Raise("ValueError") << "x has no columns; a layer multiplies at least one.";
  return layer;
}

auto linear_step(Layers layers, TensorView x, TensorView weights, ffi::Optional<TensorView> order,
                 ffi::Optional<TensorView> bias, TensorView out) {
  const DType dtype = dtype_of(x);
  expect(weights, "weights", type_of(dtype), {-1, x.ndim() == 2 ? x.size(1) : -1}, 1);
  LinearLayer layer = linear_layer(dtype, x, weights, weights.size(0), bias, out);
  if (order.has_value()) {
    expect_panels(*layers.get(), weights);
    expect(order.value(), "order", kInt32, {1}, 1);
    layer.order = data<int32_t>(order.value());
  }
  return [=, at = layers.get()] { linear(*at->workers, at->kernels(dtype), dtype, layer, &at->scratch); };
}

// The format of quantised weights with `in` inputs. Raises if no kernel has it.
QuantisedFormat expect_format(int64_t bits, int64_t group, bool minima, int64_t in) {
  const bool half = bits == 8 && group == kQuantisedBlock / 2 && !minima;
  if ((bits != 4 && bits != 8) || group < 1 || (group % kQuantisedBlock != 0 && !half))
    Raise("ValueError") << "The kernels have no weights of " << bits << " bits in groups of " << group
                        << (minima ? " with minima" : "") << ".";
  if (in < 1 || in % kQuantisedBlock != 0)
    Raise("ValueError") << "x has " << in << " columns; quantised weights have a multiple of "
                        << kQuantisedBlock << ".";
  return {static_cast<int>(bits), int_size(group, "group"), minima};
}

// The same for weights [panels, bytes of a panel] with `outputs` outputs.
QuantisedFormat expect_quantised(const TensorView& weights, int64_t bits, int64_t group, bool minima,
                                 int64_t outputs, int64_t in) {
  const QuantisedFormat format = expect_format(bits, group, minima, in);
  expect(weights, "weights", kUInt8,
         {(outputs + kQuantisedPanel - 1) / kQuantisedPanel, panel_bytes(format, in)}, 2);
  return format;
}

auto linear_quantised_step(Layers layers, TensorView x, TensorView weights, int64_t bits, int64_t group,
                           bool minima, ffi::Optional<TensorView> bias, TensorView out) {
  const DType dtype = dtype_of(x);
  expect(x, "x", type_of(dtype), {-1, -1}, 1);
  expect(out, "out", type_of(dtype), {x.size(0), -1}, 1);
  LinearLayer layer = linear_layer(dtype, x, weights, out.size(1), bias, out);
  layer.format = expect_quantised(weights, bits, group, minima, out.size(1), x.size(1));
  return [=, at = layers.get()] { linear(*at->workers, at->kernels(dtype), dtype, layer, &at->scratch); };
}

void layers_widen(Layers layers, TensorView weights, int64_t bits, int64_t group, bool minima,
                  TensorView out) {
  const DType dtype = dtype_of(out);
  expect(out, "out", type_of(dtype), {-1, -1}, 2);
  const QuantisedFormat format = expect_quantised(weights, bits, group, minima, out.size(0), out.size(1));
  guarded([&] {
    widen(*layers->workers, layers->kernels(dtype), data<char>(weights), format, out.size(0),
          int_size(out.size(1), "weights"), dtype, data<char>(out));
  });
}

int64_t layers_panel(Layers layers) { return layers->kernels(DType::kBF16).panels.outputs; }

bool layers_gain_from_packing(Layers layers, TensorView weights) {
  const DType dtype = dtype_of(weights);
  expect(weights, "weights", type_of(dtype), {-1, -1}, 1);
  const KernelTable& kernels = layers->kernels(dtype);
  return gains_from_packing(kernels, weights.size(1)) && weights.size(0) >= kernels.panels.outputs &&
         weights.stride(0) == weights.size(1);
}

void layers_repack(Layers layers, TensorView weights, TensorView out, bool unpack) {
  const DType dtype = expect_panels(*layers.get(), weights);
  expect(out, "out", type_of(dtype), {weights.size(0), weights.size(1)}, 2);
  const char *from = data<char>(weights), *to = data<char>(out);
  const int64_t bytes = weights.numel() * element_bytes(dtype);
  if (from != to && from < to + bytes && to < from + bytes)
    Raise("ValueError") << "out overlaps with weights; give the same tensor, or another one.";
  guarded([&] {
    repack(*layers->workers, layers->kernels(dtype).panels, dtype, from, weights.size(0),
           int_size(weights.size(1), "weights"), unpack, data<char>(out));
  });
}

void layers_into_huge_pages(TensorView weights) {
  const bool bytes = same(weights.dtype(), kUInt8);
  expect(weights, "weights", bytes ? kUInt8 : type_of(dtype_of(weights)), {-1, -1}, 1);
  char* first = data<char>(weights);
  const int64_t rows = weights.size(0), element = bytes ? 1 : element_bytes(dtype_of(weights));
  if (rows > 0) into_huge_pages(first, first + ((rows - 1) * weights.stride(0) + weights.size(1)) * element);
}

Rows rows_of(const TensorView& t, DType dtype, int64_t column = 0) {
  return {data<char>(t) + column * element_bytes(dtype), t.stride(0) * element_bytes(dtype)};
}

auto norm_step(Layers layers, TensorView x, ffi::Optional<TensorView> residual, TensorView weight,
               double epsilon, bool gemma, TensorView out, ffi::Optional<TensorView> sum) {
  const DType dtype = dtype_of(x);
  const DLDataType type = type_of(dtype);
  expect(x, "x", type, {-1, -1}, 1);
  expect(weight, "weight", type, {x.size(1)}, 1);
  expect(out, "out", type, {x.size(0), x.size(1)}, 1);
  NormRows rows{};
  if (both(residual, "residual", sum, "sum")) {
    expect(residual.value(), "residual", type, {x.size(0), x.size(1)}, 1);
    expect(sum.value(), "sum", type, {x.size(0), x.size(1)}, 1);
    rows.residual = rows_of(residual.value(), dtype);
    rows.sum = rows_of(sum.value(), dtype);
  }
  rows.x = rows_of(x, dtype);
  rows.out = rows_of(out, dtype);
  rows.weight = data<char>(weight);
  rows.size = int_size(x.size(1), "x");
  rows.epsilon = static_cast<float>(epsilon);
  rows.gemma = gemma;
  return
      [=, at = layers.get(), count = x.size(0)] { norm_rows(*at->workers, at->kernels(dtype), count, rows); };
}

auto gate_mul_step(Layers layers, TensorView x, bool gelu, TensorView out) {
  const DType dtype = dtype_of(x);
  expect(out, "out", type_of(dtype), {-1, -1}, 1);
  expect(x, "x", type_of(dtype), {out.size(0), 2 * out.size(1)}, 1);
  const GateRows rows{rows_of(x, dtype), rows_of(x, dtype, out.size(1)), rows_of(out, dtype),
                      int_size(out.size(1), "out"), gelu};
  return
      [=, at = layers.get(), count = x.size(0)] { gate_rows(*at->workers, at->kernels(dtype), count, rows); };
}

auto rope_step(Layers layers, TensorView positions, TensorView q, TensorView k, TensorView cos_sin,
               int64_t head_dim, bool halves, TensorView q_out, TensorView k_out) {
  const DType dtype = dtype_of(q);
  const DLDataType type = type_of(dtype);
  const int64_t count = q.size(0);
  expect(positions, "positions", kInt64, {count}, 1);
  expect(q, "q", type, {count, -1}, 1);
  expect(k, "k", type, {count, -1}, 1);
  expect(q_out, "q_out", type, {count, q.size(1)}, 1);
  expect(k_out, "k_out", type, {count, k.size(1)}, 1);
  expect(cos_sin, "cos_sin", type, {-1, -1}, 1);
  const int64_t rotary = cos_sin.size(1);
  if (head_dim < 1 || rotary > head_dim || rotary % 2 != 0 || q.size(1) % head_dim != 0 ||
      k.size(1) % head_dim != 0) {
    Raise("ValueError") << "q has " << q.size(1) << " columns, k " << k.size(1) << " and cos_sin " << rotary
                        << "; with a head_dim of " << head_dim
                        << " the first two must be multiples of it, and the last an even number up to it.";
  }
  const int64_t* position = data<int64_t>(positions);
  const RopeRows rows{rows_of(q, dtype),
                      rows_of(k, dtype),
                      rows_of(q_out, dtype),
                      rows_of(k_out, dtype),
                      int_size(q.size(1) / head_dim, "q"),
                      int_size(k.size(1) / head_dim, "k"),
                      int_size(head_dim, "head_dim"),
                      int_size(rotary, "cos_sin"),
                      halves,
                      position,
                      rows_of(cos_sin, dtype)};
  return [=, at = layers.get(), known = cos_sin.size(0)] {
    for (int64_t i = 0; i < count; ++i) {
      if (position[i] < 0 || position[i] >= known)
        Raise("IndexError") << "Position " << position[i] << " is not among the " << known << " of cos_sin.";
    }
    rope_rows(*at->workers, at->kernels(dtype), count, rows);
  };
}

// Checks the arguments of all layers of experts. Returns their shape without the weights.
ExpertsLayer experts_layer(DType dtype, const TensorView& x, const TensorView& ids, const TensorView& weights,
                           const TensorView& gate_up, bool gelu, double alpha, double limit,
                           const TensorView& out) {
  const DLDataType type = type_of(dtype);
  expect(x, "x", type, {-1, -1}, 1);
  expect(ids, "ids", kInt32, {x.size(0), -1}, 2);
  expect(weights, "weights", kFloat32, {x.size(0), ids.size(1)}, 2);
  expect(out, "out", type, {x.size(0), x.size(1)}, 1);
  if (gate_up.ndim() != 3) Raise("ValueError") << "gate_up has " << gate_up.ndim() << " dimensions, not 3.";
  ExpertsLayer layer{};
  layer.x = rows_of(x, dtype);
  layer.out = rows_of(out, dtype);
  layer.rows = x.size(0);
  layer.hidden = int_size(x.size(1), "x");
  layer.experts = int_size(gate_up.size(0), "gate_up");
  layer.chosen = int_size(ids.size(1), "ids");
  layer.ids = data<int32_t>(ids);
  layer.weights = data<float>(weights);
  layer.gelu = gelu;
  layer.alpha = static_cast<float>(alpha);
  layer.limit = static_cast<float>(limit);
  if (layer.hidden < 1) Raise("ValueError") << "x has no columns; experts multiply at least one.";
  return layer;
}

ExpertWeights expert_weights(const TensorView& weights, const ffi::Optional<TensorView>& bias,
                             const char* name, int outputs, QuantisedFormat format = {}) {
  if (bias.has_value()) expect(bias.value(), name, kFloat32, {weights.size(0), outputs}, 2);
  return {data<char>(weights), weights.stride(0) * weights.dtype().bits / 8, format,
          bias.has_value() ? data<float>(bias.value()) : nullptr, outputs};
}

auto run_experts(const Layers& layers, DType dtype, const ExpertsLayer& layer) {
  return [=, at = layers.get()] {
    for (int64_t i = 0; i < layer.rows * layer.chosen; ++i) {
      if (layer.ids[i] < 0 || layer.ids[i] >= layer.experts)
        Raise("IndexError") << "A row chose the expert " << layer.ids[i] << ", which is not among the "
                            << layer.experts << " of the layer.";
    }
    experts(*at->workers, at->kernels(dtype), dtype, layer, &at->experts);
  };
}

auto experts_step(Layers layers, TensorView x, TensorView ids, TensorView weights, TensorView gate_up,
                  ffi::Optional<TensorView> gate_up_bias, TensorView down,
                  ffi::Optional<TensorView> down_bias, bool gelu, double alpha, double limit,
                  TensorView out) {
  const DType dtype = dtype_of(x);
  ExpertsLayer layer = experts_layer(dtype, x, ids, weights, gate_up, gelu, alpha, limit, out);
  expect(gate_up, "gate_up", type_of(dtype), {-1, -1, layer.hidden}, 2);
  layer.inner = int_size(gate_up.size(1) / 2, "gate_up");
  if (layer.inner < 1 || gate_up.size(1) % 2 != 0)
    Raise("ValueError") << "gate_up has " << gate_up.size(1)
                        << " rows an expert; it has one or more of the gate and as many of up.";
  expect(down, "down", type_of(dtype), {layer.experts, layer.hidden, layer.inner}, 2);
  layer.gate_up = expert_weights(gate_up, gate_up_bias, "gate_up_bias", 2 * layer.inner);
  layer.down = expert_weights(down, down_bias, "down_bias", layer.hidden);
  return run_experts(layers, dtype, layer);
}

auto experts_quantised_step(Layers layers, TensorView x, TensorView ids, TensorView weights,
                            TensorView gate_up, int64_t bits, int64_t group, bool minima,
                            ffi::Optional<TensorView> gate_up_bias, TensorView down, int64_t down_bits,
                            int64_t down_group, bool down_minima, ffi::Optional<TensorView> down_bias,
                            bool gelu, double alpha, double limit, TensorView out) {
  const DType dtype = dtype_of(x);
  ExpertsLayer layer = experts_layer(dtype, x, ids, weights, gate_up, gelu, alpha, limit, out);
  const QuantisedFormat format = expect_format(bits, group, minima, layer.hidden);
  expect(gate_up, "gate_up", kUInt8, {-1, -1, panel_bytes(format, layer.hidden)}, 2);
  // Whole panels of the gate, and as many of up: inputs of the other product are in blocks.
  layer.inner = int_size(gate_up.size(1) / 2 * kQuantisedPanel, "gate_up");
  if (gate_up.size(1) % 2 != 0 || layer.inner < 1 || layer.inner % kQuantisedBlock != 0)
    Raise("ValueError") << "gate_up has " << gate_up.size(1) << " panels an expert; it has a multiple of "
                        << 2 * kQuantisedBlock / kQuantisedPanel << ".";
  const QuantisedFormat other = expect_format(down_bits, down_group, down_minima, layer.inner);
  expect(down, "down", kUInt8,
         {layer.experts, (layer.hidden + kQuantisedPanel - 1) / kQuantisedPanel,
          panel_bytes(other, layer.inner)},
         2);
  layer.gate_up = expert_weights(gate_up, gate_up_bias, "gate_up_bias", 2 * layer.inner, format);
  layer.down = expert_weights(down, down_bias, "down_bias", layer.hidden, other);
  return run_experts(layers, dtype, layer);
}

// Rows of requests with states. Raises what does not fit; their numbers are checked when the layer is
// computed.
StatefulRows stateful_rows(int64_t rows, const ffi::Optional<TensorView>& starts, const TensorView& slots) {
  expect(slots, "slots", kInt32, {starts.has_value() ? -1 : rows}, 1);
  if (starts.has_value()) expect(starts.value(), "starts", kInt32, {slots.size(0) + 1}, 1);
  return {slots.size(0), starts.has_value() ? data<int32_t>(starts.value()) : nullptr, data<int32_t>(slots)};
}

// Raises if the numbers of requests do not fit `rows` rows and `states` states.
void check_stateful(const StatefulRows& at, int64_t rows, int64_t states) {
  for (int64_t i = 0; i < at.requests; ++i) {
    if (at.first(i) > at.first(i + 1))
      Raise("IndexError") << "Request " << i << " begins at row " << at.first(i)
                          << " and the next one before it.";
    if (at.slots[i] >= states)
      Raise("IndexError") << "Request " << i << " has state " << at.slots[i] << ", which is not among the "
                          << states << " of the layer.";
  }
  if (at.first(0) != 0 || at.rows() != rows)
    Raise("IndexError") << "Requests have the rows " << at.first(0) << " to " << at.rows() << " of " << rows
                        << ".";
}

auto convolve_step(Layers layers, TensorView x, ffi::Optional<TensorView> starts, TensorView slots,
                   ffi::Optional<TensorView> goes_on, TensorView weights, ffi::Optional<TensorView> bias,
                   TensorView states, TensorView out) {
  const DType dtype = dtype_of(x);
  const DLDataType type = type_of(dtype);
  expect(x, "x", type, {-1, -1}, 1);
  expect(out, "out", type, {x.size(0), x.size(1)}, 1);
  expect(weights, "weights", type, {x.size(1), -1}, 2);
  const int64_t taps = weights.size(1);
  if (taps < 1 || taps > kConvolutionTaps)
    Raise("ValueError") << "The convolution has " << taps << " taps; the kernel has 1 to " << kConvolutionTaps
                        << ".";
  if (bias.has_value()) expect(bias.value(), "bias", type, {x.size(1)}, 1);
  expect(states, "states", type, {-1, x.size(1), taps - 1}, 2);
  ConvolutionLayer layer{};
  layer.at = stateful_rows(x.size(0), starts, slots);
  if (goes_on.has_value()) {
    expect(goes_on.value(), "goes_on", kBool, {layer.at.requests}, 1);
    layer.goes_on = data<bool>(goes_on.value());
  }
  layer.x = rows_of(x, dtype);
  layer.out = rows_of(out, dtype);
  layer.channels = int_size(x.size(1), "x");
  layer.taps = static_cast<int>(taps);
  layer.weights = data<char>(weights);
  layer.bias = bias.has_value() ? data<char>(bias.value()) : nullptr;
  layer.states = rows_of(states, dtype);
  return [=, at = layers.get(), rows = x.size(0), count = states.size(0)] {
    check_stateful(layer.at, rows, count);
    convolve(*at->workers, at->kernels(dtype), dtype, layer);
  };
}

auto delta_rule_step(Layers layers, TensorView q, TensorView k, TensorView v,
                     ffi::Optional<TensorView> starts, TensorView slots, TensorView a, TensorView b,
                     ffi::Optional<TensorView> a_log, ffi::Optional<TensorView> dt_bias, TensorView states,
                     ffi::Optional<TensorView> snapshot_at, ffi::Optional<TensorView> snapshots,
                     TensorView out) {
  const DType dtype = dtype_of(q);
  const DLDataType type = type_of(dtype);
  expect(states, "states", kFloat32, {-1, -1, -1, -1}, 3);
  const int64_t heads = states.size(1), values = states.size(2), keys = states.size(3);
  if (heads < 1 || values < 1 || keys < 1 || keys % kDeltaPad != 0)
    Raise("ValueError") << "A state has " << heads << " heads of " << values << " values and " << keys
                        << " keys; there is one at least of each, and keys are a multiple of " << kDeltaPad
                        << ".";
  expect(q, "q", type, {-1, -1}, 1);
  const int64_t rows = q.size(0);
  if (q.size(1) < keys || q.size(1) % keys != 0 || heads % (q.size(1) / keys) != 0)
    Raise("ValueError") << "q has " << q.size(1) << " columns; it has heads of " << keys << ", a divisor of "
                        << heads << ".";
  expect(k, "k", type, {rows, q.size(1)}, 1);
  expect(v, "v", type, {rows, heads * values}, 1);
  expect(out, "out", type, {rows, heads * values}, 1);
  expect(a, "a", kFloat32, {rows, heads}, 2);
  expect(b, "b", kFloat32, {rows, heads}, 2);
  DeltaRuleLayer layer{};
  layer.at = stateful_rows(rows, starts, slots);
  if (both(a_log, "a_log", dt_bias, "dt_bias")) {
    expect(a_log.value(), "a_log", kFloat32, {heads}, 1);
    expect(dt_bias.value(), "dt_bias", kFloat32, {heads}, 1);
    layer.a_log = data<float>(a_log.value());
    layer.dt_bias = data<float>(dt_bias.value());
  }
  if (both(snapshot_at, "snapshot_at", snapshots, "snapshots")) {
    expect(snapshot_at.value(), "snapshot_at", kInt32, {layer.at.requests}, 1);
    expect(snapshots.value(), "snapshots", kFloat32, {layer.at.requests, heads, values, keys}, 4);
    layer.snapshot_at = data<int32_t>(snapshot_at.value());
    layer.snapshots = data<float>(snapshots.value());
  }
  layer.q = rows_of(q, dtype);
  layer.k = rows_of(k, dtype);
  layer.v = rows_of(v, dtype);
  layer.out = rows_of(out, dtype);
  layer.key_heads = int_size(q.size(1) / keys, "q");
  layer.heads = int_size(heads, "states");
  layer.keys = int_size(keys, "states");
  layer.values = int_size(values, "states");
  layer.a = data<float>(a);
  layer.b = data<float>(b);
  layer.states = data<float>(states);
  layer.slot_stride = states.stride(0);
  return [=, at = layers.get(), count = states.size(0)] {
    check_stateful(layer.at, rows, count);
    delta_rule(*at->workers, at->kernels(dtype), dtype, layer, &at->delta_rule);
  };
}

Program program_create(Layers layers) { return Program(ffi::make_object<ProgramObj>(std::move(layers))); }

// The ABI functions of a layer: one runs what `step` makes of its arguments, one adds it to a program.
template <auto step>
struct Layer;
template <typename Step, typename... Args, Step (*step)(Layers, Args...)>
struct Layer<step> {
  static void run(Layers layers, Args... args) {
    const Step now = step(std::move(layers), std::move(args)...);
    guarded([&] { now(); });
  }
  static void add(Program program, Args... args) {
    Layers layers = ffi::GetRef<Layers>(program->layers.as<LayersObj>());
    program->steps.emplace_back(step(std::move(layers), std::move(args)...));
  }
};

void program_run(Program program, int64_t first, int64_t last) {
  const auto& steps = program->steps;
  if (first < 0 || first > last || last > static_cast<int64_t>(steps.size())) {
    Raise("IndexError") << "Steps " << first << " to " << last << " are not among the program's "
                        << steps.size() << ".";
  }
  guarded([&] {
    for (int64_t i = first; i < last; ++i) steps[i]();
  });
}

}  // namespace
}  // namespace fluxion

TVM_FFI_DLL_EXPORT_TYPED_FUNC(layers_create, fluxion::layers_create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(layers_into_huge_pages, fluxion::layers_into_huge_pages);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(layers_panel, fluxion::layers_panel);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(layers_gain_from_packing, fluxion::layers_gain_from_packing);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(layers_repack, fluxion::layers_repack);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(program_create, fluxion::program_create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(program_run, fluxion::program_run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(layers_linear, fluxion::Layer<fluxion::linear_step>::run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(program_linear, fluxion::Layer<fluxion::linear_step>::add);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(layers_widen, fluxion::layers_widen);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(layers_linear_quantised, fluxion::Layer<fluxion::linear_quantised_step>::run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(program_linear_quantised, fluxion::Layer<fluxion::linear_quantised_step>::add);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(layers_norm, fluxion::Layer<fluxion::norm_step>::run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(program_norm, fluxion::Layer<fluxion::norm_step>::add);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(layers_gate_mul, fluxion::Layer<fluxion::gate_mul_step>::run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(program_gate_mul, fluxion::Layer<fluxion::gate_mul_step>::add);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(layers_rope, fluxion::Layer<fluxion::rope_step>::run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(program_rope, fluxion::Layer<fluxion::rope_step>::add);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(layers_experts, fluxion::Layer<fluxion::experts_step>::run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(program_experts, fluxion::Layer<fluxion::experts_step>::add);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(layers_experts_quantised, fluxion::Layer<fluxion::experts_quantised_step>::run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(program_experts_quantised,
                              fluxion::Layer<fluxion::experts_quantised_step>::add);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(layers_convolve, fluxion::Layer<fluxion::convolve_step>::run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(program_convolve, fluxion::Layer<fluxion::convolve_step>::add);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(layers_delta_rule, fluxion::Layer<fluxion::delta_rule_step>::run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(program_delta_rule, fluxion::Layer<fluxion::delta_rule_step>::add);
