// Huffman codes of bytes: lengths from counts, their description, and the streams they make (RFC 8878, 4.2).
//
// Always holds: at least two bytes have a code, no code is longer than 11 bits, and the lengths fill the code space exactly.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "zstd_bits.h"
#include "zstd_fse.h"

namespace midstream {

class HuffmanCoder {
  public:
    static constexpr unsigned MAX_BITS = 11;

    // Codes for these 256 counts, at least two of them not zero.
    void fit(const uint32_t* counts) {
        uint16_t order[256];
        unsigned used = 0;
        std::memset(length_, 0, sizeof length_);
        for (unsigned s = 0; s < 256; ++s)
            if (counts[s]) order[used++] = static_cast<uint16_t>(s);
        std::sort(order, order + used, [counts](unsigned a, unsigned b) {
            return counts[a] != counts[b] ? counts[a] < counts[b] : a < b;
        });
        highest_ = 0;
        for (unsigned i = 0; i < used; ++i) highest_ = std::max<unsigned>(highest_, order[i]);
        measure(counts, order, used);
        limit(order, used);
        assign();
    }

    // Bits for these 256 counts; UINT64_MAX when a byte among them has no code.
    uint64_t cost(const uint32_t* counts) const {
        uint64_t bits = 0;
        bool missing = false;
        for (unsigned s = 0; s < 256; ++s) {
            bits += static_cast<uint64_t>(counts[s]) * length_[s];
            missing |= counts[s] != 0 && length_[s] == 0;
        }
        return missing ? UINT64_MAX : bits;
    }

    // The description into `to`, at most 160 bytes; its bytes, or 0 when zstd has none for it.
    size_t describe(uint8_t* to) const {
        uint8_t weights[256];
        for (unsigned s = 0; s < highest_; ++s) weights[s] = length_[s] ? static_cast<uint8_t>(bits_ + 1 - length_[s]) : 0;
        const size_t coded = describe_coded(to + 1, weights);
        const size_t direct = (highest_ + 1) / 2;
        if (coded != 0 && coded < 128 && (coded < direct || highest_ > 128)) {
            to[0] = static_cast<uint8_t>(coded);
            return 1 + coded;
        }
        if (highest_ > 128) return 0;
        weights[highest_] = 0;
        to[0] = static_cast<uint8_t>(127 + highest_);
        for (unsigned s = 0; s < highest_; s += 2) to[1 + s / 2] = static_cast<uint8_t>(weights[s] << 4 | weights[s + 1]);
        return 1 + direct;
    }

    // One stream of `size` bytes, 8 bytes beyond its end are overwritten; its bytes.
    size_t encode(const uint8_t* from, size_t size, uint8_t* to) const {
        BitWriter bits(to);
        size_t at = size;
        for (; at % 5; --at) put(bits, from[at - 1]);
        bits.flush();
        for (; at; at -= 5) {
            put(bits, from[at - 1]);
            put(bits, from[at - 2]);
            put(bits, from[at - 3]);
            put(bits, from[at - 4]);
            put(bits, from[at - 5]);
            bits.flush();
        }
        return bits.close_backward();
    }

  private:
    void put(BitWriter& bits, uint8_t byte) const { bits.add_clean(code_[byte] >> 8, code_[byte] & 255); }

    // Lengths of any size from counts in rising order: two queues, leaves and the nodes made of them.
    void measure(const uint32_t* counts, const uint16_t* order, unsigned used) {
        uint32_t weight[512];
        uint16_t parent[512];
        for (unsigned i = 0; i < used; ++i) weight[i] = counts[order[i]];
        unsigned leaf = 0, node = used;
        for (unsigned next = used; next < 2 * used - 1; ++next) {
            unsigned pick[2];
            for (unsigned& p : pick) p = leaf < used && (node >= next || weight[leaf] <= weight[node]) ? leaf++ : node++;
            weight[next] = weight[pick[0]] + weight[pick[1]];
            parent[pick[0]] = parent[pick[1]] = static_cast<uint16_t>(next);
        }
        uint8_t depth[512];
        depth[2 * used - 2] = 0;
        for (unsigned i = 2 * used - 2; i-- > 0;) {
            depth[i] = static_cast<uint8_t>(depth[parent[i]] + 1);
            if (i < used) length_[order[i]] = depth[i];
        }
    }

    // No length above MAX_BITS: the rarest give way, then what is free is given to the most frequent that it suits.
    void limit(const uint16_t* order, unsigned used) {
        int32_t space = 1 << MAX_BITS;
        for (unsigned i = 0; i < used; ++i) {
            uint8_t& length = length_[order[i]];
            length = std::min<uint8_t>(length, MAX_BITS);
            space -= 1 << (MAX_BITS - length);
        }
        while (space < 0) {
            unsigned pick = 0;
            for (unsigned i = 0; i < used; ++i) {
                const uint8_t length = length_[order[i]];
                if (length < MAX_BITS && (length_[order[pick]] == MAX_BITS || length > length_[order[pick]])) pick = i;
            }
            space += 1 << (MAX_BITS - ++length_[order[pick]]);
        }
        for (unsigned i = used; space > 0; i = i ? i : used) {
            uint8_t& length = length_[order[--i]];
            if (length > 1 && 1 << (MAX_BITS - length) <= space) space -= 1 << (MAX_BITS - length--);
        }
    }

    void assign() {
        unsigned of_length[MAX_BITS + 2] = {};
        bits_ = 0;
        for (unsigned s = 0; s <= highest_; ++s) {
            ++of_length[length_[s]];
            bits_ = std::max<unsigned>(bits_, length_[s]);
        }
        uint32_t next[MAX_BITS + 2], code = 0;
        for (unsigned length = bits_; length > 0; --length) {
            next[length] = code;
            code = (code + of_length[length]) >> 1;
        }
        for (unsigned s = 0; s <= highest_; ++s)
            code_[s] = length_[s] ? next[length_[s]]++ << 8 | length_[s] : 0;
    }

    // The weights as two FSE states in turn; 0 when all are equal or all different.
    size_t describe_coded(uint8_t* to, const uint8_t* weights) const {
        uint32_t counts[MAX_BITS + 1] = {};
        for (unsigned s = 0; s < highest_; ++s) ++counts[weights[s]];
        unsigned used = MAX_BITS + 1, most = 0;
        while (used > 0 && counts[used - 1] == 0) --used;
        for (uint32_t count : counts) most = std::max(most, count);
        if (most == highest_ || most < 2) return 0;
        FseCoder fse;
        fse.fit(counts, used, highest_, FseCoder::log_for(highest_, used, 6));
        const size_t head = fse.describe(to);
        BitWriter bits(to + head);
        unsigned at = highest_;
        uint32_t state[2];
        state[(at - 1) % 2] = fse.first_state(weights[at - 1]);
        state[at % 2] = fse.first_state(weights[at - 2]);
        for (at -= 2; at-- > 0;) {
            state[at % 2] = fse.next_state(state[at % 2], weights[at], bits);
            bits.flush();
        }
        fse.last_state(state[1], bits);
        fse.last_state(state[0], bits);
        return head + bits.close_backward();
    }

    uint32_t code_[256] = {};
    uint8_t length_[256] = {};
    unsigned highest_ = 0, bits_ = 0;
};

}  // namespace midstream
