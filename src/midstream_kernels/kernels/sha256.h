// SHA-256 of several ranges of a file at a time, by the processor's own instructions for it.
//
// One message alone leaves most of those instructions' time unused: each waits for the one before. The rounds of LANES messages
// are interleaved here, so one thread is 2.5 times as fast. The digests are those of any SHA-256. While the bytes are in the
// cache, the largest number among them is looked for, too: it shows whether floating-point numbers are finite.
#pragma once
#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <unistd.h>
#include <vector>

// What sha256_ranges returns, besides 0 and an errno with a minus.
enum ShaOutcome { SHA_SHORTER = 1, SHA_NOT_HERE = 2 };

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

namespace sha {

constexpr int LANES = 3;
constexpr int64_t BLOCK = 64;
// Read at a time, for each message: those of all fit the cache of a core.
constexpr int64_t READ = 1 << 16;

alignas(16) constexpr uint32_t ROUNDS[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

constexpr uint32_t FIRST[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                               0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

inline bool here() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 29 & 1);
}

// Takes `blocks` blocks of each message into its state. L: how many messages.
template <int L>
__attribute__((target("sha,sse4.1"))) void take(uint32_t (*states)[8], const uint8_t *const *data, int64_t blocks) {
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
  // The instructions want the state as the words ABEF and CDGH.
  __m128i abef[L], cdgh[L];
  for (int l = 0; l < L; l++) {
    const __m128i low = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)states[l]), 0xB1);
    const __m128i high = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(states[l] + 4)), 0x1B);
    abef[l] = _mm_alignr_epi8(low, high, 8);
    cdgh[l] = _mm_blend_epi16(high, low, 0xF0);
  }
  for (int64_t block = 0; block < blocks; block++) {
    // words: of the message, the last sixteen; four rounds take four of them and make those of sixteen rounds later.
    __m128i words[L][4], before_abef[L], before_cdgh[L];
    for (int l = 0; l < L; l++) {
      before_abef[l] = abef[l], before_cdgh[l] = cdgh[l];
      for (int i = 0; i < 4; i++)
        words[l][i] =
            _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(data[l] + BLOCK * block + 16 * i)), swap);
    }
#pragma GCC unroll 16
    for (int four = 0; four < 16; four++) {
      const __m128i constants = _mm_load_si128((const __m128i *)(ROUNDS + 4 * four));
      const int now = four & 3, next = (four + 1) & 3, third = (four + 2) & 3, last = (four + 3) & 3;
#pragma GCC unroll 3
      for (int l = 0; l < L; l++) {
        __m128i *const w = words[l];
        const __m128i sum = _mm_add_epi32(w[now], constants);
        cdgh[l] = _mm_sha256rnds2_epu32(cdgh[l], abef[l], sum);
        abef[l] = _mm_sha256rnds2_epu32(abef[l], cdgh[l], _mm_shuffle_epi32(sum, 0x0E));
        if (four < 12)
          w[now] = _mm_sha256msg2_epu32(
              _mm_add_epi32(_mm_sha256msg1_epu32(w[now], w[next]), _mm_alignr_epi8(w[last], w[third], 4)), w[last]);
      }
    }
    for (int l = 0; l < L; l++) {
      abef[l] = _mm_add_epi32(abef[l], before_abef[l]);
      cdgh[l] = _mm_add_epi32(cdgh[l], before_cdgh[l]);
    }
  }
  for (int l = 0; l < L; l++) {
    const __m128i low = _mm_shuffle_epi32(abef[l], 0x1B), high = _mm_shuffle_epi32(cdgh[l], 0xB1);
    _mm_storeu_si128((__m128i *)states[l], _mm_blend_epi16(low, high, 0xF0));
    _mm_storeu_si128((__m128i *)(states[l] + 4), _mm_alignr_epi8(high, low, 8));
  }
}

// Of whole little-endian words of 16 and of 32 bits, without their highest bit.
struct Largest {
  uint32_t of16, of32;

