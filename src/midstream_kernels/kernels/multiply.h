// Rows of the left side times packed units of the right side: the one product behind linear maps and attention.
//
// Every output has one accumulator, to which the units are added in ascending order. How many outputs are computed at once, and
// where the units are split into blocks, changes no bit of them.
#pragma once

#include <algorithm>

#include "vec.h"

#if defined(__AVX512F__)
// The units of a row are multiplied as they are.
typedef uint32_t left;
constexpr int64_t BLOCK_UNITS = INT64_MAX;
template <class T>
constexpr int LEFT_PER_UNIT = 1;

// Writes the i-th sixteen numbers of a row: weights, each 0, above 1e-38 or NaN.
template <class T>
static INLINE void put_left(left *row, int i, vf v) {
#if defined(__AVX512BF16__)
  if constexpr (T::PER_UNIT == 2) {
    // The processor's own rounding differs from ours in smaller numbers only.
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)v);
    std::memcpy((uint16_t *)row + i * LANES, &rounded, sizeof rounded);
    return;
  }
#endif
  T::store16((typename T::elem *)row + i * LANES, v);
}

template <class T, int R>
struct Rows {
  const left *at[R];
  // rows: where each row's units begin. Takes the units first..last-1.
  void take(const uint32_t *const *rows, int64_t first, int64_t) {
    for (int r = 0; r < R; ++r) at[r] = rows[r] + first;
  }
};
#else
// The units of a row are widened to floats once for all that they are multiplied with.
typedef float left;
// What is widened at a time stays in the first cache.
constexpr int64_t BLOCK_UNITS = 256;
template <class T>
constexpr int LEFT_PER_UNIT = T::PER_UNIT;

template <class T>
static INLINE void put_left(left *row, int i, vf v) {
  store(row + i * LANES, T::nearest(v));
}

template <class T, int R>
struct Rows {
  const left *at[R];
  alignas(64) float wide[T::PER_UNIT == 1 ? 1 : R][BLOCK_UNITS * T::PER_UNIT];

  void take(const uint32_t *const *rows, int64_t first, int64_t last) {
    for (int r = 0; r < R; ++r)
      if constexpr (T::PER_UNIT == 1) {
        at[r] = (const float *)rows[r] + first;
      } else {
        const typename T::elem *from = (const typename T::elem *)(rows[r] + first);
        const int64_t count = (last - first) * T::PER_UNIT;
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) store(wide[r] + i, T::load16(from + i));
        for (; i < count; ++i) wide[r][i] = T::up(from[i]);
        at[r] = wide[r];
      }
  }
};
#endif

// Adds to the sums of R rows and N vectors of outputs. right(u, j): the units u of vector j. The first of the units is a[r][0].
template <class T, int R, int N, class Right>
static inline void add_products(const left *const *a, int64_t units, const Right &right, vf (*sums)[R]) {
  vf c[N][R];
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j)
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) c[j][r] = sums[j][r];
  for (int64_t u = 0; u < units; ++u) {
    vu b[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) b[j] = right(u, j);
#if defined(__AVX512F__)
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const vu x = splat_unit(a[r][u]);
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) c[j][r] = T::dot(c[j][r], x, b[j]);
    }
#else
#pragma GCC unroll 2
    for (int i = 0; i < T::PER_UNIT; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) {
        const vf w = T::floats(b[j], i);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) c[j][r] += splat(a[r][u * LEFT_PER_UNIT<T> + i]) * w;
      }
#endif
  }
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j)
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sums[j][r] = c[j][r];
}
