// What of a block is told as literals and what as matches: runs of zeros, or of bytes equal to those a few before them.
//
// Owns: the scan of a block for runs and the literals, lengths and counts that follow from them.
// Always holds: matches have one offset, at least 3 bytes and a literal before each; literals and matches in turn are the
// block; nothing outside the block is read, and no match reaches before its first byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "zstd_bits.h"
#include "zstd_tables.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace midstream {

// How runs are found: bytes equal to the one `offset` before them, at least `least` in a row; at offset 1 only zeros.
struct Runs {
    unsigned offset, least;
};

constexpr size_t MOST_BYTES = 131072;
constexpr unsigned LITERAL_CODES = 36, MATCH_CODES = 53;

struct LengthCodes {
    uint8_t literal[64], match[128];  // of lengths, and of match lengths less 3
    LengthCodes() {
        fill(literal, 64, LENGTH_EXTRAS);
        fill(match, 128, MATCH_EXTRAS);
    }
    static void fill(uint8_t* to, unsigned size, const uint8_t* bits) {
        for (unsigned code = 0, at = 0; at < size; ++code)
            for (unsigned i = 0; i < 1u << bits[code] && at < size; ++i) to[at++] = static_cast<uint8_t>(code);
    }
};
inline const LengthCodes CODES;

static inline unsigned literal_code(uint32_t length) {
    return length < 64 ? CODES.literal[length] : floor_log2(length) + 19;
}
static inline unsigned match_code(uint32_t less_3) {
    const unsigned few = CODES.match[less_3 & 127], many = floor_log2(less_3 | 1) + 36;  // both: which is a coin's toss
    return less_3 < 128 ? few : many;
}

// Bit i: whether byte i of 64 is zero.
static inline uint64_t zeros_of_64(const uint8_t* p) {
#if defined(__AVX512BW__)
    const __m512i v = _mm512_loadu_si512(p);
    return _mm512_testn_epi8_mask(v, v);
#elif defined(__AVX2__)
    const __m256i zero = _mm256_setzero_si256();
    const __m256i low = _mm256_cmpeq_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), zero);
    const __m256i high = _mm256_cmpeq_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32)), zero);
    const uint64_t above = static_cast<uint32_t>(_mm256_movemask_epi8(high));
    return above << 32 | static_cast<uint32_t>(_mm256_movemask_epi8(low));
#else
    constexpr uint64_t LOW7 = 0x7f7f7f7f7f7f7f7f;
    uint64_t mask = 0;
    for (unsigned i = 0; i < 8; ++i) {
        uint64_t x;
        std::memcpy(&x, p + 8 * i, 8);
        const uint64_t zero = ~(((x & LOW7) + LOW7) | x | LOW7) >> 7;  // 1 in each zero byte
        mask |= (zero * 0x0102040810204080) >> 56 << 8 * i;
    }
    return mask;
#endif
}

// Bit i: whether p[i] is p[i - offset].
static inline uint64_t equal_of_64(const uint8_t* p, unsigned offset) {
    uint8_t difference[64];
    for (unsigned i = 0; i < 64; ++i) difference[i] = p[i] ^ (p - offset)[i];
    return zeros_of_64(difference);
}

struct Parsed {
    static constexpr size_t WORDS = MOST_BYTES / 64, MOST_MATCHES = MOST_BYTES / 4;

    uint32_t matches, literal_bytes;
    uint32_t literal_counts[LITERAL_CODES], match_counts[MATCH_CODES];
    uint32_t literal_lengths[MOST_MATCHES], match_lengths[MOST_MATCHES];  // the latter less 3
    uint8_t literal_codes[MOST_MATCHES], match_codes[MOST_MATCHES];
    uint8_t literals[MOST_BYTES + 64];

    // Scans the block for zeros, which `parse` at offset 1 asks for; how many there are.
    size_t scan(const uint8_t* block, size_t size) {
        size_t zeros = 0;
        const size_t whole = size / 64;
        for (size_t i = 0; i < whole; ++i) zeros += count(zero_[i] = zeros_of_64(block + 64 * i));
        if (size % 64) {
            uint8_t rest[64];
            std::memset(rest, 255, 64);
            std::memcpy(rest, block + 64 * whole, size % 64);
            zeros += count(zero_[whole] = zeros_of_64(rest));
        }
        return zeros;
    }

