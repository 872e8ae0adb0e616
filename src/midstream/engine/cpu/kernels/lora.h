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

// A piece, and the rows that it is for: x [.., ldx] at `rows` (null: the first m), y [.., ldo] at `out_rows`.
template <class T>
struct LowRank {
  typedef typename T::elem elem;
  static constexpr int ROWS = 4, RANKS = 4;
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
  double work() const { return (double)m * piece.rank * (k + piece.n); }

  void shrink(int64_t tile) const {
    const int64_t first = tile * ROWS, last = std::min(m, first + ROWS);
    for (int64_t r = first; r < last; ++r)
      for (int64_t q = piece.rank; q < width(); ++q) hidden[r * width() + q] = elem{};
    for (int64_t q = 0; q < piece.rank; q += RANKS) {
      const int64_t ranks = std::min<int64_t>(RANKS, piece.rank - q);
      if (last - first == ROWS && ranks == RANKS)
        dots<ROWS, RANKS>(first, q);
      else
        for (int64_t r = first; r < last; ++r) {
          if (ranks == RANKS)
            dots<1, RANKS>(r, q);
          else
            for (int64_t i = 0; i < ranks; ++i) dots<1, 1>(r, q + i);
        }
    }
  }

  template <int R, int Q>
  void dots(int64_t row, int64_t rank) const {
    constexpr int64_t STEP = LANES * T::PER_UNIT;
    vf acc[R][Q] = {};
    const elem *from[R], *a[Q];
    for (int r = 0; r < R; ++r) from[r] = x + (rows ? rows[row + r] : row + r) * ldx;
    for (int q = 0; q < Q; ++q) a[q] = (const elem *)piece.a + (rank + q) * k;
    for (int64_t d = 0; d < k; d += STEP) {
      const int64_t count = std::min(STEP, k - d);
      vu left[R], right[Q];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) left[r] = take(from[r] + d, count);
#pragma GCC unroll 4
      for (int q = 0; q < Q; ++q) right[q] = take(a[q] + d, count);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int q = 0; q < Q; ++q) acc[r][q] = T::dot(acc[r][q], left[r], right[q]);
    }
    for (int r = 0; r < R; ++r)
      for (int q = 0; q < Q; ++q) hidden[(row + r) * width() + rank + q] = T::down(sum_lanes(acc[r][q]));
  }

  // A vector of `count` elements, filled up with zeros.
  static vu take(const elem *from, int64_t count) {
    vu v = {};
    if (count == LANES * T::PER_UNIT)
      std::memcpy(&v, from, sizeof v);
    else
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
  std::vector<typename T::elem> hidden(size);
  std::vector<std::pair<int32_t, int32_t>> tiles;
  std::vector<Linear<T>> expands;
  int64_t at = 0;
  for (size_t i = 0; i < ops.size(); ++i) {
    ops[i].hidden = hidden.data() + at;
    at += ops[i].m * ops[i].width();
    for (int64_t t = 0; t < ops[i].tiles(); ++t) tiles.push_back({(int32_t)i, (int32_t)t});
    expands.push_back(ops[i].expand());
  }
  parallel(threads, (int64_t)tiles.size(), work, [&](int64_t i) { ops[tiles[i].first].shrink(tiles[i].second); });
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
