// One token per row of logits, and log-probabilities, without writing a probability down.
#pragma once

#include <algorithm>
#include <vector>

#include "vec.h"

constexpr int64_t CHUNK = 1024;

// A number in [0, 1) with 53 random bits that depends on (seed, choice index, position) alone: SplitMix64 (Steele et al., 2014)
// over the counter. sampler.py has the same function.
static inline uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}
static inline double uniform(const uint64_t *counter) {
  const uint64_t step = 0x9E3779B97F4A7C15u;
  const uint64_t state = mix64(counter[0] ^ mix64((counter[1] + 1) * step));
  return (double)(mix64(state + (counter[2] + 1) * step) >> 11) * 0x1p-53;
}

template <class T>
struct Sampler {
  typedef typename T::elem elem;
  int64_t vocab;

  vf at(const elem *x, int64_t i) const {
    if (i + LANES <= vocab) return T::load16(x + i);
    vf v = splat(-INFINITY);
    for (int j = 0; i + j < vocab; ++j) v[j] = T::up(x[i + j]);
    return v;
  }

  float highest(const elem *x) const {
    vf best = splat(-INFINITY);
    for (int64_t i = 0; i < vocab; i += LANES) best = max_of(best, at(x, i));
    return max_lane(best);
  }

  // Sum of exp((x - top) * inverse); `chunks`, if given, gets the running sum after each CHUNK.
  double total(const elem *x, float top, float inverse, std::vector<double> *chunks) const {
    double sum = 0;
    for (int64_t first = 0; first < vocab; first += CHUNK) {
      const int64_t last = std::min(first + CHUNK, vocab);
      vf part = {};
      for (int64_t i = first; i < last; i += LANES) part += exp_of((at(x, i) - top) * inverse);
      sum += sum_lanes(part);
      if (chunks) chunks->push_back(sum);
    }
    return sum;
  }

  // The first token whose cumulative weight exceeds the threshold; never one of weight zero.
  int64_t draw(const elem *x, float top, float inverse, double threshold, const std::vector<double> &chunks) const {
    size_t c = 0;
    while (c + 1 < chunks.size() && chunks[c] <= threshold) ++c;
    double sum = c ? chunks[c - 1] : 0;
    int64_t possible = 0;
    const int64_t last = std::min<int64_t>((c + 1) * CHUNK, vocab);
    for (int64_t i = c * CHUNK; i < last; i += LANES) {
      const vf weight = exp_of((at(x, i) - top) * inverse);
      for (int j = 0; j < LANES && i + j < last; ++j) {
        if (weight[j] <= 0) continue;
        possible = i + j;
        sum += weight[j];
        if (sum > threshold) return possible;
      }
    }
    return possible;
  }

  int64_t first_equal(const elem *x, float value) const {
    for (int64_t i = 0; i < vocab; ++i)
      if (T::up(x[i]) == value) return i;
    return 0;
  }

  // The n highest, best first, the lower id first when equal.
  void best(const elem *x, int64_t n, double log_total, float top, int32_t *ids, float *values) const {
    int64_t held = 0;
    for (int64_t i = 0; i < vocab; i += LANES) {
      const vf v = at(x, i);
      if (held == n && !(max_lane(v) > values[n - 1])) continue;
      for (int j = 0; j < LANES && i + j < vocab; ++j) {
        if (held == n && !(v[j] > values[n - 1])) continue;
        int64_t p = held < n ? held++ : n - 1;
        for (; p > 0 && v[j] > values[p - 1]; --p) values[p] = values[p - 1], ids[p] = ids[p - 1];
        values[p] = v[j], ids[p] = (int32_t)(i + j);
      }
    }
    for (int64_t p = 0; p < held; ++p) values[p] = (float)(values[p] - top - log_total);
  }

  // temperature <= 0: greedy. wanted >= 0: do not draw, score that token.
  void row(const elem *x, float temperature, const uint64_t *counter, int64_t wanted, int32_t *token, float *logprob,
           float *sampling_logprob, int64_t n, int32_t *ids, float *values) const {
    static thread_local std::vector<double> chunks;
    chunks.clear();
    const float top = highest(x);
    const bool plain = temperature == 1.0f && wanted < 0;
    const double log_raw = std::log(total(x, top, 1.0f, plain ? &chunks : nullptr));
    double log_drawn = log_raw;
    int64_t picked = wanted;
    if (wanted < 0 && temperature <= 0) picked = first_equal(x, top);
    if (wanted < 0 && temperature > 0) {
      const float inverse = 1.0f / temperature;
      const double sum = plain ? chunks.back() : total(x, top, inverse, &chunks);
      log_drawn = std::log(sum);
      picked = draw(x, top, inverse, uniform(counter) * sum, chunks);
    }
    const double value = (double)T::up(x[picked]) - top;
    *token = (int32_t)picked;
    *logprob = (float)(value - log_raw);
    *sampling_logprob = temperature > 0 ? (float)(value / temperature - log_drawn) : 0.0f;
    if (n) best(x, n, log_raw, top, ids, values);
  }
};
