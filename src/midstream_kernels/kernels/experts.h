// Mixture of experts: the choice of each token's experts, and their computation.
#pragma once

#include <algorithm>
#include <vector>

#include "lora.h"

// Softmax over all experts, then the k best (the lower id first when equal), optionally renormalised to sum 1.
// Returns whether the last of the k was a near tie: the logits of it and of the best one left out differ by at most `tie` times
// the largest logit.
template <class T>
static bool route(const typename T::elem *logits, int64_t experts, int64_t k, bool renormalise, bool round_weights,
                  float tie, int32_t *chosen, float *weights) {
  float top = -INFINITY, lowest = INFINITY, total = 0, kept = 0;
  for (int64_t e = 0; e < experts; ++e) {
    top = std::max(top, T::up(logits[e]));
    lowest = std::min(lowest, T::up(logits[e]));
  }
  static thread_local std::vector<float> probability;
  probability.resize(experts);
  for (int64_t e = 0; e < experts; ++e) total += probability[e] = exp_one(T::up(logits[e]) - top);
  for (int64_t j = 0; j < k; ++j) {
    int64_t best = -1;
    for (int64_t e = 0; e < experts; ++e)
      if (probability[e] >= 0 && (best < 0 || probability[e] > probability[best])) best = e;
    // Where logits are not numbers, the token fails later, with its log-probability.
    if (best < 0) best = j;
    chosen[j] = (int32_t)best;
    kept += weights[j] = probability[best] / total;
    probability[best] = -1;
  }
  for (int64_t j = 0; j < k; ++j) {
    if (renormalise) weights[j] /= kept;
    if (round_weights) weights[j] = T::rounded(weights[j]);
  }
  float left_out = -INFINITY;
  for (int64_t e = 0; e < experts; ++e)
    if (probability[e] >= 0) left_out = std::max(left_out, T::up(logits[e]));
  return T::up(logits[chosen[k - 1]]) - left_out <= tie * std::max(top, -lowest);
}

// The adapters of a batch's tokens. of: for each token, the number of its adapter, or -1. tables: by number, the pieces
// [experts][3] of an adapter; null: it adapts no expert. The first two pieces of an expert add to [gate; up], the third to down.
struct ExpertAdapters {
  const int32_t *of;
  const Piece *const *tables;
};

// x: [m, hidden]. chosen, weights: [m, k]. gate_up, down: packed, one expert after the other.
// residual: [m, hidden], to which the result is added. adapters.of: null when no token has one.
template <class T>
struct Experts {
  typedef typename T::elem elem;
  const elem *x;
  int64_t m, hidden, inner, experts, k;
  const int32_t *chosen;
  const float *weights;
  const uint32_t *gate_up, *down;
  elem *residual;
  ExpertAdapters adapters;

  // Sorts the (token, choice) pairs by expert, those of an expert by adapter.
  void run(int threads) const {
    const int64_t pairs = m * k;
    std::vector<int32_t> tokens(m), next(experts + 1, 0), order(pairs), place(pairs), token(pairs);
    for (int64_t t = 0; t < m; ++t) tokens[t] = (int32_t)t;
    if (adapters.of)
      std::stable_sort(tokens.begin(), tokens.end(), [&](int32_t a, int32_t b) { return adapters.of[a] < adapters.of[b]; });
    for (int64_t i = 0; i < pairs; ++i) ++next[chosen[i] + 1];
    for (int64_t e = 0; e < experts; ++e) next[e + 1] += next[e];
    for (int32_t t : tokens)
      for (int64_t i = t * k; i < (t + 1) * k; ++i) {
        place[i] = next[chosen[i]]++;
        order[place[i]] = (int32_t)i;
        token[place[i]] = t;
      }
    std::vector<elem> active(pairs * inner), result(pairs * hidden), wide(adapters.of ? pairs * 2 * inner : 0);
    const auto up_units = packed_units(2 * inner, hidden), down_units = packed_units(hidden, inner);
    std::vector<Linear<T>> ups, downs;
    each_run(order, [&](int32_t i) { return (int64_t)chosen[i]; }, [&](int64_t first, int64_t count) {
      const int64_t e = chosen[order[first]];
      const int32_t *rows = token.data() + first;
      if (adapters.of)
        ups.push_back({x, hidden, rows, gate_up + e * up_units, nullptr, count, 2 * inner, hidden, STORE,
                       wide.data() + first * 2 * inner, 2 * inner});
      else
        ups.push_back({x, hidden, rows, gate_up + e * up_units, nullptr, count, 2 * inner, hidden, SILU_MUL,
                       active.data() + first * inner, inner});
      downs.push_back({active.data() + first * inner, inner, nullptr, down + e * down_units, nullptr, count, hidden,
                       inner, STORE, result.data() + first * hidden, hidden});
    });
    all<T>(ups, threads);
    if (adapters.of) {
      adapt(order, 0, 2, [&](int64_t first, const Piece &piece, int64_t count) {
        return LowRank<T>{piece, x, hidden, hidden, token.data() + first, nullptr, count,
                          wide.data() + first * 2 * inner, 2 * inner, nullptr};
      }, threads);
      silu_mul<T>(wide.data(), pairs, inner, active.data(), threads);
    }
    all<T>(downs, threads);
    if (adapters.of)
      adapt(order, 2, 1, [&](int64_t first, const Piece &piece, int64_t count) {
        return LowRank<T>{piece, active.data() + first * inner, inner, inner, nullptr, nullptr, count,
                          result.data() + first * hidden, hidden, nullptr};
      }, threads);
    parallel(threads, m, (double)pairs * hidden, [&](int64_t t) { combine(t, place.data(), result.data()); });
  }

