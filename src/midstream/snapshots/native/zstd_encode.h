// One tensor's difference as a zstd frame (RFC 8878), written for what differences are: runs of zeros between changed bytes.
//
// Owns: the frame, its blocks and their sections. zstd_runs.h finds the runs, zstd_huffman.h and zstd_fse.h code what is left.
// Always holds: a block is never longer than raw; no match reaches into an earlier block, so a decoder needs no more than
// one block and its window is 128 KiB; what a decoder would remember changes only with a block that is written.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "zstd_bits.h"
#include "zstd_fse.h"
#include "zstd_huffman.h"
#include "zstd_runs.h"

namespace midstream {

// A table that the next block may use again without its description.
template <class Table>
struct Kept {
    Table tables[2];
    unsigned now = 0;
    bool valid = false;
    size_t described = 24;  // bytes of the last description: a guess for the next

    Table& current() { return tables[now]; }
    Table& other() { return tables[1 - now]; }
};

class FrameEncoder {
  public:
    static constexpr size_t BLOCK = MOST_BYTES;

    explicit FrameEncoder(uint64_t content_size) : content_size_(content_size) {}

    // Appends 1 to BLOCK bytes. Errors: none but std::bad_alloc.
    void block(const uint8_t* difference, size_t size, bool last, std::vector<uint8_t>& out) {
        header(out);
        Work& work = work_of_this_thread();
        const size_t zeros = work.parsed.scan(difference, size);
        if (zeros == size) {
            block_header(last, 1, size, out);
            out.push_back(0);
            return;
        }
        const Runs runs = choose(work.parsed, difference, size, zeros);
        work.parsed.parse(difference, size, runs);
        const size_t written = compress(work, size, runs.offset);
        if (written < size) {
            block_header(last, 2, written, out);
            out.insert(out.end(), work.out, work.out + written);
        } else {
            block_header(last, 0, size, out);
            out.insert(out.end(), difference, difference + size);
        }
    }

    // The whole frame of no bytes.
    void empty(std::vector<uint8_t>& out) {
        header(out);
        block_header(true, 0, 0, out);
    }

  private:
    enum Mode : uint8_t { PREDEFINED = 0, SINGLE = 1, FRESH = 2, REPEAT = 3 };  // of a table for sequences

    struct Work {
        Parsed parsed;
        uint8_t out[MOST_BYTES + 8 * Parsed::MOST_MATCHES + 2048];
    };
    struct Coder {
        const FseCoder* fse;
        Mode mode;
        FseCoder own;

        // Bytes of its description, but for those of a fresh one.
        size_t use(const FseCoder& coder, Mode how) {
            fse = &coder;
            mode = how;
            return 0;
        }
        size_t use_single(unsigned code, uint8_t* to) {
            own.set_single(code);
            use(own, SINGLE);
            to[0] = static_cast<uint8_t>(code);
            return 1;
        }
    };

    uint64_t content_size_;
    bool begun_ = false;
    uint32_t offsets_[3] = {1, 4, 8};
    Kept<HuffmanCoder> huffman_;
    Kept<FseCoder> literal_lengths_, match_lengths_;

    static Work& work_of_this_thread() {
        static thread_local std::unique_ptr<Work> work;
        if (!work) work.reset(new Work);
        return *work;
    }

    void header(std::vector<uint8_t>& out) {
        if (begun_) return;
        begun_ = true;
        const unsigned bytes = content_size_ >> 32 ? 8 : 4;
        const uint8_t first[] = {0x28, 0xb5, 0x2f, 0xfd, static_cast<uint8_t>(bytes == 8 ? 0xc0 : 0x80), 7 << 3};
        out.insert(out.end(), first, first + sizeof first);
        for (unsigned i = 0; i < bytes; ++i) out.push_back(static_cast<uint8_t>(content_size_ >> 8 * i));
    }

    static void block_header(bool last, unsigned type, size_t size, std::vector<uint8_t>& out) {
        const size_t value = static_cast<size_t>(last) | type << 1 | size << 3;
        for (unsigned i = 0; i < 3; ++i) out.push_back(static_cast<uint8_t>(value >> 8 * i));
    }

