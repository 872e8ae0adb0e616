// Float vectors of sixteen lanes, and the two element types of the kernels.
//
// A "unit" is 32 bits of input along the summed dimension: one float, or two neighbouring bfloat16. Every kernel adds units in
// ascending order into one accumulator per output. So the bits of an output do not depend on the rest of the batch.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

constexpr int LANES = 16;
typedef float vf __attribute__((vector_size(64), aligned(64)));
typedef uint32_t vu __attribute__((vector_size(64), aligned(64)));
typedef int32_t vi __attribute__((vector_size(64), aligned(64)));

static inline vf load(const float *p) {
  vf v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
static inline void store(float *p, vf v) { std::memcpy(p, &v, sizeof v); }
static inline vf splat(float x) { return x - vf{}; }
static inline vu splat_unit(uint32_t x) { return x - vu{}; }

static inline vf max_of(vf a, vf b) { return a > b ? a : b; }
#if defined(__AVX512F__)
static inline float sum_lanes(vf v) { return _mm512_reduce_add_ps((__m512)v); }
static inline float max_lane(vf v) { return _mm512_reduce_max_ps((__m512)v); }
#else
static inline float sum_lanes(vf v) {
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) v[i] += v[i + half];
  return v[0];
}
static inline float max_lane(vf v) {
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) v[i] = v[i] > v[i + half] ? v[i] : v[i + half];
  return v[0];
}
#endif

// e to the x, to about 2 units in the last place. Exactly 0 below -87, and NaN for NaN. Cody-Waite reduction, degree 6.
static inline vf exp_of(vf x) {
  vf clamped = x < -87.0f ? splat(-87.0f) : x;
  clamped = clamped > 88.0f ? splat(88.0f) : clamped;
  vf scaled = clamped * 1.44269504088896341f;
  // 1.5 * 2^23, which rounds to the nearest integer.
  vf shifted = scaled + 12582912.0f;
  vf n = shifted - 12582912.0f;
  vf r = clamped - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  vf p = splat(1.0f / 720);
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  vi exponent = ((vi)shifted - 0x4B400000 + 127) << 23;
  vf result = p * (vf)exponent;
  return x < -87.0f ? vf{} : result;
}
static inline float exp_one(float x) { return exp_of(splat(x))[0]; }

struct F32 {
  typedef float elem;
  static constexpr int PER_UNIT = 1;
  static inline float up(elem x) { return x; }
  static inline elem down(float x) { return x; }
  static inline float rounded(float x) { return x; }
  static inline vf rounded(vf x) { return x; }
  static inline vf load16(const elem *p) { return load(p); }
  static inline void store16(elem *p, vf v) { store(p, v); }
  static inline vf dot(vf acc, vu a, vu b) { return acc + (vf)a * (vf)b; }
};

struct BF16 {
  typedef uint16_t elem;
  static constexpr int PER_UNIT = 2;
  static inline float up(elem x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  }
  // Rounds to nearest, ties to even. NaN stays NaN.
  static inline vu round_bits(vf x) {
    vu bits = (vu)x;
    vu nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000u;
    return x == x ? nearest : bits | 0x400000u;
  }
  static inline vf rounded(vf x) { return (vf)round_bits(x); }
  static inline float rounded(float x) { return rounded(splat(x))[0]; }
  static inline elem down(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return (elem)((bits | 0x400000u) >> 16);
    return (elem)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  }
  static inline vf load16(const elem *p) {
    typedef uint16_t half __attribute__((vector_size(32)));
    half h;
    std::memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, vu) << 16);
  }
  static inline void store16(elem *p, vf v) {
    typedef uint16_t half __attribute__((vector_size(32)));
    half h = __builtin_convertvector(round_bits(v) >> 16, half);
    std::memcpy(p, &h, sizeof h);
  }
  static inline vf dot(vf acc, vu a, vu b) {
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    acc += (vf)(a << 16) * (vf)(b << 16);
    return acc + (vf)(a & 0xFFFF0000u) * (vf)(b & 0xFFFF0000u);
#endif
  }
};
