// What a zstd decoder reads before the data itself: bit streams, FSE tables, Huffman tables (RFC 8878, sections 4 and 5).
//
// Owns: BackwardBits, FseTable, Huffman and the fixed code tables.
// Always holds: nothing is read outside the bytes a reader was given, whatever they say; a table that is built is complete, so
// every state leads to a state and every Huffman index to a symbol; a refused description leaves `false`.

#pragma once

#include <cstdint>
#include <cstring>

namespace midstream {

static inline uint64_t load64(const uint8_t* from) {
    uint64_t value;
    memcpy(&value, from, 8);
    return value;
}

static inline int highest_bit(uint32_t value) { return 31 - __builtin_clz(value); }

// A stream written forwards and read from its end. Reading past its beginning gives zeros and is seen by `overread`.
class BackwardBits {
  public:
    bool start(const uint8_t* begin, size_t size) {
        if (size == 0 || begin[size - 1] == 0) return false;
        begin_ = begin;
        const unsigned padding = 8 - highest_bit(begin[size - 1]);  // the marking bit and the zeros above it
        if (size >= 8) {
            at_ = begin + size - 8;
            container_ = load64(at_);
            used_ = padding;
        } else {
            at_ = begin;
            container_ = 0;
            for (size_t i = 0; i < size; i++) container_ |= uint64_t(begin[i]) << (8 * i);
            used_ = padding + 8 * unsigned(8 - size);
        }
        return true;
    }

    // At least 57 bits are at hand afterwards, as long as the stream has them.
    void refill() {
        if (used_ > 64) return;
        const size_t whole = used_ >> 3, room = size_t(at_ - begin_);
        const size_t back = whole < room ? whole : room;
        if (back == 0) return;
        at_ -= back;
        used_ -= unsigned(back * 8);
        container_ = load64(at_);  // `at_` moved, so the stream has 8 bytes
    }

    // Whether `refill_inside` may be called twice.
    bool far_inside() const { return at_ - begin_ >= 16; }

    // As `refill`, when at most 64 bits were taken since the last one and the stream's beginning is not near.
    void refill_inside() {
        at_ -= used_ >> 3;
        used_ &= 7;
        container_ = load64(at_);
    }

    uint64_t peek(unsigned count) const { return used_ >= 64 ? 0 : (container_ << used_) >> 1 >> (63 - count); }
    void skip(unsigned count) { used_ += count; }
    uint64_t take(unsigned count) {
        const uint64_t value = peek(count);
        skip(count);
        return value;
    }
    bool overread() const { return used_ > 64; }
    bool finished() const { return used_ == 64 && at_ == begin_; }

  private:
    const uint8_t* begin_ = nullptr;
    const uint8_t* at_ = nullptr;
    uint64_t container_ = 0;
    unsigned used_ = 0;
};

struct FseEntry {
    uint32_t base;   // of the value this symbol stands for
    uint16_t next;   // first of the states that may follow
    uint8_t bits;    // that choose among them
    uint8_t extra;   // bits to add to `base`
};

static const int MAX_TABLE_LOG = 9;

// Reads the normalised counts of an FSE table; the bytes used, or 0 when the description is no good.
static inline size_t read_counts(const uint8_t* from, size_t size, int max_symbol, int max_log, int16_t* counts,
                                 int* symbols, int* table_log) {
    uint64_t position = 0;  // in bits
    const uint64_t end = uint64_t(size) * 8;
    auto peek = [&](unsigned count) {
        uint64_t value = 0;
        for (size_t i = 0, byte = position / 8; i < 5 && byte + i < size; i++) value |= uint64_t(from[byte + i]) << (8 * i);
        return uint32_t(value >> (position % 8)) & ((1u << count) - 1);
    };
    const int log = int(peek(4)) + 5;
    position += 4;
    if (size == 0 || log > max_log) return 0;
    int remaining = (1 << log) + 1, threshold = 1 << log, bits = log + 1, symbol = 0;
    while (remaining > 1) {
        if (symbol > max_symbol || position > end) return 0;
        const int small = 2 * threshold - 1 - remaining;
        int count = int(peek(unsigned(bits)));
        if ((count & (threshold - 1)) < small) {
            count &= threshold - 1;
            position += unsigned(bits - 1);
        } else {
            if (count >= threshold) count -= small;
            position += unsigned(bits);
        }
        count--;
        remaining -= count < 0 ? -count : count;
        if (remaining < 1) return 0;
        counts[symbol++] = int16_t(count);
        if (count == 0) {
            uint32_t zeros;
            do {
                if (position > end) return 0;
                zeros = peek(2);
                position += 2;
                for (uint32_t i = 0; i < zeros; i++) {
                    if (symbol > max_symbol) return 0;
                    counts[symbol++] = 0;
                }
            } while (zeros == 3);
        }
        while (remaining < threshold) {
            bits--;
            threshold >>= 1;
        }
    }
    if (position > end) return 0;
    *symbols = symbol;
    *table_log = log;
    return size_t((position + 7) / 8);
}

struct FseTable {
    int log = -1;  // -1: none yet
    FseEntry entries[1 << MAX_TABLE_LOG];