    // Few changed bytes: runs of zeros, each after one that is a literal. Else what a part of the block is smallest with:
    // at offsets of a value's size its zeros need no literal, but a run ends where the changed byte comes again.
    static Runs choose(Parsed& parsed, const uint8_t* block, size_t size, size_t zeros) {
        constexpr Runs SPARSE = {1, 3}, OTHERS[] = {{1, 6}, {2, 3}, {4, 3}};
        constexpr size_t PART = 8192;
        if (8 * (size - zeros) < size) return SPARSE;
        const uint8_t* part = size > PART ? block + (size - PART) / 2 / 64 * 64 : block;
        const size_t part_size = size > PART ? PART : size;
        Runs best = SPARSE;
        parsed.scan(part, part_size);
        parsed.parse(part, part_size, SPARSE);
        uint64_t least = estimate(parsed);
        for (const Runs& runs : OTHERS) {
            parsed.parse(part, part_size, runs);
            const uint64_t cost = estimate(parsed);
            if (cost < least) best = runs, least = cost;
        }
        parsed.scan(block, size);
        return best;
    }

    // About what it takes, in 1/256 bit.
    static uint64_t estimate(const Parsed& parsed) {
        uint32_t counts[256];
        count_bytes(parsed.literals, parsed.literal_bytes, counts);
        uint64_t extra = 0;
        for (unsigned i = 0; i < LITERAL_CODES; ++i) extra += parsed.literal_counts[i] * LENGTH_EXTRAS[i];
        for (unsigned i = 0; i < MATCH_CODES; ++i) extra += parsed.match_counts[i] * MATCH_EXTRAS[i];
        const uint64_t literals = entropy(counts, 256, parsed.literal_bytes);
        const uint64_t least = static_cast<uint64_t>(parsed.literal_bytes) << COST_BITS;  // no code is shorter than a bit
        const uint64_t lengths = entropy(parsed.literal_counts, LITERAL_CODES, parsed.matches) +
            entropy(parsed.match_counts, MATCH_CODES, parsed.matches);
        return (extra << COST_BITS) + std::max(literals, least) + lengths;
    }

    // In 1/256 bit, of counts whose sum is `total`.
    static uint64_t entropy(const uint32_t* counts, unsigned size, uint32_t total) {
        uint64_t sum = 0;
        for (unsigned i = 0; i < size; ++i)
            if (counts[i]) sum += static_cast<uint64_t>(counts[i]) * log2_cost(counts[i]);
        const uint64_t all = total ? static_cast<uint64_t>(total) * log2_cost(total) : 0;
        return all > sum ? all - sum : 0;
    }

    static void count_bytes(const uint8_t* bytes, size_t size, uint32_t* counts) {
        uint32_t parts[4][256] = {};
        size_t i = 0;
        for (; i + 4 <= size; i += 4)
            for (unsigned j = 0; j < 4; ++j) ++parts[j][bytes[i + j]];
        for (; i < size; ++i) ++parts[0][bytes[i]];
        for (unsigned s = 0; s < 256; ++s) counts[s] = parts[0][s] + parts[1][s] + parts[2][s] + parts[3][s];
    }

    // The block's content into work.out; its bytes, or `size` when that would not be fewer.
    size_t compress(Work& work, size_t size, uint32_t offset) {
        const bool had_huffman = huffman_.valid;
        const unsigned which = huffman_.now;
        size_t at = write_literals(work.parsed, work.out);
        if (at < size) at += write_sequences(work.parsed, offset, size - at, work.out + at);
        if (at < size) return at;
        huffman_.valid = had_huffman;
        huffman_.now = which;
        return size;
    }

    static size_t put(uint64_t value, unsigned bytes, uint8_t* to) {
        std::memcpy(to, &value, 8);
        return bytes;
    }

    size_t write_literals(const Parsed& parsed, uint8_t* to) {
        const uint8_t* literals = parsed.literals;
        const size_t size = parsed.literal_bytes;
        uint32_t counts[256];
        count_bytes(literals, size, counts);
        if (size > 2 && counts[literals[0]] == size) {
            const size_t head = plain_header(1, size, to);
            to[head] = literals[0];
            return head + 1;
        }
        const size_t written = size > 8 ? write_coded(literals, size, counts, to) : 0;
        if (written) return written;
        const size_t head = plain_header(0, size, to);
        std::memcpy(to + head, literals, size);
        return head + size;
    }

