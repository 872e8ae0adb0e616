// Differences of checkpoints, tensor by tensor: what arc2.py does with libraries, in one pass over each block and without the GIL.
//
// Owns: the C functions that library.py declares.
// Always holds: a function that returns an error leaves what it was given to be freed; no exception leaves.

#include <algorithm>
#include <cerrno>
#include <new>
#include <unistd.h>

#include "adler.h"
#include "zstd_decode.h"
#include "zstd_encode.h"

using namespace midstream;

namespace {

const size_t BLOCK = FrameDecoder::BLOCK;

// Errors of a step; a positive result is bytes of the tensor.
enum : int64_t { REFUSED = -1, ENDED_EARLY = -2, ERRNO = -1000 };  // ERRNO - errno: the disk's

int64_t read_all(int file, uint8_t* into, size_t size, int64_t position) {
    while (size) {
        const ssize_t count = pread(file, into, size, position);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) return ERRNO - errno;
        if (count == 0) return ENDED_EARLY;
        into += count, size -= size_t(count), position += count;
    }
    return 0;
}

int64_t write_all(int file, const uint8_t* from, size_t size, int64_t position) {
    while (size) {
        const ssize_t count = pwrite(file, from, size, position);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) return ERRNO - errno;
        from += count, size -= size_t(count), position += count;
    }
    return 0;
}

struct Rebuild {
    Rebuild(const uint8_t* blob, size_t size, size_t content)
        : frame(blob, size), left(content), bytes(new uint8_t[BLOCK + FrameDecoder::SLACK]()) {}

    // The next block rebuilt in `bytes`: its size, or an error. `from`: where its old bytes are.
    int64_t next(int old_file, int64_t from) {
        size_t size;
        if (frame.may_be_sparse()) {
            if (const int64_t error = read_all(old_file, bytes.get(), std::min(left, BLOCK), from)) return error;
            if (frame.next_onto(bytes.get(), &size)) {
                xor_and_sum<SumOf::ITSELF>(bytes.get(), nullptr, size, adler);
                left -= size;
                return int64_t(size);
            }
        }
        uint8_t* difference;
        if (!frame.next(&difference, &size)) return REFUSED;
        if (const int64_t error = read_all(old_file, bytes.get(), size, from)) return error;
        xor_and_sum<SumOf::RESULT>(bytes.get(), difference, size, adler);
        left -= size;
        return int64_t(size);
    }

    FrameDecoder frame;
    size_t left;
    Adler adler;
    std::unique_ptr<uint8_t[]> bytes;
};

struct Encode {
    explicit Encode(uint64_t size) : frame(size), difference(new uint8_t[BLOCK]) {}
    FrameEncoder frame;
    Adler adler;
    bool changed = false;
    std::unique_ptr<uint8_t[]> difference;
    std::vector<uint8_t> blob;
};

}  // namespace

extern "C" {

// Null: a blob of a kind not known here, or no memory.
Rebuild* delta_rebuild_new(const uint8_t* blob, int64_t size, int64_t content) try {
    Rebuild* const made = new Rebuild(blob, size_t(size), size_t(content));
    if (made->frame.start(uint64_t(content))) return made;
    delete made;
    return nullptr;
} catch (const std::bad_alloc&) {
    return nullptr;
}

// About `count` more bytes of the tensor: read at `from` in `old_file`, XORed, summed, and written at `to` in `new_file` unless that is -1.
int64_t delta_rebuild_step(Rebuild* work, int old_file, int64_t from, int new_file, int64_t to, int64_t count) {
    int64_t done = 0;
    while (done < count && !work->frame.finished()) {
        const int64_t size = work->next(old_file, from + done);
        if (size < 0) return size;
        if (new_file >= 0)
            if (const int64_t error = write_all(new_file, work->bytes.get(), size_t(size), to + done)) return error;
        done += size;
    }
    return done;
}

// Whether the blob was decoded to its end and held what it should.
int delta_rebuild_complete(const Rebuild* work) { return work->frame.complete(); }
uint32_t delta_rebuild_sum(const Rebuild* work) { return work->adler.value(); }
void delta_rebuild_free(Rebuild* work) { delete work; }

// Null: no memory.
Encode* delta_encode_new(int64_t size) try {
    return new Encode(uint64_t(size));
} catch (const std::bad_alloc&) {
    return nullptr;
}

// The next `count` bytes, at `from` in `old_file` and at `bytes`: whole blocks of 128 KiB, but for the tensor's last.
int64_t delta_encode_step(Encode* work, int old_file, int64_t from, const uint8_t* bytes, int64_t count, int last) try {
    for (int64_t done = 0; done < count; done += int64_t(BLOCK)) {
        const size_t size = size_t(count - done) < BLOCK ? size_t(count - done) : BLOCK;
        if (const int64_t error = read_all(old_file, work->difference.get(), size, from + done)) return error;
        if (xor_and_sum<SumOf::OTHER>(work->difference.get(), bytes + done, size, work->adler)) work->changed = true;
        work->frame.block(work->difference.get(), size, last && done + int64_t(size) == count, work->blob);
    }
    return count;
} catch (const std::bad_alloc&) {
    return ERRNO - ENOMEM;
}

const uint8_t* delta_encode_blob(const Encode* work, int64_t* size, uint32_t* sum, int* changed) {
    *size = int64_t(work->blob.size());
    *sum = work->adler.value();
    *changed = work->changed;
    return work->blob.data();
}
void delta_encode_free(Encode* work) { delete work; }

}  // extern "C"