  int64_t adapter(int32_t pair) const { return adapters.of ? adapters.of[pair / k] : -1; }

  // body(first, count) for each run of `order` that has one key.
  template <class K, class F>
  static void each_run(const std::vector<int32_t> &order, const K &key, const F &body) {
    const int64_t size = (int64_t)order.size();
    for (int64_t first = 0, last; first < size; first = last) {
      for (last = first + 1; last < size && key(order[last]) == key(order[first]); ++last) {
      }
      body(first, last - first);
    }
  }

  // Adds pieces from..from+count-1 of each expert and adapter to the rows of its pairs.
  template <class F>
  void adapt(const std::vector<int32_t> &order, int from, int count, const F &op, int threads) const {
    std::vector<LowRank<T>> ops;
    const auto key = [&](int32_t i) { return std::make_pair((int64_t)chosen[i], adapter(i)); };
    each_run(order, key, [&](int64_t first, int64_t rows) {
      const auto [expert, number] = key(order[first]);
      const Piece *table = number < 0 ? nullptr : adapters.tables[number];
      for (int p = from; table && p < from + count; ++p)
        if (table[3 * expert + p].a) ops.push_back(op(first, table[3 * expert + p], rows));
    });
    add_low_ranks<T>(ops, threads);
  }

  static int64_t packed_units(int64_t n, int64_t k) { return (n + PANEL - 1) / PANEL * PANEL * (k / T::PER_UNIT); }

  // Adds to `residual` the sum over a token's choices, in their order.
  void combine(int64_t t, const int32_t *place, const elem *result) const {
    for (int64_t d = 0; d < hidden; d += LANES) {
      vf sum = {};
      for (int64_t j = 0; j < k; ++j)
        sum += weights[t * k + j] * T::load16(result + (int64_t)place[t * k + j] * hidden + d);
      elem *to = residual + t * hidden + d;
      T::store16(to, T::load16(to) + T::rounded(sum));
    }
  }
};

// The choice of experts and their computation. Adds to `residual`; writes each token's experts from `routes` on, and from
// `router_weights` on what their outputs are multiplied by, unless it is null; sets the bits of `near_tie`.
// route_stride: experts from token to token.
template <class T>
static void moe(const typename T::elem *x, const uint32_t *router, const uint32_t *gate_up, const uint32_t *down,
                int64_t m, int64_t hidden, int64_t inner, int64_t experts, int64_t k, int flags, float tie,
                typename T::elem *residual, void *routes, float *router_weights, int64_t route_stride,
                uint8_t *near_tie, ExpertAdapters adapters, int threads) {
  std::vector<typename T::elem> logits(m * experts);
  std::vector<int32_t> chosen(m * k);
  std::vector<float> weights(m * k);
  linear<T>({x, hidden, nullptr, router, nullptr, m, experts, hidden, STORE, logits.data(), experts}, threads);
  for (int64_t i = 0; i < m; ++i) {
    near_tie[i] |= route<T>(logits.data() + i * experts, experts, k, flags & 1, flags & 2, tie, &chosen[i * k], &weights[i * k]);
    for (int64_t j = 0; j < k; ++j)
      if (experts <= 256)
        ((uint8_t *)routes)[i * route_stride + j] = (uint8_t)chosen[i * k + j];
      else
        ((uint16_t *)routes)[i * route_stride + j] = (uint16_t)chosen[i * k + j];
    if (router_weights) std::copy_n(&weights[i * k], k, router_weights + i * route_stride);
  }
  Experts<T>{x, m, hidden, inner, experts, k, chosen.data(), weights.data(), gate_up, down, residual,
             adapters}.run(threads);
}
