// y = x W^T over packed weights.
//
// Weights are packed once, when a snapshot is loaded: panels of 32 outputs, [panels][units of k][32] units. A kernel then reads
// them front to back. A panel may mix rows: for gate and up projections it holds 16 gate rows and then the matching 16 up rows.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "multiply.h"
#include "pool.h"

constexpr int PANEL = 2 * LANES;
// 64 bytes of a row.
constexpr int64_t PACKED_UNITS = 16;
// Rows that are multiplied at once. Of a panel's two vectors, both at once with AVX-512, else one after the other.
constexpr int TILE_ROWS = HELD == 24 ? 12 : HELD;
// Panels that a task of many rows takes. Where rows are widened first, that is worth more outputs, as long as the second cache
// keeps their weights for the next rows.
constexpr int64_t PANELS_AT_ONCE = HELD == 24 ? 1 : 4, PANELS_BYTES = 384 << 10;

enum Mode { STORE = 0, ADD = 1, SILU_MUL = 2 };

#if defined(__AVX512F__)
// Sixteen units of sixteen rows, side by side. from: null for zeros. The stores pass the caches by: what is packed is larger than
// these, and steps run beside it. So no line of `to`, which is aligned, is read before it is written.
static inline void pack_square(const char *const *from, int64_t at, uint32_t *to) {
  __m512i a[LANES], b[LANES];
  for (int i = 0; i < LANES; ++i) a[i] = from[i] ? _mm512_loadu_si512(from[i] + at) : _mm512_setzero_si512();
  // Units change places by ones and twos within each quarter of a vector, and then the quarters do.
  for (int i = 0; i < LANES; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < LANES; i += 4)
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
    }
  for (int i = 0; i < LANES; i += 8)
    for (int j = 0; j < 4; ++j) {
      b[i + j] = _mm512_shuffle_i32x4(a[i + j], a[i + j + 4], 0x88);
      b[i + j + 4] = _mm512_shuffle_i32x4(a[i + j], a[i + j + 4], 0xDD);
    }
  for (int u = 0; u < LANES; ++u) {
    const int quarter = u & 7;
    const __m512i unit = _mm512_shuffle_i32x4(b[quarter], b[quarter + 8], u & 8 ? 0xDD : 0x88);
    _mm512_stream_si512((__m512i *)(to + u * PANEL), unit);
  }
}
#endif

// rows: for each packed output, the place of its row of k elements in bytes from w, or a negative number for zeros. They fill
// whole panels. The copy takes a cache line of each row at a time, so that neither side is walked in strides.
template <class T>
static void pack(const void *w, const int64_t *rows, int64_t panels, int64_t k, uint32_t *out) {
  const int64_t units = k / T::PER_UNIT;
  for (int64_t p = 0; p < panels; ++p) {
    const char *from[PANEL];
    for (int c = 0; c < PANEL; ++c) from[c] = rows[p * PANEL + c] < 0 ? nullptr : (const char *)w + rows[p * PANEL + c];
    for (int64_t first = 0; first < units; first += PACKED_UNITS) {
      const int64_t last = std::min(first + PACKED_UNITS, units);
      uint32_t *to = out + (p * units + first) * PANEL;
#if defined(__AVX512F__)
      if (last - first == PACKED_UNITS && (uintptr_t)to % 64 == 0) {
        for (int c = 0; c < PANEL; c += LANES) pack_square(from + c, first * 4, to + c);
        continue;
      }
#endif
      for (int c = 0; c < PANEL; ++c)
        for (int64_t u = 0; u < last - first; ++u) {
          uint32_t bits = 0;
          if (from[c]) std::memcpy(&bits, from[c] + (first + u) * 4, 4);
          to[u * PANEL + c] = bits;
        }
    }
  }
#if defined(__AVX512F__)
  // What passed the caches by is seen by all threads now.
  _mm_sfence();
#endif
}

// The k elements of one packed row: what `pack` took.
template <class T>
static void unpack(const uint32_t *packed, int64_t row, int64_t k, typename T::elem *out) {
  const int64_t units = k / T::PER_UNIT;
  const uint32_t *from = packed + row / PANEL * units * PANEL + row % PANEL;
  for (int64_t u = 0; u < units; ++u) std::memcpy((char *)out + u * 4, from + u * PANEL, 4);
}

// ldx: elements from row to row of x. rows: the rows of x to take, or null for all in order.
// bias: [panels * 32] in packed order, or null. n: outputs that exist, in packed order.
// out_rows: the rows of out to write, or null for all in order. step: elements from one vector of outputs to the next.
template <class T>
struct Linear {
  typedef typename T::elem elem;
  const elem *x;
  int64_t ldx;
  const int32_t *rows;
  const uint32_t *packed;
  const float *bias;
  int64_t m, n, k;
  Mode mode;
  elem *out;
  int64_t ldo;
  const int32_t *out_rows = nullptr;
  int64_t step = LANES;