    static size_t plain_header(unsigned type, size_t size, uint8_t* to) {
        if (size < 32) return put(type | size << 3, 1, to);
        if (size < 4096) return put(type | 1 << 2 | size << 4, 2, to);
        return put(type | 3 << 2 | size << 4, 3, to);
    }

    // 0 when that is not smaller than raw.
    size_t write_coded(const uint8_t* literals, size_t size, const uint32_t* counts, uint8_t* to) {
        uint8_t tree[512];
        size_t described = 0;
        const uint64_t again = huffman_.valid ? huffman_.current().cost(counts) : UINT64_MAX;
        const uint64_t at_least = entropy(counts, 256, static_cast<uint32_t>(size)) >> COST_BITS;
        uint64_t bits = again;
        if (again > at_least + 8 * huffman_.described) {
            HuffmanCoder& fresh = huffman_.other();
            fresh.fit(counts);
            const size_t bytes = fresh.describe(tree);
            const uint64_t cost = fresh.cost(counts);
            if (bytes != 0 && (again == UINT64_MAX || cost + 8 * bytes < again)) {
                described = bytes;
                bits = cost;
            }
        }
        const unsigned streams = size < 1024 ? 1 : 4;
        if (bits == UINT64_MAX || bits / 8 + described + 16 >= size) return 0;
        if (described) {
            huffman_.now = 1 - huffman_.now;
            huffman_.valid = true;
            huffman_.described = described;
        }
        const unsigned head = size < 1024 ? 3 : size < 16384 ? 4 : 5;
        std::memcpy(to + head, tree, described);
        const size_t coded = described + write_streams(literals, size, streams, to + head + described);
        const uint64_t type = described ? 2 : 3, width = head == 3 ? 10 : head == 4 ? 14 : 18;
        uint8_t field[8];
        put(type | (head == 3 ? 0 : head - 2) << 2 | size << 4 | coded << (4 + width), head, field);
        std::memcpy(to, field, head);
        return head + coded;
    }

    size_t write_streams(const uint8_t* literals, size_t size, unsigned streams, uint8_t* to) {
        const HuffmanCoder& huffman = huffman_.current();
        if (streams == 1) return huffman.encode(literals, size, to);
        const size_t part = (size + 3) / 4;
        size_t at = 6;
        for (size_t i = 0; i < 4; ++i) {
            const size_t bytes = huffman.encode(literals + i * part, i < 3 ? part : size - 3 * part, to + at);
            if (i < 3) {
                to[2 * i] = static_cast<uint8_t>(bytes);
                to[2 * i + 1] = static_cast<uint8_t>(bytes >> 8);
            }
            at += bytes;
        }
        return at;
    }

    // `room` or more when that is not enough.
    size_t write_sequences(const Parsed& parsed, uint32_t offset, size_t room, uint8_t* to) {
        const uint32_t count = parsed.matches;
        if (count == 0) {
            to[0] = 0;
            return 1;
        }
        size_t at = write_count(count, to);
        uint8_t* modes = to + at++;
        Coder literal, distance, match;
        at += choose_coder(parsed.literal_counts, LITERAL_CODES, count, predefined(0), literal_lengths_, literal, to + at);
        at += choose_offset_coder(offset, count, distance, to + at);
        at += choose_coder(parsed.match_counts, MATCH_CODES, count, predefined(1), match_lengths_, match, to + at);
        *modes = static_cast<uint8_t>(literal.mode << 6 | distance.mode << 4 | match.mode << 2);
        at += write_lengths(parsed, literal, distance, match, offset, to + at);
        if (at >= room) return room;
        keep(literal_lengths_, literal.mode);
        keep(match_lengths_, match.mode);
        use_offset(offset);
        return at;
    }

    static size_t write_count(uint32_t count, uint8_t* to) {
        if (count < 128) return put(count, 1, to);
        if (count < 0x7f00) return put(((count >> 8) + 128) | (count & 255) << 8, 2, to);
        return put(255 | (count - 0x7f00) << 8, 3, to);
    }

    static const FseCoder& predefined(unsigned which) {
        struct Tables {
            FseCoder fse[2];
            Tables() {
                fse[0].set(LENGTH_COUNTS, LITERAL_CODES, 6);
                fse[1].set(MATCH_COUNTS, MATCH_CODES, 6);
            }
        };
        static const Tables tables;
        return tables.fse[which];
    }

