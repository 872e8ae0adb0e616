// FSE, zstd's entropy code of fractional bits: counts to probabilities, their description, tables, and states (RFC 8878, 4.1).
//
// Always holds: probabilities sum to 2^log, and every symbol that was counted has one; a table made from them is what a
// decoder makes from the description. At most 64 symbols, log at most 9.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "zstd_bits.h"

namespace midstream {

class FseCoder {
  public:
    static constexpr unsigned SYMBOLS = 64, MAX_LOG = 9;
    static constexpr uint32_t NEVER = 1u << 30;  // the cost of a symbol that it cannot code

    unsigned log = 0, used = 0;  // `used`: one more than its highest symbol

    // The log that n symbols are worth, the highest of them `used` - 1.
    static unsigned log_for(uint32_t n, unsigned used, unsigned most) {
        const unsigned by_count = n > 8 ? floor_log2(n - 1) - 2 : 1, needed = floor_log2(used) + 1;
        return std::min(most, std::max({by_count, needed, 5u}));
    }

    // Tables for these counts, of which at least two are not zero; 2^log_ is at least as many as they are.
    void fit(const uint32_t* counts, unsigned used_, uint32_t total, unsigned log_) {
        int16_t share[SYMBOLS];
        const int size = 1 << log_;
        int left = size;
        unsigned largest = 0;
        for (unsigned s = 0; s < used_; ++s) {
            const uint64_t scaled = (static_cast<uint64_t>(counts[s]) << (log_ + 1)) / total;
            share[s] = counts[s] == 0 ? 0 : static_cast<int16_t>(std::max<uint64_t>(1, (scaled + 1) >> 1));
            left -= share[s];
            if (counts[s] > counts[largest]) largest = s;
        }
        if (left > 0) share[largest] = static_cast<int16_t>(share[largest] + left);
        for (; left < 0; ++left) --share[cheapest_to_lower(counts, share, used_)];
        set(share, used_, log_);
    }

    // Tables for given probabilities; -1 is one "less than 1".
    void set(const int16_t* share, unsigned used_, unsigned log_) {
        log = log_;
        used = used_;
        std::memcpy(share_, share, used_ * sizeof share[0]);
        spread();
        transforms();
    }

    // One symbol that costs nothing (zstd's RLE mode).
    void set_single(unsigned symbol) {
        log = 0;
        used = symbol + 1;
        steps_[symbol] = {0, 0};
        states_[0] = states_[1] = 0;
    }

    // Bits, in 1/256, that these counts cost; NEVER or more when one of them has no code.
    uint32_t cost(const uint32_t* counts, unsigned count) const {
        uint64_t sum = 0;
        for (unsigned s = 0; s < count; ++s) {
            if (counts[s] == 0) continue;
            if (s >= used || share_[s] == 0) return NEVER;
            sum += static_cast<uint64_t>(counts[s]) * cost_[s];
        }
        return static_cast<uint32_t>(std::min<uint64_t>(sum, NEVER));
    }

    // The description into `to`, at most 2 bytes a symbol and 8 more; its bytes.
    size_t describe(uint8_t* to) const {
        BitWriter bits(to);
        bits.add(log - 5, 4);
        int remaining = (1 << log) + 1, threshold = 1 << log;
        unsigned width = log + 1;
        for (unsigned s = 0; s < used && remaining > 1;) {
            int value = share_[s++] + 1;
            const int most = 2 * threshold - 1 - remaining;
            const bool zero = value == 1;
            remaining -= value == 0 ? 1 : value - 1;
            if (value >= threshold) value += most;
            bits.add(static_cast<uint64_t>(value), width - (value < most));
            while (remaining < threshold) --width, threshold >>= 1;
            bits.flush();
            if (zero) s = describe_zeros(bits, s);
        }
        return bits.close();
    }

    uint32_t first_state(unsigned symbol) const {
        const Step step = steps_[symbol];
        const uint32_t count = (step.bits + (1u << 15)) >> 16;
        return states_[static_cast<int32_t>(((count << 16) - step.bits) >> count) + step.from];
    }
    // Writes what leads from the next symbol's state to `symbol`'s.
    uint32_t next_state(uint32_t state, unsigned symbol, BitWriter& bits) const {
        const Step step = steps_[symbol];
        const uint32_t count = (state + step.bits) >> 16;
        bits.add(state, count);
        return states_[static_cast<int32_t>(state >> count) + step.from];
    }
    void last_state(uint32_t state, BitWriter& bits) const { bits.add(state, log); }

  private:
    struct Step {
        uint32_t bits;  // (number of bits << 16) less the state from which on it is that number
        int32_t from;   // where the symbol's states begin, less its share
    };

    static unsigned cheapest_to_lower(const uint32_t* counts, const int16_t* share, unsigned used_) {
        unsigned best = 0;
        uint64_t best_loss = UINT64_MAX;
        for (unsigned s = 0; s < used_; ++s) {
            if (share[s] < 2) continue;
            const uint64_t loss = (static_cast<uint64_t>(counts[s]) << 16) / static_cast<unsigned>(2 * share[s] - 1);
            if (loss < best_loss) best = s, best_loss = loss;
        }
        return best;
    }

    unsigned describe_zeros(BitWriter& bits, unsigned s) const {
        unsigned zeros = 0;
        for (; s < used && share_[s] == 0; ++s) ++zeros;
        for (; zeros >= 3; zeros -= 3) {
            bits.add(3, 2);
            bits.flush();
        }
        bits.add(zeros, 2);
        bits.flush();
        return s;
    }

    void spread() {
        const uint32_t size = 1u << log, mask = size - 1, step = (size >> 1) + (size >> 3) + 3;
        uint8_t symbols[1 << MAX_LOG];
        uint16_t begin[SYMBOLS + 1];
        uint32_t end = size, at = 0;
        begin[0] = 0;
        for (unsigned s = 0; s < used; ++s) {
            begin[s + 1] = static_cast<uint16_t>(begin[s] + (share_[s] < 0 ? 1 : share_[s]));
            if (share_[s] < 0) symbols[--end] = static_cast<uint8_t>(s);
        }
        for (unsigned s = 0; s < used; ++s)
            for (int i = 0; i < share_[s]; ++i) {
                symbols[at] = static_cast<uint8_t>(s);
                do at = (at + step) & mask;
                while (at >= end);
            }
        for (uint32_t i = 0; i < size; ++i) states_[begin[symbols[i]]++] = static_cast<uint16_t>(size + i);
    }

    void transforms() {
        int32_t total = 0;
        for (unsigned s = 0; s < used; ++s) {
            const int32_t share = share_[s] < 0 ? 1 : share_[s];
            if (share == 0) continue;
            const uint32_t most = share == 1 ? log : log - floor_log2(static_cast<uint32_t>(share - 1));
            steps_[s] = {(most << 16) - (static_cast<uint32_t>(share) << most), total - share};
            cost_[s] = static_cast<uint16_t>((log << COST_BITS) - log2_cost(static_cast<uint32_t>(share)));
            total += share;
        }
    }

    Step steps_[SYMBOLS];
    uint16_t states_[1 << MAX_LOG];
    int16_t share_[SYMBOLS];
    uint16_t cost_[SYMBOLS];
};

}  // namespace midstream
