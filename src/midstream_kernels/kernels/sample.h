// One token per row of logits, and log-probabilities, without writing a probability down.
#pragma once

#include <algorithm>
#include <vector>

#include "vec.h"

constexpr int64_t CHUNK = 1024;
// How much rounding may change a float32 sum of probabilities, as a share of all. step.py has the same constant.
constexpr double SUM_ROUNDING = 2e-7;

// A number in [0, 1) with 53 random bits that depends on (seed, choice index, position) alone: SplitMix64 (Steele et al., 2014)
// over the counter. embedded/sampler.py has the same function.
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

// Keeps the top_k heaviest tokens (0 for all), of those the fewest that together weigh top_p, and of those the ones that are at
// least min_p times as heavy as the heaviest.
struct Filter {
  float top_k, top_p, min_p;
  bool any(int64_t vocab) const { return (top_k > 0 && top_k < vocab) || top_p < 1 || min_p > 0; }
};

// Bits of a near tie. core/types.py has the same.
enum NearTie : uint8_t { NEAR_TOP_K = 2, NEAR_TOP_P = 4, NEAR_MIN_P = 8, NEAR_GREEDY = 16 };

// For each filter, the log weight of the heaviest token that it cut off; -INFINITY where it cut none. near: bits of the borders
// where another rounding may keep another number of tokens.
struct Border {
  float top_k = -INFINITY, top_p = -INFINITY;
  uint8_t near = 0;
};

struct Candidate {
  float weight;
  int32_t id;
  bool operator<(const Candidate &other) const {
    return weight > other.weight || (weight == other.weight && id < other.id);
  }
};

// Bytes for the mask of a row. sampler.py has the same.
static inline int64_t mask_room(int64_t vocab) { return vocab / 8 + 2; }

// Writes which tokens were left, in the shortest form of core/masks.py, and returns how many bytes these are. kept: by id.
static inline int32_t put_mask(const std::vector<Candidate> &kept, uint8_t *to) {
  if (kept.size() < 2) return *to = 0, (int32_t)kept.size();
  const int64_t last = kept.back().id, bits = last / 8 + 1, size = last < 1 << 16 ? 2 : 4, ids = size * (int64_t)kept.size();
  *to++ = bits < ids ? 8 : (uint8_t)size;
  if (bits < ids) {
    std::fill(to, to + bits, 0);
    for (const Candidate &c : kept) to[c.id / 8] |= (uint8_t)(1 << c.id % 8);
    return (int32_t)(1 + bits);
  }
  for (const Candidate &c : kept)
    for (int64_t i = 0; i < size; ++i) *to++ = (uint8_t)(c.id >> 8 * i);
  return (int32_t)(1 + ids);
}

// tie: how much rounding may change a logit, as a share of the largest logit of the row.
template <class T>
struct Sampler {
  typedef typename T::elem elem;
  int64_t vocab;
  float tie;

