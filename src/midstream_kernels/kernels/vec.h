// Float vectors of sixteen lanes on any processor, and the two element types of the kernels.
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
#if defined(__AVX512F__)
#define INLINE inline
typedef float vf __attribute__((vector_size(64), aligned(64)));
typedef uint32_t vu __attribute__((vector_size(64), aligned(64)));
typedef int32_t vi __attribute__((vector_size(64), aligned(64)));
// Accumulators of sixteen lanes that fit into the registers, beside the operands.
constexpr int HELD = 24;

static inline vf select(vi mask, vf yes, vf no) { return mask ? yes : no; }
static inline vu select(vi mask, vu yes, vu no) { return mask ? yes : no; }
static inline vf splat(float x) { return x - vf{}; }
static inline vu splat_unit(uint32_t x) { return x - vu{}; }
static inline vf load(const float *p) {
  vf v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
static inline void store(float *p, vf v) { std::memcpy(p, &v, sizeof v); }
#else
// Sixteen lanes in the processor's own vectors. GCC keeps a vector that is wider than those in memory, and passes such an object
// in memory to what is not inlined.
#define INLINE inline __attribute__((always_inline))
#if defined(__AVX2__)
constexpr int PART_BYTES = 32, HELD = 6;
#elif defined(__aarch64__)
constexpr int PART_BYTES = 16, HELD = 6;
#else
constexpr int PART_BYTES = 16, HELD = 3;
#endif
constexpr int PARTS = 64 / PART_BYTES;

template <class E>
struct Wide {
  typedef E Part __attribute__((vector_size(PART_BYTES)));
  Part part[PARTS];
  Wide() = default;
  INLINE Wide(E x) {
    for (auto &p : part) p = x - Part{};
  }
  template <class F>
  INLINE explicit operator Wide<F>() const {
    Wide<F> to;
    for (int i = 0; i < PARTS; ++i) to.part[i] = (typename Wide<F>::Part)part[i];
    return to;
  }
  INLINE E &operator[](int i) { return ((E *)part)[i]; }
  INLINE E operator[](int i) const { return ((const E *)part)[i]; }
  INLINE Wide operator-() const {
    Wide to;
    for (int i = 0; i < PARTS; ++i) to.part[i] = -part[i];
    return to;
  }
#define OPERATOR(OP, RESULT)                                                     \
  friend INLINE Wide<RESULT> operator OP(const Wide &a, const Wide &b) {         \
    Wide<RESULT> to;                                                             \
    for (int i = 0; i < PARTS; ++i) to.part[i] = a.part[i] OP b.part[i];         \
    return to;                                                                   \
  }
  OPERATOR(+, E) OPERATOR(-, E) OPERATOR(*, E) OPERATOR(/, E) OPERATOR(&, E) OPERATOR(|, E)
  OPERATOR(<, int32_t) OPERATOR(>, int32_t) OPERATOR(<=, int32_t) OPERATOR(==, int32_t)
#undef OPERATOR
  INLINE Wide operator<<(int bits) const {
    Wide to;
    for (int i = 0; i < PARTS; ++i) to.part[i] = part[i] << bits;
    return to;
  }
  INLINE Wide operator>>(int bits) const {
    Wide to;
    for (int i = 0; i < PARTS; ++i) to.part[i] = part[i] >> bits;
    return to;
  }
  INLINE Wide &operator+=(const Wide &b) { return *this = *this + b; }
  INLINE Wide &operator*=(const Wide &b) { return *this = *this * b; }
};
typedef Wide<float> vf;
typedef Wide<uint32_t> vu;
typedef Wide<int32_t> vi;

template <class E>
static INLINE Wide<E> select(const vi &mask, const Wide<E> &yes, const Wide<E> &no) {
  Wide<E> to;
  for (int i = 0; i < PARTS; ++i) to.part[i] = mask.part[i] ? yes.part[i] : no.part[i];
  return to;
}
static INLINE vf splat(float x) { return x; }
static INLINE vu splat_unit(uint32_t x) { return x; }
static INLINE vf load(const float *p) {
  vf v;
  for (int i = 0; i < PARTS; ++i) std::memcpy(&v.part[i], p + i * (LANES / PARTS), PART_BYTES);
  return v;
}
static INLINE void store(float *p, vf v) {
  for (int i = 0; i < PARTS; ++i) std::memcpy(p + i * (LANES / PARTS), &v.part[i], PART_BYTES);
}
#endif

static INLINE vf max_of(vf a, vf b) { return select(a > b, a, b); }
#if defined(__AVX512F__)
static INLINE float sum_lanes(vf v) { return _mm512_reduce_add_ps((__m512)v); }
static INLINE float max_lane(vf v) { return _mm512_reduce_max_ps((__m512)v); }
#else
typedef float quad __attribute__((vector_size(16)));
// Four lanes that are left when the upper half is combined with the lower one twice.
template <class F>
static INLINE quad quarter(const vf &v, const F &f) {
  quad q[4];
  std::memcpy(q, &v, sizeof q);
  return f(f(q[0], q[2]), f(q[1], q[3]));
}
// As AVX-512's: the upper half is combined with the lower one, again and again.
template <class F>
static INLINE float folded(const vf &v, const F &f) {
  const quad four = quarter(v, f);
  const quad two = f(four, quad{four[2], four[3], four[2], four[3]});
  return f(two, quad{two[1], two[1], two[1], two[1]})[0];
}
static INLINE float sum_lanes(const vf &v) {
  return folded(v, [](auto a, auto b) { return a + b; });
}
static INLINE float max_lane(const vf &v) {
  return folded(v, [](auto a, auto b) { return a > b ? a : b; });
}
#endif

// The larger of both; NaN for NaN.
static INLINE vf at_least(vf x, float least) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)splat(least), (__m512)x);
#else
  return select(x < least, splat(least), x);
