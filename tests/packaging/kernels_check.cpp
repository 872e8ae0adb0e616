// Runs kernels of the library in argv[1] on fixed numbers and prints a hash of each result's bits.
// The test compares the hashes of two libraries, of which one may be for another processor and run under an emulator.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

static void *library;

template <class F>
static F *function(const std::string &name) {
  void *found = dlsym(library, name.c_str());
  if (!found) {
    std::fprintf(stderr, "%s\n", dlerror());
    std::exit(1);
  }
  return (F *)found;
}

static uint64_t state = 1;
// In [-1, 1), the same on every machine.
static float number() {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (float)((int64_t)(state >> 40) - (1 << 23)) / (1 << 23);
}

struct Numbers {
  bool half;
  std::vector<unsigned char> bytes;
  Numbers(bool half, int64_t count, float scale) : half(half), bytes(count * (half ? 2 : 4)) {
    for (int64_t i = 0; i < count; ++i) {
      const float x = number() * scale;
      uint32_t bits;
      std::memcpy(&bits, &x, 4);
      if (half)
        ((uint16_t *)bytes.data())[i] = bits >> 16;
      else
        ((float *)bytes.data())[i] = x;
    }
  }
};

static void print(const char *name, const char *suffix, const void *data, size_t size) {
  uint64_t hash = 14695981039346656037u;
  for (size_t i = 0; i < size; ++i) hash = (hash ^ ((const unsigned char *)data)[i]) * 1099511628211u;
  std::printf("%s_%s %016llx\n", name, suffix, (unsigned long long)hash);
}

static uint32_t *packed(bool half, const std::string &suffix, int64_t n, int64_t k) {
  Numbers weight(half, n * k, 0.1f);
  std::vector<int64_t> rows(n);
  for (int64_t i = 0; i < n; ++i) rows[i] = i * k * (half ? 2 : 4);
  auto *out = (uint32_t *)std::aligned_alloc(64, n * k * 4);
  function<void(const void *, const int64_t *, int64_t, int64_t, uint32_t *)>("pack_" + suffix)(
      weight.bytes.data(), rows.data(), n / 32, k, out);
  return out;
}

static void check(bool half) {
  const std::string suffix = half ? "bf16" : "f32";
  const char *said = suffix.c_str();
  const int64_t m = 9, n = 96, k = 128, vocab = 1000;
  const size_t element = half ? 2 : 4;

  Numbers x(half, m * k, 2.0f);
  std::vector<float> bias(n), weight(k);
  for (auto &b : bias) b = number();
  for (auto &w : weight) w = number();
  std::vector<unsigned char> out(m * n * element);
  function<void(const void *, const uint32_t *, const float *, int64_t, int64_t, int64_t, int, void *, int64_t, int)>(
      "linear_" + suffix)(x.bytes.data(), packed(half, suffix, n, k), bias.data(), m, n, k, 0, out.data(), n, 2);
  print("linear", said, out.data(), out.size());

  std::vector<unsigned char> normed(m * k * element);
  function<void(const void *, const int64_t *, const float *, int64_t, int64_t, float, void *, int)>(
      "rms_norm_" + suffix)(x.bytes.data(), nullptr, weight.data(), m, k, 1e-6f, normed.data(), 1);
  print("rms_norm", said, normed.data(), normed.size());

  std::vector<unsigned char> active(m * k / 2 * element);
  function<void(const void *, int64_t, int64_t, void *, int)>("silu_mul_" + suffix)(x.bytes.data(), m, k / 2,
                                                                                     active.data(), 1);
  print("silu_mul", said, active.data(), active.size());

  function<void(const void *, int64_t, int64_t, void *, int)>("add_" + suffix)(x.bytes.data(), m, k, normed.data(), 1);
  print("add", said, normed.data(), normed.size());

  Numbers logits(half, m * vocab, 8.0f);
  std::vector<float> temperature(m), filters(3 * m), logprob(m), sampling(m), values(m * 5);
  std::vector<uint64_t> counters(3 * m);
  std::vector<int64_t> wanted(m, -1);
  std::vector<int32_t> token(m), ids(m * 5);
  std::vector<uint8_t> near(m);
  for (int64_t i = 0; i < m; ++i) {
    temperature[i] = 0.5f + 0.1f * (float)i;
    filters[3 * i] = i % 3 ? 0.0f : 40.0f;
    filters[3 * i + 1] = i % 2 ? 0.9f : 1.0f;
    counters[3 * i] = 17, counters[3 * i + 2] = i;
  }
  function<void(const void *, int64_t, int64_t, const float *, const float *, const uint64_t *, const int64_t *, float,
                int32_t *, float *, float *, uint8_t *, int64_t, int32_t *, float *, int)>("sample_" + suffix)(
      logits.bytes.data(), m, vocab, temperature.data(), filters.data(), counters.data(), wanted.data(), 0.0f,
      token.data(), logprob.data(), sampling.data(), near.data(), 5, ids.data(), values.data(), 1);
  print("tokens", said, token.data(), 4 * m);
  print("logprobs", said, logprob.data(), 4 * m);
  print("sampling", said, sampling.data(), 4 * m);
  print("top", said, ids.data(), 4 * m * 5);
  std::printf("first_%s %d %d %d %.6f\n", said, token[0], token[1], token[2], logprob[0]);
}

int main(int, char **arguments) {
  library = dlopen(arguments[1], RTLD_NOW);
  if (!library) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  check(false);
  check(true);
  return 0;
}
