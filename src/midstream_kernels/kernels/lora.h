// Low-rank additions to linear maps, for rows of several adapters in one call: y += B (A x).
//
// A lies as it is in its file, row after row, and B in panels as any packed map (linear.h). Each row of x has its own sums, in
// one order. So a token's bits depend neither on the adapters beside it nor on how many rows its own adapter has.
#pragma once

#include <vector>

#include "linear.h"

// One adapted map of one adapter, as Python writes it (../adapters.py). a: [rank, k]; null: this map is not adapted.
// b: packed [n, rank], scaled already, where rank is filled up with zeros to whole units.
// column: where its outputs begin in a row of y. step: from one vector of outputs to the next; more than LANES where two maps
// share y vector by vector.
struct Piece {
  const void *a;
  const uint32_t *b;
  int64_t rank, n, column, step;
};

// Lanes of a and b side by side, by number: those of b follow those of a. GCC before version 12 and clang have one form each.
#if defined(__clang__)
#define LANES_OF(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define LANES_OF(a, b, ...) __builtin_shuffle(a, b, places{__VA_ARGS__})
#endif

// The sum of each of sixteen vectors, in their order. As sum_lanes: the upper half is added to the lower one, again and again.
static inline vf sums_of(const vf *v) {
#if defined(__AVX512F__)
  typedef int32_t places __attribute__((vector_size(64)));
  vf eight[8], four[4], two[2];
  for (int i = 0; i < 8; ++i)
    eight[i] = LANES_OF(v[i], v[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               LANES_OF(v[i], v[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  for (int i = 0; i < 4; ++i)
    four[i] = LANES_OF(eight[i], eight[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
              LANES_OF(eight[i], eight[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int i = 0; i < 2; ++i)
    two[i] = LANES_OF(four[i], four[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
             LANES_OF(four[i], four[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  return LANES_OF(two[0], two[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
         LANES_OF(two[0], two[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
#else
  typedef int32_t places __attribute__((vector_size(16)));
  alignas(64) float sums[LANES];
  for (int i = 0; i < LANES; i += 4) {
    quad q[4];
    for (int j = 0; j < 4; ++j) q[j] = quarter(v[i + j], [](quad a, quad b) { return a + b; });
    // The k-th lanes of all four, side by side.
    const quad low01 = LANES_OF(q[0], q[1], 0, 4, 1, 5), low23 = LANES_OF(q[2], q[3], 0, 4, 1, 5);
    const quad high01 = LANES_OF(q[0], q[1], 2, 6, 3, 7), high23 = LANES_OF(q[2], q[3], 2, 6, 3, 7);
    const quad even = LANES_OF(low01, low23, 0, 1, 4, 5) + LANES_OF(high01, high23, 0, 1, 4, 5);
    const quad odd = LANES_OF(low01, low23, 2, 3, 6, 7) + LANES_OF(high01, high23, 2, 3, 6, 7);
    const quad four = even + odd;
    std::memcpy(sums + i, &four, sizeof four);
  }
  return load(sums);
#endif
}
#undef LANES_OF

// A piece, and the rows that it is for: x [.., ldx] at `rows` (null: the first m), y [.., ldo] at `out_rows`.
template <class T>
struct LowRank {
  typedef typename T::elem elem;
  static constexpr int ROWS = 8;
  Piece piece;
  const elem *x;
  int64_t ldx, k;
  const int32_t *rows, *out_rows;
  int64_t m;
  elem *out;
  int64_t ldo;
  // [m, width()], what A x is kept in.
  elem *hidden;

  int64_t width() const { return (piece.rank + T::PER_UNIT - 1) / T::PER_UNIT * T::PER_UNIT; }
  int64_t tiles() const { return (m + ROWS - 1) / ROWS; }
  // As of Linear: with few rows, reading the numbers takes the time.
  double work() const { return (double)std::max<int64_t>(m, 8) * piece.rank * (k + piece.n); }

  void shrink(int64_t tile) const {
    const int64_t first = tile * ROWS, last = std::min(m, first + ROWS);
    for (int64_t r = first; r < last; ++r)
      for (int64_t q = 0; q < width(); q += LANES) dots(r, q);
  }

  // A x of one row, of ranks rank..rank+15; those beyond the last are zeros.
  void dots(int64_t row, int64_t rank) const {
    constexpr int64_t STEP = LANES * T::PER_UNIT;
    // As many ranks at once as the registers hold.
    constexpr int AT_ONCE = HELD >= LANES ? LANES : 4;
    vf acc[LANES] = {};
    const elem *from = x + (rows ? rows[row] : row) * ldx, *a = (const elem *)piece.a + rank * k;
    const int64_t ranks = std::min<int64_t>(LANES, piece.rank - rank);
    // Where there are fewer ranks, the last one is computed again.
    int64_t at[LANES];
    for (int64_t q = 0; q < LANES; ++q) at[q] = std::min(q, ranks - 1) * k;
    for (int first = 0; first < LANES; first += AT_ONCE) {
      vf c[AT_ONCE] = {};
      int64_t d = 0;
      for (; d + STEP <= k; d += STEP) {
        const vu left = take(from + d, STEP);
#pragma GCC unroll 16
        for (int q = 0; q < AT_ONCE; ++q) c[q] = T::dot(c[q], left, take(a + at[first + q] + d, STEP));
      }
      if (d < k) {
        const vu left = take(from + d, k - d);
        for (int q = 0; q < AT_ONCE; ++q) c[q] = T::dot(c[q], left, take(a + at[first + q] + d, k - d));
      }
      for (int q = 0; q < AT_ONCE; ++q) acc[first + q] = c[q];
    }
    const vf sums = sums_of(acc);
    elem *to = hidden + row * width() + rank;
    if (rank + LANES <= width() && ranks == LANES) return T::store16(to, sums);
    for (int64_t q = 0; q < std::min<int64_t>(LANES, width() - rank); ++q) to[q] = q < ranks ? T::down(sums[q]) : elem{};
  }

  // A vector of `count` elements, filled up with zeros.
  static INLINE vu take(const elem *from, int64_t count) {
    if (count == LANES * T::PER_UNIT) return (vu)load((const float *)from);
    vu v = {};
    std::memcpy(&v, from, count * sizeof(elem));
    return v;
  }

  Linear<T> expand() const {
    return {hidden, width(), nullptr, piece.b, nullptr, m, piece.n, width(), ADD, out + piece.column, ldo, out_rows, piece.step};
  }
};

// Adds all of them. No two may add to the same elements.
template <class T>
static void add_low_ranks(std::vector<LowRank<T>> &ops, int threads) {
  int64_t size = 0;
  double work = 0;
  for (const auto &op : ops) {
    size += op.m * op.width();
    work += op.work();
  }
  static thread_local std::vector<typename T::elem> hidden;
  static thread_local std::vector<std::pair<int32_t, int32_t>> tiles;
  static thread_local std::vector<Linear<T>> expands;
  if ((int64_t)hidden.size() < size) hidden.resize(size);
  tiles.clear();
  expands.clear();
  int64_t at = 0;
  for (size_t i = 0; i < ops.size(); ++i) {
    ops[i].hidden = hidden.data() + at;
    at += ops[i].m * ops[i].width();
    for (int64_t t = 0; t < ops[i].tiles(); ++t) tiles.push_back({(int32_t)i, (int32_t)t});
    expands.push_back(ops[i].expand());
  }
  // Other threads would see variables of their own.
  const auto &ready = tiles;
  parallel(threads, (int64_t)ready.size(), work, [&](int64_t i) { ops[ready[i].first].shrink(ready[i].second); });
  all<T>(expands, threads);
}

// rows: of x and of out, group after group; starts: [groups + 1]. pieces: of group g, `count` of them from g * stride on.
template <class T>
static void lora(const typename T::elem *x, int64_t ldx, int64_t k, const int32_t *rows, const int32_t *starts,
                 int64_t groups, const Piece *pieces, int64_t stride, int64_t count, typename T::elem *out, int64_t ldo,
                 int threads) {
  std::vector<LowRank<T>> ops;
  for (int64_t g = 0; g < groups; ++g)
    for (int64_t p = 0; p < count; ++p) {
      const Piece &piece = pieces[g * stride + p];
      const int32_t *of = rows + starts[g];
      if (piece.a) ops.push_back({piece, x, ldx, k, of, of, starts[g + 1] - starts[g], out, ldo, nullptr});
    }
  add_low_ranks<T>(ops, threads);
}

// The activation of an MLP, from a row of alternating vectors of gate and up. wide: [m, 2 * inner]. out: [m, inner].
template <class T>
static void silu_mul(const typename T::elem *wide, int64_t m, int64_t inner, typename T::elem *out, int threads) {
  parallel(threads, m, 8.0 * m * inner, [=](int64_t i) {
    for (int64_t d = 0; d < inner; d += LANES) {
      const vf gate = T::load16(wide + i * 2 * inner + 2 * d), up = T::load16(wide + i * 2 * inner + 2 * d + LANES);
      T::store16(out + i * inner + d, T::rounded(gate / (1.0f + exp_of(-gate))) * up);
    }
  });
}

// to += from, row by row. width: a multiple of LANES.
template <class T>
static void add(const typename T::elem *from, int64_t m, int64_t width, typename T::elem *to, int threads) {
  parallel(threads, m, (double)m * width, [=](int64_t i) {
    for (int64_t d = i * width; d < (i + 1) * width; d += LANES) T::store16(to + d, T::load16(to + d) + T::load16(from + d));
  });
}