    // Cuts the block, which was scanned, into literals and matches.
    void parse(const uint8_t* block, size_t size, Runs runs) {
        const size_t words = (size + 63) / 64;
        if (runs.offset == 1)
            zeros_after_zeros(words);
        else
            equal_bytes(block, size, runs.offset);
        run_[words] = 0;
        const size_t edges = runs.least <= 3 ? find_edges<3>(words) : find_edges<6>(words);
        take(block, size, edges / 2, runs.least <= 3 ? 2 : 5);
    }

  private:
    uint64_t zero_[WORDS], run_[WORDS + 1];
    uint32_t edges_[2 * MOST_MATCHES + 64];

    static unsigned count(uint64_t bits) { return static_cast<unsigned>(__builtin_popcountll(bits)); }

    void zeros_after_zeros(size_t words) {
        uint64_t before = 0;
        for (size_t i = 0; i < words; ++i) {
            run_[i] = zero_[i] & (zero_[i] << 1 | before);
            before = zero_[i] >> 63;
        }
    }

    void equal_bytes(const uint8_t* block, size_t size, unsigned offset) {
        const size_t whole = size / 64;
        for (size_t i = 1; i < whole; ++i) run_[i] = equal_of_64(block + 64 * i, offset);
        few_equal_bytes(block, 0, size < 64 ? size : 64, offset);
        if (whole > 0 && size % 64) few_equal_bytes(block, 64 * whole, size, offset);
    }
    void few_equal_bytes(const uint8_t* block, size_t from, size_t to, unsigned offset) {
        uint64_t mask = 0;
        for (size_t i = from < offset ? offset : from; i < to; ++i)
            mask |= static_cast<uint64_t>(block[i] == block[i - offset]) << i % 64;
        run_[from / 64] = mask;
    }

    // Where runs of at least LEAST begin, and LEAST - 1 before where they end, in turn; how many such places.
    template <unsigned LEAST>
    size_t find_edges(size_t words) {
        uint32_t* to = edges_;
        uint64_t before = 0;
        for (size_t i = 0; i < words; ++i) {
            uint64_t run = run_[i];
            for (unsigned j = 1; j < LEAST; ++j) run &= run_[i] >> j | run_[i + 1] << (64 - j);
            uint64_t edge = run ^ (run << 1 | before);
            before = run >> 63;
            const uint32_t base = static_cast<uint32_t>(64 * i);
            const unsigned edges = count(edge);
            for (unsigned j = 0; j < 4; ++j) put_lowest(edge, base, to + j);
            if (__builtin_expect(edges > 4, 0))
                for (unsigned j = 4; j < edges; ++j) put_lowest(edge, base, to + j);
            to += edges;
        }
        return static_cast<size_t>(to - edges_);
    }
    static void put_lowest(uint64_t& bits, uint32_t base, uint32_t* to) {
        *to = base + static_cast<uint32_t>(__builtin_ctzll(bits | uint64_t{1} << 63));
        bits &= bits - 1;
    }

    void take(const uint8_t* block, size_t size, size_t runs, uint32_t beyond) {
        std::memset(literal_counts, 0, sizeof literal_counts);
        std::memset(match_counts, 0, sizeof match_counts);
        uint32_t at = 0;
        uint8_t* to = literals;
        for (size_t i = 0; i < runs; ++i) {
            const uint32_t begin = edges_[2 * i], end = edges_[2 * i + 1] + beyond;
            const uint32_t length = begin - at, less_3 = end - begin - 3;
            if (at + 16 <= size && length <= 16)
                std::memcpy(to, block + at, 16);
            else
                std::memcpy(to, block + at, length);
            to += length;
            at = end;
            literal_lengths[i] = length;
            match_lengths[i] = less_3;
            ++literal_counts[literal_codes[i] = static_cast<uint8_t>(literal_code(length))];
            ++match_counts[match_codes[i] = static_cast<uint8_t>(match_code(less_3))];
        }
        std::memcpy(to, block + at, size - at);
        matches = static_cast<uint32_t>(runs);
        literal_bytes = static_cast<uint32_t>(to - literals + static_cast<ptrdiff_t>(size - at));
    }
};

}  // namespace midstream