  int64_t panels() const { return (n + PANEL - 1) / PANEL; }
  int64_t tiles() const { return (m + TILE_ROWS - 1) / TILE_ROWS; }
  // Small batches take several panels at a time, because one row alone would wait for its own accumulator.
  int64_t group() const {
    if (m <= 6) return m <= 2 ? 4 : 2;
    return std::max<int64_t>(1, std::min(PANELS_AT_ONCE, PANELS_BYTES / (k / T::PER_UNIT * PANEL * 4)));
  }
  int64_t groups() const { return (panels() + group() - 1) / group(); }
  int64_t tasks() const { return groups() * tiles(); }
  // With few rows, reading the weights takes the time.
  double work() const { return (double)std::max<int64_t>(m, 8) * n * k; }

  void run(int64_t task) const {
    const int64_t g = task / tiles(), tile = task % tiles();
    const int64_t first = m * tile / tiles(), last = m * (tile + 1) / tiles();
    const int64_t panel = g * group(), end = std::min(panel + group(), panels());
    switch (last - first) {
#define CASE(R) \
  case R: return compute<R>(panel, end, first);
      CASE(1) CASE(2) CASE(3)
      default: break;
    }
    if constexpr (TILE_ROWS >= 6) switch (last - first) {
      CASE(4) CASE(5) CASE(6)
      default: break;
    }
    if constexpr (TILE_ROWS >= 12) switch (last - first) {
      CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
      default: break;
    }
  }

  // R rows of x times the panels panel..end-1, as many of their vectors at a time as the registers hold.
  template <int R>
  void compute(int64_t panel, int64_t end, int64_t first) const {
    constexpr int HERE = HELD / R >= 8 ? 8 : HELD / R >= 4 ? 4 : HELD / R >= 2 ? 2 : 1;
    const int64_t units = k / T::PER_UNIT;
    const uint32_t *from[R];
    for (int r = 0; r < R; ++r) from[r] = (const uint32_t *)(x + (rows ? rows[first + r] : first + r) * ldx);
    // Of the panels that `group` allows for so many rows.
    constexpr int VECTORS = HELD < 24 || R <= 2 ? 8 : R <= 6 ? 4 : 2;
    vf acc[VECTORS][R] = {};
    Rows<T, R> left;
    for (int64_t u = 0; u < units;) {
      const int64_t count = std::min(BLOCK_UNITS, units - u);
      left.take(from, u, u + count);
      for (int64_t at = 0; at < 2 * (end - panel);) at += vectors<R, HERE>(left.at, panel, end, at, u, count, acc + at);
      u += count;
    }
    for (int64_t p = panel; p < end; ++p)
      for (int r = 0; r < R; ++r) finish(p, first + r, acc[2 * (p - panel)][r], acc[2 * (p - panel) + 1][r]);
  }

  // Adds `count` units from unit u on to N vectors of the panels, from vector `at` on, or to fewer where fewer are left.
  // Returns how many.
  template <int R, int N>
  int64_t vectors(const left *const *a, int64_t panel, int64_t end, int64_t at, int64_t u, int64_t count, vf (*acc)[R]) const {
    if constexpr (N > 1)
      if (at + N > 2 * (end - panel)) return vectors<R, N / 2>(a, panel, end, at, u, count, acc);
    const int64_t units = k / T::PER_UNIT;
    // Vectors per panel: 2 * units.
    const vu *w = (const vu *)packed + (panel + at / 2) * 2 * units + 2 * u + at % 2;
    add_products<T, R, N>(a, count, [=](int64_t i, int j) { return w[j / 2 * 2 * units + 2 * i + j % 2]; }, acc);
    return N;
  }

  INLINE void finish(int64_t panel, int64_t row, vf low, vf high) const {
    if (bias) {
      low += load(bias + panel * PANEL);
      high += load(bias + panel * PANEL + LANES);
    }
    if (mode == SILU_MUL) {
      const vf gate = T::rounded(low), up = T::rounded(high);
      put(row, panel * LANES, n / 2, T::rounded(gate / (1.0f + exp_of(-gate))) * up);
    } else {
      put(row, panel * PANEL, n, low);
      put(row, panel * PANEL + LANES, n, high);
    }
  }

  INLINE void put(int64_t row, int64_t column, int64_t width, vf v) const {
    if (column >= width) return;
    elem *to = out + (out_rows ? out_rows[row] : row) * ldo + column / LANES * step;
    if (column + LANES <= width) {
      T::store16(to, mode == ADD ? T::load16(to) + T::rounded(v) : v);
      return;
    }
    for (int i = 0; i < width - column; ++i)
      to[i] = T::down(mode == ADD ? T::up(to[i]) + T::rounded(v[i]) : v[i]);
  }
};

template <class T>
static void linear(const Linear<T> &op, int threads) {
  parallel(threads, op.tasks(), op.work(), [&op](int64_t i) { op.run(i); });
}

// Several maps side by side. No two may write to the same elements.
template <class T>
static void all(const std::vector<Linear<T>> &ops, int threads) {
  std::vector<std::pair<int32_t, int32_t>> tasks;
  double work = 0;
  for (size_t i = 0; i < ops.size(); ++i) {
    work += ops[i].work();
    for (int64_t t = 0; t < ops[i].tasks(); ++t) tasks.push_back({(int32_t)i, (int32_t)t});
  }
  parallel(threads, (int64_t)tasks.size(), work, [&](int64_t i) { ops[tasks[i].first].run(tasks[i].second); });
}