  void look(const uint8_t *data, int64_t size) {
    uint16_t narrow = of16;
    uint32_t wide = of32;
    for (int64_t i = 0; i < size / 2; i++) {
      uint16_t word;
      memcpy(&word, data + 2 * i, 2);
      narrow = std::max<uint16_t>(narrow, word & 0x7FFF);
    }
    for (int64_t i = 0; i < size / 4; i++) {
      uint32_t word;
      memcpy(&word, data + 4 * i, 4);
      wide = std::max<uint32_t>(wide, word & 0x7FFFFFFF);
    }
    of16 = narrow, of32 = wide;
  }
};

// Fills `into`, and looks at it. 0, or as sha256_ranges.
inline int64_t fill(int file, uint8_t *into, int64_t size, int64_t at, Largest *largest) {
  const uint8_t *const data = into;
  const int64_t all = size;
  while (size) {
    const int64_t count = pread(file, into, size, at);
    if (count < 0 && errno != EINTR) return -errno;
    if (count == 0) return SHA_SHORTER;
    if (count > 0) into += count, size -= count, at += count;
  }
  largest->look(data, all);
  return 0;
}

// The rest of one message, whose `taken` bytes before are in its state, and its digest.
inline int64_t close(int file, uint32_t (*state)[8], int64_t at, int64_t end, int64_t taken, uint8_t *buffer,
                     uint8_t *digest, Largest *largest) {
  const uint64_t bits = 8 * (uint64_t)(taken + end - at);
  const uint8_t *const data = buffer;
  for (; end - at >= BLOCK;) {
    const int64_t size = std::min(READ, (end - at) / BLOCK * BLOCK);
    if (const int64_t failed = fill(file, buffer, size, at, largest)) return failed;
    take<1>(state, &data, size / BLOCK);
    at += size;
  }
  const int64_t left = end - at, blocks = left < BLOCK - 8 ? 1 : 2;
  if (const int64_t failed = fill(file, buffer, left, at, largest)) return failed;
  memset(buffer + left, 0, blocks * BLOCK - left);
  buffer[left] = 0x80;
  for (int i = 0; i < 8; i++) buffer[blocks * BLOCK - 1 - i] = bits >> 8 * i;
  take<1>(state, &data, blocks);
  for (int i = 0; i < 32; i++) digest[i] = (*state)[i / 4] >> (24 - 8 * (i % 4));
  return 0;
}

// The digests of L ranges: as much as all have together, then the rest of each.
template <int L>
int64_t digest(int file, const int64_t *begins, const int64_t *ends, uint8_t *buffers, uint8_t *digests,
               Largest *largest) {
  uint32_t states[L][8];
  const uint8_t *data[L];
  int64_t together = ends[0] - begins[0];
  for (int l = 0; l < L; l++) {
    memcpy(states[l], FIRST, sizeof FIRST);
    largest[l] = {0, 0};
    data[l] = buffers + l * READ;
    together = std::min(together, ends[l] - begins[l]) / BLOCK * BLOCK;
  }
  for (int64_t taken = 0; taken < together;) {
    const int64_t size = std::min(READ, together - taken);
    for (int l = 0; l < L; l++)
      if (const int64_t failed = fill(file, buffers + l * READ, size, begins[l] + taken, largest + l)) return failed;
    take<L>(states, data, size / BLOCK);
    taken += size;
  }
  for (int l = 0; l < L; l++)
    if (const int64_t failed =
            close(file, states + l, begins[l] + together, ends[l], together, buffers, digests + 32 * l, largest + l))
      return failed;
  return 0;
}

} // namespace sha

static int64_t sha256_ranges(int file, const int64_t *begins, const int64_t *ends, int64_t count, uint8_t *digests,
                             uint32_t *largest) {
  if (!sha::here()) return SHA_NOT_HERE;
  std::vector<uint8_t> buffers(sha::LANES * sha::READ);
  int64_t failed = 0;
  for (int64_t i = 0; i < count && !failed; i += sha::LANES) {
    const auto some = count - i >= 3 ? sha::digest<3> : count - i == 2 ? sha::digest<2> : sha::digest<1>;
    failed = some(file, begins + i, ends + i, buffers.data(), digests + 32 * i, (sha::Largest *)largest + i);
  }
  return failed;
}

#else

static int64_t sha256_ranges(int, const int64_t *, const int64_t *, int64_t, uint8_t *, uint32_t *) {
  return SHA_NOT_HERE;
}

#endif
