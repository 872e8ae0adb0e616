// Mixture of experts: the choice of each token's experts, and their computation.
#pragma once

#include <vector>

#include "linear.h"

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

// x: [m, hidden]. chosen, weights: [m, k]. gate_up, down: packed, one expert after the other.
// residual: [m, hidden], to which the result is added.
template <class T>
struct Experts {
  typedef typename T::elem elem;
  const elem *x;
  int64_t m, hidden, inner, experts, k;
  const int32_t *chosen;
  const float *weights;
  const uint32_t *gate_up, *down;
  elem *residual;

  // Sorts the (token, choice) pairs by expert.
  void run(int threads) const {
    const int64_t pairs = m * k;
    std::vector<int32_t> starts(experts + 1, 0), token(pairs), place(pairs);
    for (int64_t i = 0; i < pairs; ++i) ++starts[chosen[i] + 1];
    for (int64_t e = 0; e < experts; ++e) starts[e + 1] += starts[e];
    std::vector<int32_t> next(starts.begin(), starts.end() - 1);
    for (int64_t i = 0; i < pairs; ++i) {
      place[i] = next[chosen[i]]++;
      token[place[i]] = (int32_t)(i / k);
    }
    std::vector<elem> active(pairs * inner), result(pairs * hidden);
    const auto up_units = packed_units(2 * inner, hidden), down_units = packed_units(hidden, inner);
    std::vector<Linear<T>> ups, downs;
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t first = starts[e], count = starts[e + 1] - first;
      if (!count) continue;
      ups.push_back({x, hidden, token.data() + first, gate_up + e * up_units, nullptr, count, 2 * inner, hidden,
                     SILU_MUL, active.data() + first * inner, inner});
      downs.push_back({active.data() + first * inner, inner, nullptr, down + e * down_units, nullptr, count, hidden,
                       inner, STORE, result.data() + first * hidden, hidden});
    }
    all(ups, threads);
    all(downs, threads);
    parallel(threads, m, (double)pairs * hidden, [&](int64_t t) { combine(t, place.data(), result.data()); });
  }

  static int64_t packed_units(int64_t n, int64_t k) { return (n + PANEL - 1) / PANEL * PANEL * (k / T::PER_UNIT); }

  static void all(const std::vector<Linear<T>> &ops, int threads) {
    std::vector<std::pair<int32_t, int32_t>> tasks;
    double work = 0;
    for (size_t i = 0; i < ops.size(); ++i) {
      work += ops[i].work();
      for (int64_t t = 0; t < ops[i].tasks(); ++t) tasks.push_back({(int32_t)i, (int32_t)t});
    }
    parallel(threads, (int64_t)tasks.size(), work, [&](int64_t i) { ops[tasks[i].first].run(tasks[i].second); });
  }

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
