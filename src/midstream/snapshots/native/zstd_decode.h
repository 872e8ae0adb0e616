// One zstd frame, decoded block by block into a window of its own, or XORed onto what it is the difference to (RFC 8878). The
// differences of checkpoints are long runs of zeros: repeating the last byte is what is made fast, and zeros change nothing.
//
// Owns: FrameDecoder.
// Always holds: whatever the blob says, nothing outside blob and window is read and nothing outside window and target written; a
// frame of a kind not known here (dictionary, checksum, large window, several frames) is refused, not guessed at. What it decodes is
// compared with a checksum by its caller, and what it refuses is decoded again by libzstd.

#pragma once

#include <memory>
#include <vector>

#include "zstd_tables.h"

namespace midstream {

class FrameDecoder {
  public:
    static const size_t BLOCK = 1 << 17;
    static const uint64_t LARGEST_WINDOW = 1 << 23;

    FrameDecoder(const uint8_t* blob, size_t size) : at_(blob), end_(blob + size) {}

    // The frame's header. content: the bytes it must hold.
    bool start(uint64_t content) {
        if (end_ - at_ < 6 || at_[0] != 0x28 || at_[1] != 0xb5 || at_[2] != 0x2f || at_[3] != 0xfd) return false;
        const unsigned flags = at_[4], size_kind = flags >> 6;
        const bool single = flags >> 5 & 1;
        if (flags & 0x1f) return false;  // unused and reserved bits, checksum, dictionary
        at_ += 5;
        uint64_t window = 0;
        if (!single) {
            const unsigned exponent = *at_ >> 3, mantissa = *at_ & 7;
            if (exponent > 13) return false;
            window = 1ull << (10 + exponent);
            window += window / 8 * mantissa;
            at_++;
        }
        const size_t size_bytes = size_kind == 0 ? size_t(single) : size_t(1) << size_kind;
        if (size_t(end_ - at_) < size_bytes) return false;
        uint64_t stated = 0;
        for (size_t i = 0; i < size_bytes; i++) stated |= uint64_t(at_[i]) << (8 * i);
        if (size_kind == 1) stated += 256;
        at_ += size_bytes;
        if (size_bytes && stated != content) return false;
        if (single) window = stated;
        if (window > LARGEST_WINDOW) return false;
        sparse_ = !single && window == BLOCK;  // as zstd_encode.h says: no match leaves its block
        left_ = content;
        window_ = size_t(window);
        limit_ = window_ < BLOCK ? window_ : BLOCK;
        capacity_ = 2 * (window_ > BLOCK ? window_ : BLOCK) + BLOCK;
        buffer_.reset(new uint8_t[capacity_ + SLACK]);
        literals_.reset(new uint8_t[BLOCK + SLACK]);
        return true;
    }

    // The next block: its bytes, valid until the next call. False: the blob is no good or not known here.
    bool next(uint8_t** piece, size_t* size) {
        Block block;
        if (!read_block(&block)) return false;
        make_room();
        uint8_t* const to = buffer_.get() + filled_;
        *size = block.length;
        if (block.kind == 0) memcpy(to, block.bytes, block.length);
        else if (block.kind == 1) memset(to, *block.bytes, block.length);
        else if (!compressed<false>(block.bytes, block.length, to, size)) return false;
        *piece = to;
        filled_ += *size;
        return take(block, *size);
    }

    // Whether the next block may be given to `next_onto`.
    bool may_be_sparse() const { return sparse_; }

    // XORs the next block, if all its matches are runs of zeros, onto `target` of BLOCK bytes and SLACK more. False: it was
    // something else; `target` is spoilt, and the block can be had by `next`. What is XORed is not in the window: a frame that
    // reaches back to it is refused by `next`.
    bool next_onto(uint8_t* target, size_t* size) {
        Block block;
        sparse_ = read_block(&block);
        if (!sparse_) return false;
        *size = block.length;
        if (block.kind == 0) {
            for (size_t i = 0; i < block.length; i++) target[i] ^= block.bytes[i];
        } else if (block.kind == 1) {
            if (*block.bytes)
                for (size_t i = 0; i < block.length; i++) target[i] ^= *block.bytes;
        } else {
            sparse_ = compressed<true>(block.bytes, block.length, target, size);
        }
        return sparse_ = sparse_ && take(block, *size);
    }

