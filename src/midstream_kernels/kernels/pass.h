// One forward pass: the kernels of all layers in their order, over tables of addresses that Python keeps (../tables.py).
#pragma once

#include "attention.h"
#include "experts.h"
#include "linear.h"
#include "lora.h"

// A packed linear map. bias: or null.
struct Map {
  const uint32_t *weight;
  const float *bias;
  int64_t n, k;
};

// gate_up, down: of a dense layer. router and what follows: of a layer with experts, whose router is not null.
struct Layer {
  const float *input_norm;
  Map qkv;
  const float *q_norm, *k_norm;
  int64_t window;
  Map out;
  const float *post_norm;
  Map gate_up, down;
  const uint32_t *router, *experts_gate_up, *experts_down;
  int64_t inner, experts, top_k, flags;
};

// embedding: [vocabulary, hidden], or null where the output layer is tied to it: the rows are those that `head` packs.
// cos, sin: [positions, rotary / 2]. own: elements of a head in the model.
struct Model {
  const Layer *layers;
  int64_t count;
  const void *embedding;
  int64_t vocabulary;
  const float *cos, *sin;
  int64_t positions, rotary;
  const float *norm;
  Map head;
  int64_t hidden, heads, kv_heads, head_dim, own, moe_layers, top_k;
};

struct Numbers {
  float eps, scale, tie;
};

// Memory for the rows of a step. wide, change: of steps with adapters.
struct Scratch {
  void *residual, *normed, *qkv, *attended, *active, *wide, *change;
};

// Whether any adapter of the step adds to these maps of a layer. pieces: [groups][PIECES]. of, tables: as ExpertAdapters.
struct LayerAdapters {
  int64_t qkv, out, gate_up, down;
  const Piece *pieces;
  ExpertAdapters experts;
};

// rows, starts: as `lora` has them.
struct StepAdapters {
  const LayerAdapters *layers;
  const int32_t *rows, *starts;
  int64_t groups;
};
constexpr int64_t PIECES = 7, QKV = 0, OUT = 3, GATE_UP = 4, DOWN = 6;

// cache: for each layer the address of its keys, then for each layer that of its values. wanted: tokens whose logits are needed.
// picked: [count of wanted, hidden], their normalised states. adapters: or null. routes: [tokens, moe_layers, top_k].
// router_weights: of the same shape, by which the outputs of these experts are multiplied, or null.
struct Step {
  int64_t tokens;
  const int64_t *ids, *positions, *slots;
  const int32_t *spans;
  int64_t sequences;
  const int32_t *tables;
  const int64_t *wanted;
  int64_t wanted_count;
  uint8_t *routes, *near_tie;
  float *router_weights;
  void *picked, *logits;
};

template <class T>
static void rms_norm(const typename T::elem *x, const int64_t *rows, const float *weight, int64_t m, int64_t hidden,
                     float eps, typename T::elem *out, int threads) {
  parallel(threads, m, (double)m * hidden, [=](int64_t i) {
    Prepare<T>::norm(x + (rows ? rows[i] : i) * hidden, weight, hidden, hidden, eps, out + i * hidden);
  });
}

template <class T>
struct Pass {
  typedef typename T::elem elem;
  const Model &model;
  const Numbers &numbers;
  const Scratch &scratch;
  uint32_t *const *cache;
  const Step &step;
  const StepAdapters *adapters;
  int threads;

  elem *residual() const { return (elem *)scratch.residual; }
  elem *normed() const { return (elem *)scratch.normed; }

  // Returns the first token that has no row in the embedding or in the rotary table; -1 when all have, and the pass is done.
  int64_t run() const {
    for (int64_t i = 0; i < step.tokens; ++i)
      if ((uint64_t)step.ids[i] >= (uint64_t)model.vocabulary || (uint64_t)step.positions[i] >= (uint64_t)model.positions)
        return i;
    const int64_t hidden = model.hidden;
    embed();
    int64_t moe_layer = 0;
    for (int64_t number = 0; number < model.count; ++number) {
      const Layer &layer = model.layers[number];
      const LayerAdapters *adapted = adapters ? adapters->layers + number : nullptr;
      attend(layer, {cache[number], cache[model.count + number], model.kv_heads, model.head_dim}, adapted);
      normalise(layer.post_norm);
      if (layer.router)
        mix(layer, moe_layer++, adapted);
      else
        feed_forward(layer, adapted);
    }
    auto *picked = (elem *)step.picked;
    rms_norm<T>(residual(), step.wanted, model.norm, step.wanted_count, hidden, numbers.eps, picked, threads);
    multiply(model.head, picked, step.wanted_count, STORE, (elem *)step.logits, model.head.n);
    return -1;
  }

