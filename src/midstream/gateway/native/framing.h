// Where a response's body stands in its framing and, if it is an event stream, in its events. It is never built, only read
// past; the lines that begin with ": m " are kept (what a replica says so that another one can go on with the stream).

#ifndef FRAMING_H
#define FRAMING_H

#include <cstring>
#include <string>

constexpr size_t LINE_BYTES_MAX = 16384;  // of a chunk's size line, and of all trailers
constexpr size_t MARKS_BYTES_MAX = 16u << 20;

class Framing {
  public:
    bool keeps_marks = false;
    bool lost_marks = false;  // there were too many to keep

    void begin_length(uint64_t length) {
        begin(false);
        left_ = length;
        state_ = length ? DATA : DONE;
    }
    void begin_chunks(bool events) {
        begin(events);
        chunked_ = true;
    }
    bool chunked() const { return chunked_; }
    bool events() const { return events_; }
    bool done() const { return state_ == DONE; }
    uint64_t left() const { return left_; }
    // The last byte read lies within a chunk: in its data, or before the line end after it.
    bool in_chunk() const { return chunked_ && (state_ == DATA || state_ == DATA_CR || state_ == DATA_LF || state_ == FAILED); }
    // Everything read is whole chunks of whole events.
    bool at_boundary() const { return state_ == DONE || (state_ == SIZE && digits_ == 0 && newlines_ >= 2); }
    std::string_view marks() const { return {marks_.data(), marks_kept_}; }  // of whole events
    void forget_marks() {
        std::string().swap(marks_);
        marks_kept_ = marks_before_ = 0;
    }
    // What was read last is not passed on: its marks were not told, and nobody knows where it would have stood.
    void fail() {
        if (!lost_marks) marks_kept_ = marks_before_;
        state_ = FAILED;
    }

    // Read on. Returns the bytes that belong to the message; -1: it is broken. *boundary: how many of them go to the last
    // boundary. What was read may be taken back, once, by fail().
    ptrdiff_t feed(const char *data, size_t length, size_t *boundary) {
        size_t at = 0;
        *boundary = 0;
        marks_before_ = marks_kept_;
        while (at < length && state_ != DONE) {
            if (state_ == DATA) {
                size_t part = length - at < left_ ? length - at : (size_t)left_;
                if (events_) read_events(data + at, part);
                at += part;
                left_ -= part;
                if (left_ == 0) state_ = chunked_ ? DATA_CR : DONE;
            } else if (!step(data[at++])) {
                return -1;
            }
            if (at_boundary()) {
                *boundary = at;
                marks_kept_ = marks_.size();
            }
        }
        return (ptrdiff_t)at;
    }

  private:
    enum State : unsigned char {
        SIZE, EXTENSION, SIZE_LF, DATA, DATA_CR, DATA_LF, TRAILER_START, TRAILER, TRAILER_LF, END_LF, DONE, FAILED
    };
    enum Line : unsigned char { START, COLON, SPACE, LETTER, MARK, OTHER };  // how much of ": m " a line has had

    State state_ = DONE;
    bool chunked_ = false, events_ = false;
    int digits_ = 0;
    size_t line_bytes_ = 0;
    uint64_t left_ = 0;
    int newlines_ = 2;
    Line line_ = START;
    std::string marks_;
    size_t marks_kept_ = 0, marks_before_ = 0;

    void begin(bool events) {
        state_ = SIZE;
        chunked_ = lost_marks = false;
        events_ = events;
        digits_ = 0;
        line_bytes_ = 0;
        left_ = 0;
        newlines_ = 2;
        line_ = START;
        marks_.clear();
        marks_kept_ = 0;
    }

    static int digit(char c) {
        if (c >= '0' && c <= '9') return c - '0';
        if (c >= 'a' && c <= 'f') return c - 'a' + 10;
        if (c >= 'A' && c <= 'F') return c - 'A' + 10;
        return -1;
    }
    static bool printable(char c) { return c == '\t' || ((unsigned char)c >= 0x20 && c != 0x7f); }

    // One byte of the framing itself. False: it is not in order.
    bool step(char c) {
        switch (state_) {
            case SIZE: {
                int value = digit(c);
                if (value >= 0) {
                    left_ = left_ * 16 + (uint64_t)value;
                    return ++digits_ <= 15;
                }
                if (digits_ == 0 || (c != ';' && c != '\r')) return false;
                state_ = c == '\r' ? SIZE_LF : EXTENSION;
                line_bytes_ = 0;
                return true;
            }
            case EXTENSION:
                if (c == '\r') state_ = SIZE_LF;
                else return printable(c) && ++line_bytes_ <= LINE_BYTES_MAX;
                return true;
            case SIZE_LF:
                digits_ = 0;
                state_ = left_ ? DATA : TRAILER_START;
                line_bytes_ = 0;
                return c == '\n';
            case DATA_CR:
                state_ = DATA_LF;
                return c == '\r';
            case DATA_LF:
                state_ = SIZE;
                return c == '\n';
            case TRAILER_START:
                state_ = c == '\r' ? END_LF : TRAILER;
                return c == '\r' || (printable(c) && c != ' ' && c != '\t' && c != ':' && ++line_bytes_ <= LINE_BYTES_MAX);
            case TRAILER:
                if (c == '\r') state_ = TRAILER_LF;
                else return printable(c) && ++line_bytes_ <= LINE_BYTES_MAX;
                return true;
            case TRAILER_LF:
                state_ = TRAILER_START;
                return c == '\n';
            case END_LF:
                state_ = DONE;
                return c == '\n';
            default:
                return false;
        }
    }

    void read_events(const char *data, size_t length) {
        size_t at = 0;
        while (at < length) {
            if (line_ == OTHER || line_ == MARK) {
                const char *found = (const char *)memchr(data + at, '\n', length - at);
                size_t end = found ? (size_t)(found - data) + 1 : length;
                if (line_ == MARK) keep(data + at, end - at);
                at = end;
                newlines_ = found ? 1 : 0;
                if (found) line_ = START;
                continue;
            }
            char c = data[at++];
            if (c == '\n') {
                newlines_ = line_ == START ? newlines_ + (newlines_ < 2) : 1;
                line_ = START;
            } else {
                newlines_ = 0;
                line_ = c == ": m "[line_] ? (Line)(line_ + 1) : OTHER;
            }
        }
    }

    void keep(const char *data, size_t length) {
        if (!keeps_marks || lost_marks) return;
        if (marks_.size() + length > MARKS_BYTES_MAX) {
            lost_marks = true;
            marks_.clear();
            marks_kept_ = 0;
            return;
        }
        marks_.append(data, length);
    }
};

#endif