    static const size_t SLACK = 128;  // copies may write this much beyond their end

    bool finished() const { return last_; }
    bool complete() const { return last_ && at_ == end_ && left_ == 0; }

  private:
    struct Block {
        const uint8_t* bytes;
        size_t length, stored;
        unsigned kind;
        bool last;
    };

    bool read_block(Block* block) const {
        if (last_ || end_ - at_ < 3) return false;
        const uint32_t head = uint32_t(at_[0]) | uint32_t(at_[1]) << 8 | uint32_t(at_[2]) << 16;
        const size_t length = head >> 3;
        const unsigned kind = head >> 1 & 3;
        *block = {at_ + 3, length, kind == 1 ? 1 : length, kind, bool(head & 1)};
        return kind != 3 && length <= limit_ && size_t(end_ - block->bytes) >= block->stored;
    }

    // The block is done with, and made `made` bytes.
    bool take(const Block& block, size_t made) {
        if (made > left_) return false;
        last_ = block.last;
        at_ = block.bytes + block.stored;
        left_ -= made;
        return true;
    }

    void make_room() {
        if (capacity_ - filled_ >= BLOCK) return;
        const size_t keep = filled_ < window_ ? filled_ : window_;
        memmove(buffer_.get(), buffer_.get() + filled_ - keep, keep);
        filled_ = keep;
    }

    template <bool ONTO>
    bool compressed(const uint8_t* from, size_t size, uint8_t* to, size_t* made) {
        const uint8_t* const end = from + size;
        size_t literals;
        return read_literals(&from, end, &literals) && read_sequences<ONTO>(from, end, literals, to, made);
    }

    bool read_literals(const uint8_t** position, const uint8_t* end, size_t* count) {
        const uint8_t* from = *position;
        if (from == end) return false;
        const unsigned kind = from[0] & 3, format = from[0] >> 2 & 3;
        if (kind < 2) {  // as they are, or one byte repeated
            const size_t head = format == 1 ? 2 : format == 3 ? 3 : 1;
            if (size_t(end - from) < head) return false;
            uint32_t bits = 0;
            for (size_t i = 0; i < head; i++) bits |= uint32_t(from[i]) << (8 * i);
            *count = head == 1 ? bits >> 3 : bits >> 4;
            from += head;
            const size_t stored = kind == 0 ? *count : 1;
            if (*count > limit_ || size_t(end - from) < stored) return false;
            if (kind == 0) memcpy(literals_.get(), from, *count);
            else memset(literals_.get(), *from, *count);
            *position = from + stored;
            return true;
        }
        const size_t head = format < 2 ? 3 : format + 2;
        const unsigned bits = format < 2 ? 10 : format == 2 ? 14 : 18;
        if (size_t(end - from) < head) return false;
        uint64_t fields = 0;
        for (size_t i = 0; i < head; i++) fields |= uint64_t(from[i]) << (8 * i);
        *count = size_t(fields >> 4) & ((size_t(1) << bits) - 1);
        size_t stored = size_t(fields >> (4 + bits)) & ((size_t(1) << bits) - 1);
        from += head;
        if (*count > limit_ || stored > size_t(end - from)) return false;
        *position = from + stored;
        if (kind == 2) {
            const size_t table = huffman_.read(from, stored);
            if (table == 0) return false;
            from += table;
            stored -= table;
        }
        if (huffman_.log == 0) return false;
        return format == 0 ? one_stream(from, stored, *count) : four_streams(from, stored, *count);
    }

    bool one_stream(const uint8_t* from, size_t size, size_t count) {
        BackwardBits bits;
        if (!bits.start(from, size)) return false;
        decode_symbols(bits, literals_.get(), count);
        return bits.finished();
    }

