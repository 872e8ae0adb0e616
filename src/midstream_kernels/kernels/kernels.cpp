// The functions that Python calls (../library.py): plain C types, and pointers to memory that the caller owns.
#include "attention.h"
#include "experts.h"
#include "linear.h"
#include "lora.h"
#include "sample.h"

template <class T>
static void rms_norm(const typename T::elem *x, const int64_t *rows, const float *weight, int64_t m, int64_t hidden,
                     float eps, typename T::elem *out, int threads) {
  parallel(threads, m, (double)m * hidden, [=](int64_t i) {
    Prepare<T>::norm(x + (rows ? rows[i] : i) * hidden, weight, hidden, hidden, eps, out + i * hidden);
  });
}

template <class T>
static void moe(const typename T::elem *x, const uint32_t *router, const uint32_t *gate_up, const uint32_t *down,
                int64_t m, int64_t hidden, int64_t inner, int64_t experts, int64_t k, int flags, float tie,
                typename T::elem *residual, void *routes, int64_t route_stride, uint8_t *near_tie,
                ExpertAdapters adapters, int threads) {
  std::vector<typename T::elem> logits(m * experts);
  std::vector<int32_t> chosen(m * k);
  std::vector<float> weights(m * k);
  linear<T>({x, hidden, nullptr, router, nullptr, m, experts, hidden, STORE, logits.data(), experts}, threads);
  for (int64_t i = 0; i < m; ++i) {
    near_tie[i] |= route<T>(logits.data() + i * experts, experts, k, flags & 1, flags & 2, tie, &chosen[i * k], &weights[i * k]);
    for (int64_t j = 0; j < k; ++j)
      if (experts <= 256)
        ((uint8_t *)routes)[i * route_stride + j] = (uint8_t)chosen[i * k + j];
      else
        ((uint16_t *)routes)[i * route_stride + j] = (uint16_t)chosen[i * k + j];
  }
  Experts<T>{x, m, hidden, inner, experts, k, chosen.data(), weights.data(), gate_up, down, residual,
             adapters}.run(threads);
}

template <class T>
static void sample(const typename T::elem *logits, int64_t m, int64_t vocab, const float *temperature,
                   const Filter *filters, const uint64_t *counters, const int64_t *wanted, float tie, int32_t *token,
                   float *logprob, float *sampling_logprob, uint8_t *near_tie, int64_t n, int32_t *ids, float *values,
                   int threads) {
  const Sampler<T> sampler{vocab, tie};
  parallel(threads, m, 16.0 * m * vocab, [=](int64_t i) {
    sampler.row(logits + i * vocab, temperature[i], filters[i], counters + 3 * i, wanted[i], token + i, logprob + i,
                sampling_logprob + i, near_tie + i, n, ids + i * n, values + i * n);
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
  void prepare_##NAME(void *qkv, int64_t m, int64_t heads, int64_t kv_heads, int64_t head_dim, const float *q_norm,    \
                      const float *k_norm, int64_t norm_size, float eps, const float *cos, const float *sin,           \
                      int64_t rotary, const int64_t *positions, const int64_t *slots, uint32_t *keys,                  \
                      uint32_t *values, int threads) {                                                                 \
    prepare<T>({(T::elem *)qkv, m, heads, q_norm, k_norm, norm_size, eps, cos, sin, rotary, positions, slots,          \
                {keys, values, kv_heads, head_dim}},                                                                   \
               threads);                                                                                               \
  }                                                                                                                    \
  void attention_##NAME(const void *q, int64_t ldq, void *out, int64_t heads, int64_t kv_heads, int64_t head_dim,      \
                        uint32_t *keys, uint32_t *values, const int32_t *spans, int64_t count, const int32_t *tables,  \
                        int64_t window, float scale, int threads) {                                                    \
    attention<T>({(const T::elem *)q, ldq, (T::elem *)out, heads, {keys, values, kv_heads, head_dim}, spans, tables,   \
                  window, scale},                                                                                      \
                 count, threads);                                                                                      \
  }                                                                                                                    \
  void moe_##NAME(const void *x, const uint32_t *router, const uint32_t *gate_up, const uint32_t *down, int64_t m,     \
                  int64_t hidden, int64_t inner, int64_t experts, int64_t k, int flags, float tie, void *residual,     \
                  void *routes, int64_t route_stride, uint8_t *near_tie, const int32_t *adapter_of,                    \
                  const void *adapter_tables, int threads) {                                                           \
    moe<T>((const T::elem *)x, router, gate_up, down, m, hidden, inner, experts, k, flags, tie, (T::elem *)residual,   \
           routes, route_stride, near_tie, {adapter_of, (const Piece *const *)adapter_tables}, threads);               \
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
                     float *sampling_logprob, uint8_t *near_tie, int64_t n, int32_t *ids, float *values, int threads) {\
    sample<T>((const T::elem *)logits, m, vocab, temperature, (const Filter *)filters, counters, wanted, tie, token,   \
              logprob, sampling_logprob, near_tie, n, ids, values, threads);                                           \
  }                                                                                                                    \
  }

EXPORT(F32, f32)
EXPORT(BF16, bf16)
