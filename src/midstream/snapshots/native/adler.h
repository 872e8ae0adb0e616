// XOR and Adler-32 (RFC 1950) in one pass over bytes that are in the core's cache.
//
// Owns: xor_and_sum.
// Always holds: the sums are those of zlib's adler32, whatever the size; nothing beyond `size` is read or written.

#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace midstream {

struct Adler {
    uint32_t low = 1, high = 0;
    uint32_t value() const { return high << 16 | low; }
};

static const uint32_t ADLER_MODULUS = 65521;
static const size_t ADLER_CHUNK = 5536;  // the most 32-byte rows whose sums fit in 32 bits

// What the checksum is of: the result of the XOR (a rebuild), `other` (an encode), or the bytes as they are, without an XOR.
enum class SumOf { RESULT, OTHER, ITSELF };

// into ^= other (null for ITSELF); the sum goes on over what SUM says. Returns whether any byte of the result is not zero.
template <SumOf SUM>
static bool xor_and_sum(uint8_t* into, const uint8_t* other, size_t size, Adler& adler) {
    uint32_t low = adler.low, high = adler.high;
    bool any = false;
    for (size_t start = 0; start < size; start += ADLER_CHUNK) {
        const size_t count = size - start < ADLER_CHUNK ? size - start : ADLER_CHUNK;
        size_t i = 0;
#if defined(__AVX2__)
        const __m256i zero = _mm256_setzero_si256(), ones = _mm256_set1_epi16(1);
        const __m256i weights = _mm256_setr_epi8(32, 31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13,
                                                 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1);
        __m256i sums = zero, before = zero, weighted = zero, seen = zero;
        for (; i + 32 <= count; i += 32) {
            __m256i* const at = reinterpret_cast<__m256i*>(into + start + i);
            __m256i result = _mm256_loadu_si256(at), with = zero;
            if (SUM != SumOf::ITSELF) {
                with = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(other + start + i));
                result = _mm256_xor_si256(result, with);
                _mm256_storeu_si256(at, result);
            }
            const __m256i bytes = SUM == SumOf::OTHER ? with : result;
            seen = _mm256_or_si256(seen, result);
            before = _mm256_add_epi32(before, sums);
            sums = _mm256_add_epi32(sums, _mm256_sad_epu8(bytes, zero));
            weighted = _mm256_add_epi32(weighted, _mm256_madd_epi16(_mm256_maddubs_epi16(bytes, weights), ones));
        }
        any = any || !_mm256_testz_si256(seen, seen);
        alignas(32) uint32_t s[8], b[8], w[8];
        _mm256_store_si256(reinterpret_cast<__m256i*>(s), sums);
        _mm256_store_si256(reinterpret_cast<__m256i*>(b), before);
        _mm256_store_si256(reinterpret_cast<__m256i*>(w), weighted);
        uint64_t all = 0, rows = 0, weight = 0;
        for (int lane = 0; lane < 8; lane++) all += s[lane], rows += b[lane], weight += w[lane];
        high = uint32_t((high + uint64_t(low) * i + 32 * rows + weight) % ADLER_MODULUS);
        low = uint32_t((low + all) % ADLER_MODULUS);
#endif
        uint32_t plain = 0;
        for (; i < count; i++) {
            const uint8_t with = SUM == SumOf::ITSELF ? 0 : other[start + i], result = into[start + i] ^ with;
            into[start + i] = result;
            plain |= result;
            low += SUM == SumOf::OTHER ? with : result;
            high += low;
        }
        any = any || plain;
        low %= ADLER_MODULUS;
        high %= ADLER_MODULUS;
    }
    adler = {low, high};
    return any;
}

}  // namespace midstream
