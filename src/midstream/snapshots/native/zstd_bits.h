// Bits for zstd streams, and how many of them a symbol is worth.
//
// Always holds: a BitWriter holds fewer than 8 bits after `flush`, and `flush` stores 8 bytes at its place, of which only
// the whole bytes count: whoever gives it memory leaves 8 bytes after the last. Little-endian machines only, like zstd's bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace midstream {

constexpr unsigned COST_BITS = 8;  // costs are in 1/256 bit

static inline unsigned floor_log2(uint32_t x) { return 31 - static_cast<unsigned>(__builtin_clz(x)); }

struct Log2Table {
    uint16_t of[256];
    Log2Table() {
        for (unsigned i = 0; i < 256; ++i) of[i] = static_cast<uint16_t>(__builtin_log2(1 + i / 256.0) * 256 + 0.5);
    }
};
inline const Log2Table LOG2;

// log2(x) in 1/256 bit, for x >= 1; at most 2/256 off.
static inline uint32_t log2_cost(uint32_t x) {
    const unsigned high = floor_log2(x);
    return (high << COST_BITS) + LOG2.of[((static_cast<uint64_t>(x) << 8) >> high) & 255];
}

class BitWriter {
  public:
    explicit BitWriter(uint8_t* to) : begin_(to), at_(to) {}

    // The low `count` bits of `value`. At most 57 bits between two flushes.
    void add(uint64_t value, unsigned count) {
        held_ |= (value & ((uint64_t{1} << count) - 1)) << bits_;
        bits_ += count;
    }
    // The same for a value without bits above `count`.
    void add_clean(uint64_t value, unsigned count) {
        held_ |= value << bits_;
        bits_ += count;
    }
    void flush() {
        std::memcpy(at_, &held_, 8);
        at_ += bits_ >> 3;
        held_ >>= bits_ & ~7u;
        bits_ &= 7;
    }
    // Pads with zeros to a whole byte; the bytes written so far.
    size_t close() {
        flush();
        at_ += bits_ != 0;
        bits_ = 0;
        held_ = 0;
        return static_cast<size_t>(at_ - begin_);
    }
    // The end mark of a stream that is read from its end, then as `close`.
    size_t close_backward() {
        add(1, 1);
        return close();
    }

  private:
    uint8_t *begin_, *at_;
    uint64_t held_ = 0;
    unsigned bits_ = 0;
};

}  // namespace midstream
