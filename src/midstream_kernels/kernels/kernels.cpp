// The functions that Python calls (../build.py): plain C types, and pointers to memory that the caller owns.
#include "pass.h"
#include "sample.h"
#include "sha256.h"

// begins, ends: of `count` ranges of an open file. digests: 32 bytes each. largest: two numbers each (Largest). Returns 0, a
// negative errno, or a ShaOutcome.
extern "C" int64_t digest_ranges(int file, const int64_t *begins, const int64_t *ends, int64_t count, uint8_t *digests,
                                 uint32_t *largest) {
  return sha256_ranges(file, begins, ends, count, digests, largest);
}

template <class T>
static void sample(const typename T::elem *logits, int64_t m, int64_t vocab, const float *temperature,
                   const Filter *filters, const uint64_t *counters, const int64_t *wanted, float tie, int32_t *token,
                   float *logprob, float *sampling_logprob, uint8_t *near_tie, int64_t n, int32_t *ids, float *values,
                   int32_t *mask_size, uint8_t *mask, int threads) {
  const Sampler<T> sampler{vocab, tie};
  parallel(threads, m, 16.0 * m * vocab, [=](int64_t i) {
    sampler.row(logits + i * vocab, temperature[i], filters[i], counters + 3 * i, wanted[i], token + i, logprob + i,
                sampling_logprob + i, near_tie + i, n, ids + i * n, values + i * n,
                mask_size ? mask_size + i : nullptr, mask + i * mask_room(vocab));
  });
}

#define EXPORT(T, NAME)                                                                                                \
  extern "C" {                                                                                                         \
  void pack_##NAME(const void *w, const int64_t *rows, int64_t panels, int64_t k, uint32_t *out) {                     \
    pack<T>(w, rows, panels, k, out);                                                                                  \
  }                                                                                                                    \
  void linear_##NAME(const void *x, const uint32_t *packed, const float *bias, int64_t m, int64_t n, int64_t k,        \
                     int mode, void *out, int64_t ldo, int threads) {                                                  \
    linear<T>({(const T::elem *)x, k, nullptr, packed, bias, m, n, k, (Mode)mode, (T::elem *)out, ldo}, threads);      \
  }                                                                                                                    \
  void rms_norm_##NAME(const void *x, const int64_t *rows, const float *weight, int64_t m, int64_t hidden, float eps,  \
                       void *out, int threads) {                                                                       \
    rms_norm<T>((const T::elem *)x, rows, weight, m, hidden, eps, (T::elem *)out, threads);                            \
  }                                                                                                                    \
  int64_t forward_##NAME(const void *model, float eps, float scale, float tie, const void *scratch, const void *cache, \
                         const void *adapters, int64_t tokens, const int64_t *ids, const int64_t *positions,           \
                         const int64_t *slots, const int32_t *spans, int64_t sequences, const int32_t *tables,         \
                         const int64_t *wanted, int64_t wanted_count, void *routes, uint8_t *near_tie,                 \
                         float *router_weights, void *picked, void *logits, int threads) {                             \
    const Numbers numbers{eps, scale, tie};                                                                            \
    const Step step{tokens, ids, positions, slots, spans, sequences, tables, wanted, wanted_count, (uint8_t *)routes,  \
                    near_tie, router_weights, picked, logits};                                                         \
    return Pass<T>{*(const Model *)model, numbers, *(const Scratch *)scratch, (uint32_t *const *)cache, step,          \
                   (const StepAdapters *)adapters, threads}.run();                                                     \
  }                                                                                                                    \
  void lora_##NAME(const void *x, int64_t ldx, int64_t k, const int32_t *rows, const int32_t *starts, int64_t groups,  \
                   const void *pieces, int64_t stride, int64_t count, void *out, int64_t ldo, int threads) {           \
    lora<T>((const T::elem *)x, ldx, k, rows, starts, groups, (const Piece *)pieces, stride, count, (T::elem *)out,    \
            ldo, threads);                                                                                             \
  }                                                                                                                    \
  void silu_mul_##NAME(const void *wide, int64_t m, int64_t inner, void *out, int threads) {                           \
    silu_mul<T>((const T::elem *)wide, m, inner, (T::elem *)out, threads);                                             \
  }                                                                                                                    \
  void add_##NAME(const void *from, int64_t m, int64_t width, void *to, int threads) {                                 \
    add<T>((const T::elem *)from, m, width, (T::elem *)to, threads);                                                   \
  }                                                                                                                    \
  void sample_##NAME(const void *logits, int64_t m, int64_t vocab, const float *temperature, const float *filters,     \
                     const uint64_t *counters, const int64_t *wanted, float tie, int32_t *token, float *logprob,       \
                     float *sampling_logprob, uint8_t *near_tie, int64_t n, int32_t *ids, float *values,               \
                     int32_t *mask_size, uint8_t *mask, int threads) {                                                 \
    sample<T>((const T::elem *)logits, m, vocab, temperature, (const Filter *)filters, counters, wanted, tie, token,   \
              logprob, sampling_logprob, near_tie, n, ids, values, mask_size, mask, threads);                          \
  }                                                                                                                    \
  }

EXPORT(F32, f32)
EXPORT(BF16, bf16)
