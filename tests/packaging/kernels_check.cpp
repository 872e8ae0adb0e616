// Runs kernels of the library in argv[1] on fixed numbers and prints a hash of each result's bits.
// The test compares the hashes of two libraries, of which one may be for another processor and run under an emulator.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
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

static int64_t at(const void *memory) { return (int64_t)memory; }

static void *zeros(size_t bytes) {
  bytes = (bytes + 63) / 64 * 64;
  return std::memset(std::aligned_alloc(64, bytes), 0, bytes);
}

static float *numbers(int64_t count) {
  auto *out = (float *)zeros(count * 4);
  for (int64_t i = 0; i < count; ++i) out[i] = number();
  return out;
}

// Two sequences in one pass through a dense layer and one with experts. The tables are those of kernels/pass.h.
static void check_pass(bool half) {
  const std::string suffix = half ? "bf16" : "f32";
  const char *said = suffix.c_str();
  const int64_t tokens = 9, hidden = 128, heads = 4, kv_heads = 2, dim = 32, vocabulary = 64, positions = 16, wide = 256;
  const int64_t inner = 32, experts = 32, top_k = 2, groups = 2, group = 16, wanted = 2;
  const size_t element = half ? 2 : 4;

  std::vector<int64_t> layers;
  const int64_t none[] = {0, 0, 0, 0};
  for (int64_t number = 0; number < 2; ++number) {
    const bool dense = number == 0;
    const auto map = [&](int64_t n, int64_t k) { layers.insert(layers.end(), {at(packed(half, suffix, n, k)), 0, n, k}); };
    layers.push_back(at(numbers(hidden)));
    map((heads + 2 * kv_heads) * dim, hidden);
    layers.insert(layers.end(), {at(numbers(dim)), at(numbers(dim)), dense ? 0 : 3});
    map(hidden, heads * dim);
    layers.push_back(at(numbers(hidden)));
    if (dense) {
      map(wide, hidden), map(hidden, wide / 2);
      layers.insert(layers.end(), 7, 0);
    } else {
      layers.insert(layers.end(), none, none + 4), layers.insert(layers.end(), none, none + 4);
      for (const auto &[n, k] : {std::pair(experts, hidden), {experts * 2 * inner, hidden}, {experts * hidden, inner}})
        layers.push_back(at(packed(half, suffix, n, k)));
      layers.insert(layers.end(), {inner, experts, top_k, 1});
    }
  }
  Numbers embedding(half, vocabulary * hidden, 1.0f);
  const int64_t model[] = {at(layers.data()), 2, at(embedding.bytes.data()), vocabulary, at(numbers(positions * dim / 2)),
                           at(numbers(positions * dim / 2)), positions, dim, at(numbers(hidden)),
                           at(packed(half, suffix, vocabulary, hidden)), 0, vocabulary, hidden,
                           hidden, heads, kv_heads, dim, dim, 1, top_k};
  std::vector<int64_t> scratch;
  for (int i = 0; i < 7; ++i) scratch.push_back(at(zeros(tokens * 2 * wide * element)));
  std::vector<int64_t> cache;
  for (int i = 0; i < 4; ++i) cache.push_back(at(zeros(groups * kv_heads * group * dim * element)));
  const int64_t ids[] = {3, 1, 4, 1, 5, 9, 2, 6, 53}, places[] = {0, 1, 2, 3, 4, 0, 1, 2, 3};
  const int64_t slots[] = {0, 1, 2, 3, 4, 16, 17, 18, 19}, rows[] = {4, 8};
  const int32_t spans[] = {0, 5, 0, 0, 5, 4, 0, 1}, tables[] = {0, 1};
  std::vector<uint8_t> routes(tokens * top_k), ties(tokens);
  std::vector<unsigned char> states(wanted * hidden * element), logits(wanted * vocabulary * element);
  const int64_t refused =
      function<int64_t(const void *, float, float, float, const void *, const void *, const void *, int64_t,
                       const int64_t *, const int64_t *, const int64_t *, const int32_t *, int64_t, const int32_t *,
                       const int64_t *, int64_t, void *, uint8_t *, void *, void *, int)>("forward_" + suffix)(
          model, 1e-6f, 0.1767767f, 0.0f, scratch.data(), cache.data(), nullptr, tokens, ids, places, slots, spans, 2,
          tables, rows, wanted, routes.data(), ties.data(), states.data(), logits.data(), 2);
  if (refused >= 0) std::exit(2);
  float first;
  std::memcpy(&first, logits.data(), sizeof first);
  // A hash would say nothing of numbers that are none.
  if (!half && !(first > 0 || first < 0)) std::exit(3);
  print("states", said, states.data(), states.size());
  print("logits", said, logits.data(), logits.size());
  print("routes", said, routes.data(), routes.size());
  print("keys", said, (void *)cache[1], groups * kv_heads * group * dim * element);
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

  check_pass(half);

  Numbers logits(half, m * vocab, 8.0f);
  std::vector<float> temperature(m), filters(3 * m), logprob(m), sampling(m), values(m * 5);
  std::vector<uint64_t> counters(3 * m);
  std::vector<int64_t> wanted(m, -1);
  std::vector<int32_t> token(m), ids(m * 5), kept_count(m), kept(m * vocab);
  std::vector<uint8_t> near(m);
  for (int64_t i = 0; i < m; ++i) {
    temperature[i] = 0.5f + 0.1f * (float)i;
    filters[3 * i] = i % 3 ? 0.0f : 40.0f;
    filters[3 * i + 1] = i % 2 ? 0.9f : 1.0f;
    counters[3 * i] = 17, counters[3 * i + 2] = i;
  }
  function<void(const void *, int64_t, int64_t, const float *, const float *, const uint64_t *, const int64_t *, float,
                int32_t *, float *, float *, uint8_t *, int64_t, int32_t *, float *, int32_t *, int32_t *, int)>("sample_" + suffix)(
      logits.bytes.data(), m, vocab, temperature.data(), filters.data(), counters.data(), wanted.data(), 0.0f,
      token.data(), logprob.data(), sampling.data(), near.data(), 5, ids.data(), values.data(), kept_count.data(),
      kept.data(), 1);
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