  void embed() const {
    const int64_t hidden = model.hidden;
    if (!model.embedding) {
      parallel(threads, step.tokens, (double)step.tokens * hidden,
               [this](int64_t i) { unpack<T>(model.head.weight, step.ids[i], model.hidden, residual() + i * model.hidden); });
      return;
    }
    for (int64_t i = 0; i < step.tokens; ++i)
      std::memcpy(residual() + i * hidden, (const elem *)model.embedding + step.ids[i] * hidden, hidden * sizeof(elem));
  }

  void attend(const Layer &layer, const Cache<T> &kv, const LayerAdapters *adapted) const {
    auto *qkv = (elem *)scratch.qkv, *attended = (elem *)scratch.attended;
    normalise(layer.input_norm);
    multiply(layer.qkv, normed(), step.tokens, STORE, qkv, layer.qkv.n);
    if (adapted && adapted->qkv) adapt(*adapted, QKV, OUT, normed(), model.hidden, qkv, layer.qkv.n);
    prepare<T>({qkv, step.tokens, model.heads, layer.q_norm, layer.k_norm, model.own, numbers.eps, model.cos, model.sin,
                model.rotary, step.positions, step.slots, kv},
               threads);
    attention<T>({qkv, layer.qkv.n, attended, model.heads, kv, step.spans, step.tables, layer.window, numbers.scale},
                 step.sequences, threads);
    add_to_residual(layer.out, attended, adapted, adapted && adapted->out, OUT, GATE_UP);
  }

  void feed_forward(const Layer &layer, const LayerAdapters *adapted) const {
    auto *active = (elem *)scratch.active, *wide = (elem *)scratch.wide;
    if (adapted && adapted->gate_up) {
      multiply(layer.gate_up, normed(), step.tokens, STORE, wide, layer.gate_up.n);
      adapt(*adapted, GATE_UP, DOWN, normed(), model.hidden, wide, layer.gate_up.n);
      silu_mul<T>(wide, step.tokens, layer.down.k, active, threads);
    } else {
      multiply(layer.gate_up, normed(), step.tokens, SILU_MUL, active, layer.down.k);
    }
    add_to_residual(layer.down, active, adapted, adapted && adapted->down, DOWN, PIECES);
  }

  void mix(const Layer &layer, int64_t moe_layer, const LayerAdapters *adapted) const {
    const int64_t bytes = layer.experts <= 256 ? 1 : 2;
    const int64_t first = moe_layer * model.top_k;
    moe<T>(normed(), layer.router, layer.experts_gate_up, layer.experts_down, step.tokens, model.hidden, layer.inner,
           layer.experts, layer.top_k, layer.flags, numbers.tie, residual(), step.routes + first * bytes,
           step.router_weights ? step.router_weights + first : nullptr, model.moe_layers * model.top_k, step.near_tie,
           adapted ? adapted->experts : ExpertAdapters{}, threads);
  }

  void normalise(const float *weight) const {
    rms_norm<T>(residual(), nullptr, weight, step.tokens, model.hidden, numbers.eps, normed(), threads);
  }

  void multiply(const Map &map, const elem *x, int64_t m, Mode mode, elem *out, int64_t width) const {
    linear<T>({x, map.k, nullptr, map.weight, map.bias, m, map.n, map.k, mode, out, width}, threads);
  }

  void add_to_residual(const Map &map, const elem *x, const LayerAdapters *adapted, bool has, int64_t first,
                       int64_t last) const {
    if (!has) return multiply(map, x, step.tokens, ADD, residual(), model.hidden);
    auto *change = (elem *)scratch.change;
    multiply(map, x, step.tokens, STORE, change, model.hidden);
    adapt(*adapted, first, last, x, map.k, change, model.hidden);
    add<T>(change, step.tokens, model.hidden, residual(), threads);
  }

  // Adds the pieces first..last-1 of every adapter.
  void adapt(const LayerAdapters &adapted, int64_t first, int64_t last, const elem *x, int64_t k, elem *out,
             int64_t width) const {
    lora<T>(x, k, k, adapters->rows, adapters->starts, adapters->groups, adapted.pieces + first, PIECES, last - first, out,
            width, threads);
  }
};