    // bases, extras: what a symbol stands for; null: for itself.
    bool build(const int16_t* counts, int symbols, int table_log, const uint32_t* bases, const uint8_t* extras) {
        uint8_t symbol_of[1 << MAX_TABLE_LOG];
        uint16_t following[256];
        const int size = 1 << table_log, mask = size - 1, step = (size >> 1) + (size >> 3) + 3;
        int high = size, total = 0;
        for (int s = 0; s < symbols; s++) total += counts[s] < 0 ? 1 : counts[s];
        if (total != size) return false;
        for (int s = 0; s < symbols; s++) {
            following[s] = counts[s] < 0 ? 1 : uint16_t(counts[s]);
            if (counts[s] < 0) symbol_of[--high] = uint8_t(s);
        }
        int position = 0;
        for (int s = 0; s < symbols; s++) {
            for (int i = 0; i < counts[s]; i++) {
                symbol_of[position] = uint8_t(s);
                do position = (position + step) & mask;
                while (position >= high && high > 0);
            }
        }
        for (int state = 0; state < size; state++) {
            const uint8_t s = symbol_of[state];
            const uint16_t number = following[s]++;
            const int bits = table_log - highest_bit(number);
            entries[state] = {bases ? bases[s] : s, uint16_t((number << bits) - size), uint8_t(bits),
                              extras ? extras[s] : uint8_t(0)};
        }
        log = table_log;
        return true;
    }

    void single(uint32_t base, uint8_t extra) {
        entries[0] = {base, 0, 0, extra};
        log = 0;
    }
};

struct Huffman {
    static const int MAX_BITS = 11;
    struct Entry {
        uint8_t symbol, bits;
    };
    int log = 0;  // 0: none yet
    Entry entries[1 << MAX_BITS];

    // The bytes of the description at `from`, or 0 when it is no good.
    size_t read(const uint8_t* from, size_t size) {
        log = 0;
        uint8_t weights[256];
        int count = 0;
        if (size == 0) return 0;
        const size_t head = from[0];
        size_t used;
        if (head >= 128) {
            count = int(head) - 127;
            used = 1 + size_t(count + 1) / 2;
            if (used > size) return 0;
            for (int i = 0; i < count; i++) weights[i] = i % 2 ? from[1 + i / 2] & 15 : from[1 + i / 2] >> 4;
        } else {
            used = 1 + head;
            if (used > size || !compressed_weights(from + 1, head, weights, &count)) return 0;
        }
        return build(weights, count) ? used : 0;
    }

  private:
    static bool compressed_weights(const uint8_t* from, size_t size, uint8_t* weights, int* count) {
        int16_t counts[13];
        int symbols, table_log;
        FseTable table;
        const size_t head = read_counts(from, size, 12, 6, counts, &symbols, &table_log);
        BackwardBits bits;
        if (head == 0 || head >= size || !table.build(counts, symbols, table_log, nullptr, nullptr)) return false;
        if (!bits.start(from + head, size - head)) return false;
        unsigned states[2];
        for (unsigned& state : states) state = unsigned(bits.take(unsigned(table_log)));
        if (bits.overread()) return false;
        for (int n = 0; n < 254; n++) {  // the last symbol's weight is not written
            bits.refill();
            const FseEntry entry = table.entries[states[n & 1]];
            weights[n] = uint8_t(entry.base);
            states[n & 1] = entry.next + unsigned(bits.take(entry.bits));
            if (bits.overread()) {
                weights[n + 1] = uint8_t(table.entries[states[(n + 1) & 1]].base);
                *count = n + 2;
                return true;
            }
        }
        return false;
    }

    bool build(uint8_t* weights, int count) {
        uint32_t total = 0;
        for (int i = 0; i < count; i++) {
            if (weights[i] > MAX_BITS) return false;
            total += weights[i] ? 1u << (weights[i] - 1) : 0;
        }
        if (total == 0) return false;
        const int bits = highest_bit(total) + 1;
        const uint32_t rest = (1u << bits) - total;
        if (bits > MAX_BITS || (rest & (rest - 1))) return false;
        weights[count++] = uint8_t(highest_bit(rest) + 1);
        uint32_t at = 0;
        for (int weight = 1; weight <= bits; weight++) {
            for (int symbol = 0; symbol < count; symbol++) {
                if (weights[symbol] != weight) continue;
                for (uint32_t n = 1u << (weight - 1); n; n--) entries[at++] = {uint8_t(symbol), uint8_t(bits + 1 - weight)};
            }
        }
        log = bits;
        return at == 1u << bits;
    }
};

static const uint32_t LENGTH_BASES[36] = {0,  1,  2,  3,  4,  5,  6,  7,   8,   9,   10,   11,   12,   13,   14,    15,    16,   18,
                                          20, 22, 24, 28, 32, 40, 48, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536};
static const uint8_t LENGTH_EXTRAS[36] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,  0,  0,  1,  1,
                                          1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
static const uint32_t MATCH_BASES[53] = {3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16,  17,  18,  19,   20,
                                         21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34,  35,  37,  39,   41,
                                         43, 47, 51, 59, 67, 83, 99, 131, 259, 515, 1027, 2051, 4099, 8195, 16387, 32771, 65539};
static const uint8_t MATCH_EXTRAS[53] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,  0,  0,  0,  0,  0,  0,
                                         0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
static const int16_t LENGTH_COUNTS[36] = {4, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1,  2,  2,
                                          2, 2, 2, 2, 2, 2, 2, 3, 2, 1, 1, 1, 1, 1, -1, -1, -1, -1};
static const int16_t MATCH_COUNTS[53] = {1, 4, 3, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1,  1,  1,  1,  1,  1,  1,  1,  1,  1,  1, 1,
                                         1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1};
static const int16_t OFFSET_COUNTS[29] = {1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1};

}  // namespace midstream