    // The cheapest table for these codes, described at `to`; the bytes of that.
    static size_t choose_coder(const uint32_t* counts, unsigned size, uint32_t total, const FseCoder& given,
        Kept<FseCoder>& kept, Coder& coder, uint8_t* to) {
        unsigned used = size;
        while (counts[used - 1] == 0) --used;
        const uint64_t by_given = given.cost(counts, used);
        const uint64_t again = kept.valid ? kept.current().cost(counts, used) : FseCoder::NEVER;
        if (counts[used - 1] == total && by_given >= 8 << COST_BITS) return coder.use_single(used - 1, to);
        if (counts[used - 1] == total) return coder.use(given, PREDEFINED);
        const uint64_t fresh = entropy(counts, used, total) + (8 * kept.described << COST_BITS);
        if (again <= fresh && again <= by_given) return coder.use(kept.current(), REPEAT);
        if (by_given <= fresh) return coder.use(given, PREDEFINED);
        kept.other().fit(counts, used, total, FseCoder::log_for(total, used, FseCoder::MAX_LOG));
        coder.use(kept.other(), FRESH);
        return kept.described = kept.other().describe(to);
    }

    static void keep(Kept<FseCoder>& kept, Mode mode) {
        if (mode == FRESH) kept.now = 1 - kept.now;
        kept.valid = mode == FRESH || mode == REPEAT;
    }

    // What the first match's offset is called: 1 to 3 for those used last, else itself and 3.
    uint32_t offset_value(uint32_t offset) const {
        for (uint32_t i = 0; i < 3; ++i)
            if (offsets_[i] == offset) return i + 1;
        return offset + 3;
    }
    void use_offset(uint32_t offset) {
        uint32_t i = 0;
        while (i < 2 && offsets_[i] != offset) ++i;
        for (; i > 0; --i) offsets_[i] = offsets_[i - 1];
        offsets_[0] = offset;
    }

    // All matches but the first repeat the offset before them: code 0.
    size_t choose_offset_coder(uint32_t offset, uint32_t count, Coder& coder, uint8_t* to) const {
        const unsigned code = floor_log2(offset_value(offset));
        if (code == 0 || count == 1) return coder.use_single(code, to);
        uint32_t counts[3] = {count - 1, 0, 0};
        counts[code] = 1;
        coder.own.fit(counts, code + 1, count, FseCoder::log_for(count, code + 1, 6));
        coder.use(coder.own, FRESH);
        return coder.own.describe(to);
    }

    // Last match first, as a decoder reads from the end.
    size_t write_lengths(const Parsed& parsed, const Coder& literal, const Coder& distance, const Coder& match,
        uint32_t offset, uint8_t* to) const {
        BitWriter bits(to);
        const FseCoder &of_literal = *literal.fse, &of_match = *match.fse, &of_distance = *distance.fse;
        const uint32_t value = offset_value(offset);
        const unsigned first_code = floor_log2(value);
        const bool distances = distance.mode != SINGLE;
        uint32_t i = parsed.matches - 1;
        uint32_t match_state = of_match.first_state(parsed.match_codes[i]);
        uint32_t distance_state = of_distance.first_state(i ? 0 : first_code);
        uint32_t literal_state = of_literal.first_state(parsed.literal_codes[i]);
        for (;;) {
            const unsigned literal_code = parsed.literal_codes[i], match_code = parsed.match_codes[i];
            bits.add(parsed.literal_lengths[i], LENGTH_EXTRAS[literal_code]);
            bits.add(parsed.match_lengths[i], MATCH_EXTRAS[match_code]);
            if (i == 0) break;
            bits.flush();
            --i;
            if (distances) distance_state = of_distance.next_state(distance_state, i ? 0 : first_code, bits);
            match_state = of_match.next_state(match_state, parsed.match_codes[i], bits);
            literal_state = of_literal.next_state(literal_state, parsed.literal_codes[i], bits);
        }
        bits.add(value, first_code);
        bits.flush();
        of_match.last_state(match_state, bits);
        of_distance.last_state(distance_state, bits);
        of_literal.last_state(literal_state, bits);
        return bits.close_backward();
    }
};

}  // namespace midstream