  INLINE vf at(const elem *x, int64_t i) const {
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

  // How much rounding may change the difference of two logits.
  float rounding(const elem *x, float top) const {
    vf least = splat(INFINITY);
    for (int64_t i = 0; i < vocab; i += LANES) {
      vf v = at(x, i);
      for (int j = (int)std::min<int64_t>(LANES, vocab - i); j < LANES; ++j) v[j] = INFINITY;
      least = -max_of(-least, -v);
    }
    return tie * std::max(top, max_lane(-least));
  }

  // The sum of exp((x - top) * inverse). `chunks`, if given, gets the running sum after each CHUNK.
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

  // The first token whose cumulative weight exceeds the threshold, and never one of weight zero.
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

  // Finds the tokens within `reach` of the heaviest in log weight. Returns their weight together.
  double gather(const elem *x, float top, float inverse, float reach, std::vector<Candidate> &found) const {
    double mass = 0;
    found.clear();
    for (int64_t i = 0; i < vocab; i += LANES) {
      const vf scaled = (at(x, i) - top) * inverse;
      if (!(max_lane(scaled) >= -reach)) continue;
      const vf weight = exp_of(scaled);
      for (int j = 0; j < LANES && i + j < vocab; ++j) {
        if (!(scaled[j] >= -reach) || weight[j] <= 0) continue;
        found.push_back({weight[j], (int32_t)(i + j)});
        mass += weight[j];
      }
    }
    return mass;
  }

  // Finds the candidates that the filter keeps, in order of id. total: the weight of all tokens. slack: how much rounding may
  // change a log weight.
  Border filtered(const elem *x, float top, float inverse, double total, const Filter &f, float slack,
                  std::vector<Candidate> &kept) const {
    Border border;
    const bool by_rank = f.top_k > 0 && f.top_k < vocab;
    const size_t most = by_rank ? (size_t)f.top_k : vocab;
    float reach = 10;
    for (;; reach *= 3) {
      const double mass = gather(x, top, inverse, reach, kept);
      if (by_rank ? kept.size() >= most : mass >= f.top_p * total) break;
      if (reach > 88 || (!by_rank && f.min_p > 0 && reach > -std::log(f.min_p))) break;
    }
    if (by_rank) border.top_k = -reach;
    if (kept.size() > most) {
      std::nth_element(kept.begin(), kept.begin() + most, kept.end());
      border.top_k = std::log(kept[most].weight);
      kept.resize(most);
    }
    std::sort(kept.begin(), kept.end());
    double norm = total, before = 0;
    if (by_rank) {
      norm = 0;
      for (const Candidate &c : kept) norm += c.weight;
    }
    size_t count = 0;
    // The value of `before` ahead of the last kept token.
    double last = 0;
    for (; count < kept.size(); ++count) {
      const float weight = kept[count].weight;
      if (count && (before >= f.top_p * norm || weight < f.min_p * kept[0].weight)) break;
      last = before;
      before += weight;
    }
    const double target = f.top_p * norm;
    if (f.top_p < 1) {
      const double off = norm * (slack * f.top_p * (1 - f.top_p) + SUM_ROUNDING);
      if (before >= target) border.top_p = count < kept.size() ? std::log(kept[count].weight) : -reach;
      if (std::abs(before - target) <= off || (count > 1 && target - last <= off)) border.near |= NEAR_TOP_P;
    }
    if (f.min_p > 0)
      for (size_t i = count ? count - 1 : 0; i < std::min(count + 1, kept.size()); ++i)
        if (std::abs(std::log(kept[i].weight / (f.min_p * kept[0].weight))) <= slack) border.near |= NEAR_MIN_P;
    kept.resize(count);
    std::sort(kept.begin(), kept.end(), [](const Candidate &a, const Candidate &b) { return a.id < b.id; });
    return border;
  }

  int64_t draw_kept(const std::vector<Candidate> &kept, double uniform, double *sum) const {
    *sum = 0;
    for (const Candidate &c : kept) *sum += c.weight;
    double reached = 0;
    for (const Candidate &c : kept)
      if ((reached += c.weight) > uniform * *sum) return c.id;
    return kept.empty() ? 0 : kept.back().id;
  }

  bool near_second(const elem *x, float top, float slack) const {
    int64_t close = 0;
    for (int64_t i = 0; i < vocab && close < 2; i += LANES) {
      const vf v = at(x, i);
      if (!(max_lane(v) >= top - slack)) continue;
      for (int j = 0; j < LANES && i + j < vocab; ++j) close += v[j] >= top - slack;
    }
    return close > 1;
  }

  int64_t first_equal(const elem *x, float value) const {
    for (int64_t i = 0; i < vocab; ++i)
      if (T::up(x[i]) == value) return i;
    return 0;
  }

  // Finds the n highest logits, best first, the lower id first when equal.
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

  // A temperature of 0 or less is greedy. If wanted >= 0, scores that token instead of drawing one. mask_size, if not null, gets
  // how many bytes of `mask` say what it was drawn from; 0 where nothing was filtered.
  void row(const elem *x, float temperature, const Filter &filter, const uint64_t *counter, int64_t wanted, int32_t *token, float *logprob,
           float *sampling_logprob, uint8_t *near_tie, int64_t n, int32_t *ids, float *values, int32_t *mask_size,
           uint8_t *mask) const {
    static thread_local std::vector<double> chunks;
    chunks.clear();
    const float top = highest(x);
    const bool plain = temperature == 1.0f && wanted < 0;
    const double log_raw = std::log(total(x, top, 1.0f, plain ? &chunks : nullptr));
    double log_drawn = log_raw;
    int64_t picked = wanted;
    *near_tie = 0;
    if (mask_size) *mask_size = 0;
    if (wanted < 0 && temperature <= 0) {
      picked = first_equal(x, top);
      if (mask_size) *mask_size = 1, *mask = 0;
      if (near_second(x, top, rounding(x, top))) *near_tie = NEAR_GREEDY;
    }
    if (wanted < 0 && temperature > 0) {
      const float inverse = 1.0f / temperature;
      double sum = plain ? chunks.back() : total(x, top, inverse, &chunks);
      if (filter.any(vocab) && sum == sum) {
        static thread_local std::vector<Candidate> kept;
        const float slack = rounding(x, top) * inverse;
        const Border border = filtered(x, top, inverse, sum, filter, slack, kept);
        picked = draw_kept(kept, uniform(counter), &sum);
        if (mask_size) *mask_size = put_mask(kept, mask);
        // A token as heavy as one that was cut off might itself have been cut off.
        const float weight = (T::up(x[picked]) - top) * inverse;
        *near_tie = border.near;
        if (weight - border.top_k <= slack) *near_tie |= NEAR_TOP_K;
        if (weight - border.top_p <= slack) *near_tie |= NEAR_TOP_P;
      } else {
        picked = draw(x, top, inverse, uniform(counter) * sum, chunks);
      }
      log_drawn = std::log(sum);
    }
    const double value = (double)T::up(x[picked]) - top;
    *token = (int32_t)picked;
    *logprob = (float)(value - log_raw);
    *sampling_logprob = temperature > 0 ? (float)(value / temperature - log_drawn) : 0.0f;
    if (n) best(x, n, log_raw, top, ids, values);
  }
};