    bool four_streams(const uint8_t* from, size_t size, size_t count) {
        if (size < 10 || count < 6) return false;
        size_t sizes[4], each = (count + 3) / 4;
        size_t first = 6;
        for (int i = 0; i < 3; i++) first += sizes[i] = size_t(from[2 * i]) | size_t(from[2 * i + 1]) << 8;
        if (first > size || 3 * each > count) return false;
        sizes[3] = size - first;
        BackwardBits bits[4];
        from += 6;
        for (int i = 0; i < 4; from += sizes[i++])
            if (!bits[i].start(from, sizes[i])) return false;
        uint8_t* const out = literals_.get();
        const size_t shortest = count - 3 * each;
        size_t done = 0;
        const Huffman::Entry* const table = huffman_.entries;
        const unsigned log = unsigned(huffman_.log);
        for (; done + 5 <= shortest; done += 5) {
            for (int i = 0; i < 4; i++) bits[i].refill();
            for (size_t n = 0; n < 5; n++) {
                for (int i = 0; i < 4; i++) {
                    const Huffman::Entry entry = table[bits[i].peek(log)];
                    out[size_t(i) * each + done + n] = entry.symbol;
                    bits[i].skip(entry.bits);
                }
            }
        }
        bool good = true;
        for (int i = 0; i < 4; i++) {
            decode_symbols(bits[i], out + size_t(i) * each + done, (i < 3 ? each : shortest) - done);
            good = good && bits[i].finished();
        }
        return good;
    }

    void decode_symbols(BackwardBits& bits, uint8_t* out, size_t count) {
        const unsigned log = unsigned(huffman_.log);
        for (size_t i = 0; i < count; i++) {
            bits.refill();
            const Huffman::Entry entry = huffman_.entries[bits.peek(log)];
            out[i] = entry.symbol;
            bits.skip(entry.bits);
        }
    }

    template <bool ONTO>
    bool read_sequences(const uint8_t* from, const uint8_t* end, size_t literals, uint8_t* to, size_t* made) {
        if (from == end) return false;
        uint32_t count = *from++;
        if (count >= 128) {
            const int more = count == 255 ? 2 : 1;
            if (end - from < more) return false;
            count = more == 1 ? ((count - 128) << 8) + from[0] : 0x7f00u + from[0] + (uint32_t(from[1]) << 8);
            from += more;
        }
        if (count == 0) {
            if (from != end) return false;
            put<ONTO>(to, literals_.get(), literals);
            *made = literals;
            return true;
        }
        if (from == end) return false;
        const unsigned modes = *from++;
        if (modes & 3) return false;
        static const OffsetCodes offsets;
        if (!table(modes >> 6, &from, end, lengths_, 35, 9, LENGTH_BASES, LENGTH_EXTRAS, LENGTH_COUNTS, 36, 6) ||
            !table(modes >> 4 & 3, &from, end, offsets_, 31, 8, offsets.bases, offsets.extras, OFFSET_COUNTS, 29, 5) ||
            !table(modes >> 2 & 3, &from, end, matches_, 52, 9, MATCH_BASES, MATCH_EXTRAS, MATCH_COUNTS, 53, 6))
            return false;
        BackwardBits bits;
        return bits.start(from, size_t(end - from)) && execute<ONTO>(bits, count, literals, to, made);
    }

    struct OffsetCodes {
        uint32_t bases[32];
        uint8_t extras[32];
        OffsetCodes() {
            for (int i = 0; i < 32; i++) bases[i] = 1u << i, extras[i] = uint8_t(i);
        }
    };

    static bool table(unsigned mode, const uint8_t** from, const uint8_t* end, FseTable& into, int max_symbol, int max_log,
                      const uint32_t* bases, const uint8_t* extras, const int16_t* usual, int usual_symbols, int usual_log) {
        if (mode == 0) return into.build(usual, usual_symbols, usual_log, bases, extras);
        if (mode == 3) return into.log >= 0;
        if (mode == 1) {
            if (*from == end || **from > max_symbol) return false;
            into.single(bases[**from], extras[**from]);
            ++*from;
            return true;
        }
        int16_t counts[64];
        int symbols, log;
        const size_t used = read_counts(*from, size_t(end - *from), max_symbol, max_log, counts, &symbols, &log);
        if (used == 0) return false;
        *from += used;
        return into.build(counts, symbols, log, bases, extras);
    }