#endif
}

// e to the x, where `clamped` is x within -87 and 88.
static INLINE vf exp_within(vf x, vf clamped) {
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
  return select(x < -87.0f, vf{}, result);
}
// e to the x, to about 2 units in the last place. Exactly 0 below -87, and NaN for NaN. Cody-Waite reduction, degree 6.
static INLINE vf exp_of(vf x) {
  const vf clamped = at_least(x, -87.0f);
  return exp_within(x, select(clamped > 88.0f, splat(88.0f), clamped));
}
// The same for numbers up to 88.
static INLINE vf exp_below(vf x) { return exp_within(x, at_least(x, -87.0f)); }
static INLINE float exp_one(float x) { return exp_of(splat(x))[0]; }

struct F32 {
  typedef float elem;
  static constexpr int PER_UNIT = 1;
  static INLINE float up(elem x) { return x; }
  static INLINE elem down(float x) { return x; }
  static INLINE float rounded(float x) { return x; }
  static INLINE vf rounded(vf x) { return x; }
  static INLINE vf nearest(vf x) { return x; }
  static INLINE vf load16(const elem *p) { return load(p); }
  static INLINE void store16(elem *p, vf v) { store(p, v); }
  // The i-th element of each unit.
  static INLINE vf floats(vu units, int) { return (vf)units; }
  static INLINE vf dot(vf acc, vu a, vu b) { return acc + (vf)a * (vf)b; }
};

// Sixteen numbers of 16 bits, to and from 32 bits.
static INLINE vu widened(const uint16_t *p) {
  vu to;
#if defined(__AVX512F__)
  typedef uint16_t half __attribute__((vector_size(32)));
  half h;
  std::memcpy(&h, p, sizeof h);
  to = __builtin_convertvector(h, vu);
#else
  typedef uint16_t half __attribute__((vector_size(PART_BYTES / 2)));
  for (int i = 0; i < PARTS; ++i) {
    half h;
    std::memcpy(&h, p + i * (LANES / PARTS), sizeof h);
    to.part[i] = __builtin_convertvector(h, vu::Part);
  }
#endif
  return to;
}
static INLINE void narrowed(uint16_t *p, vu v) {
#if defined(__AVX512F__)
  typedef uint16_t half __attribute__((vector_size(32)));
  const half h = __builtin_convertvector(v, half);
  std::memcpy(p, &h, sizeof h);
#else
  typedef uint16_t half __attribute__((vector_size(PART_BYTES / 2)));
  for (int i = 0; i < PARTS; ++i) {
    const half h = __builtin_convertvector(v.part[i], half);
    std::memcpy(p + i * (LANES / PARTS), &h, sizeof h);
  }
#endif
}

struct BF16 {
  typedef uint16_t elem;
  static constexpr int PER_UNIT = 2;
  static INLINE float up(elem x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  }
  // Rounds to nearest, ties to even. NaN stays NaN if it came out of sums and products of bfloat16: its lower bits are zero.
  static INLINE vf nearest(vf x) {
    const vu bits = (vu)x;
    return (vf)((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000u);
  }
  // The same for every NaN.
  static INLINE vu round_bits(vf x) {
    return select(x == x, (vu)nearest(x), (vu)x | 0x400000u);
  }
  static INLINE vf rounded(vf x) { return (vf)round_bits(x); }
  static INLINE float rounded(float x) { return rounded(splat(x))[0]; }
  static INLINE elem down(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return (elem)((bits | 0x400000u) >> 16);
    return (elem)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  }
  static INLINE vf load16(const elem *p) {
    return (vf)(widened(p) << 16);
  }
  static INLINE void store16(elem *p, vf v) {
    narrowed(p, round_bits(v) >> 16);
  }
  static INLINE vf floats(vu units, int i) { return (vf)(i ? units & 0xFFFF0000u : units << 16); }
  static INLINE vf dot(vf acc, vu a, vu b) {
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    acc += floats(a, 0) * floats(b, 0);
    return acc + floats(a, 1) * floats(b, 1);
#endif
  }
};