    // Everything the loop changes is a local of its own, which the bytes it writes cannot alias.
    template <bool ONTO>
    bool execute(BackwardBits bits, uint32_t count, size_t literals, uint8_t* to, size_t* made) {
        const uint8_t* literal = literals_.get();
        const uint8_t* const literals_end = literal + literals;
        uint8_t *const begin = to, *const limit = to + limit_, *const buffer = buffer_.get();
        Recent recent = recent_;
        bool zero = false;  // the last byte: what a match at distance 1 repeats
        bits.refill();
        const FseEntry* length = lengths_.entries + bits.take(unsigned(lengths_.log));
        const FseEntry* offset = offsets_.entries + bits.take(unsigned(offsets_.log));
        const FseEntry* match = matches_.entries + bits.take(unsigned(matches_.log));
        for (; count; count--) {
            if (offset->extra > 24) return false;  // farther than any window allowed here
            const bool inside = bits.far_inside();
            inside ? bits.refill_inside() : bits.refill();
            const size_t far = offset->base + size_t(bits.take(offset->extra));
            const size_t run = match->base + size_t(bits.take(match->extra));
            const size_t plain = length->base + size_t(bits.take(length->extra));
            const size_t distance = recent.distance(far, plain);
            if (count > 1) {
                inside ? bits.refill_inside() : bits.refill();
                length = lengths_.entries + length->next + bits.take(length->bits);
                match = matches_.entries + match->next + bits.take(match->bits);
                offset = offsets_.entries + offset->next + bits.take(offset->bits);
            }
            if (plain > size_t(literals_end - literal) || plain + run > size_t(limit - to)) return false;
            put<ONTO>(to, literal, plain);
            literal += plain;
            to += plain;
            if (ONTO) {
                if (plain) zero = literal[-1] == 0;
                if (distance != 1 || !zero) return false;
            } else {
                if (distance - 1 >= size_t(to - buffer)) return false;  // 0 as well
                repeat(to, distance, run);
            }
            to += run;
        }
        const size_t rest = size_t(literals_end - literal);
        if (!bits.finished() || rest > size_t(limit - to)) return false;
        put<ONTO>(to, literal, rest);
        recent_ = recent;
        *made = size_t(to - begin) + rest;
        return true;
    }

    struct Recent {  // the last three distances, newest first
        size_t first = 1, second = 4, third = 8;

        // What a sequence's offset value means after so many literals.
        size_t distance(size_t value, size_t literals) {
            if (value == 1 && literals) return first;
            const size_t which = value > 3 ? 4 : value - 1 + (literals == 0);
            const size_t found = which == 4 ? value - 3 : which == 1 ? second : which == 2 ? third : first - 1;
            if (which != 1) third = second;
            second = first;
            return first = found;
        }
    };

    // Up to SLACK bytes more than asked are read, and written as they are or as anything: both buffers have room for them.
    template <bool ONTO>
    static void put(uint8_t* to, const uint8_t* from, size_t count) {
        if (ONTO) {
            for (size_t done = 0; done < count; done += 8) {
                const size_t left = count - done;
                const uint64_t kept = left >= 8 ? ~uint64_t(0) : (uint64_t(1) << (8 * left)) - 1;
                const uint64_t value = load64(to + done) ^ (load64(from + done) & kept);
                memcpy(to + done, &value, 8);
            }
            return;
        }
        memcpy(to, from, 16);
        if (count > 16) memcpy(to + 16, from + 16, count - 16);
    }

    static void repeat(uint8_t* to, size_t distance, size_t count) {
        if (distance == 1) {
            const uint8_t byte = to[-1];
            memset(to, byte, 64);
            memset(to + 64, byte, 64);
            if (count > 128) memset(to + 128, byte, count - 128);
            return;
        }
        const uint8_t* from = to - distance;
        if (distance >= 64) {
            for (size_t half = 0; half < 64; half += 32) memmove(to + half, from + half, 32);
            if (count > 64) copy_32(to + 64, from + 64, to + count);
            return;
        }
        const uint8_t* const end = to + count;
        for (size_t known = distance; known < 32 && to < end; to += known, known *= 2) memmove(to, from, 32);
        copy_32(to, from, end);
    }

    static void copy_32(uint8_t* to, const uint8_t* from, const uint8_t* end) {
        for (; to < end; to += 32, from += 32) memmove(to, from, 32);
    }

    const uint8_t* at_;
    const uint8_t* const end_;
    uint64_t left_ = 0;
    size_t window_ = 0, limit_ = 0, capacity_ = 0, filled_ = 0;
    bool last_ = false, sparse_ = false;
    Recent recent_;
    std::unique_ptr<uint8_t[]> buffer_, literals_;
    Huffman huffman_;
    FseTable lengths_, offsets_, matches_;
};

}  // namespace midstream
