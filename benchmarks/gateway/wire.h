// What the load generator and the mock replicas share: sockets, clocks, growing buffers, HTTP/1.1 framing.
// Always holds: no allocation per request once buffers have grown; every failure of the system ends the program with a message.

#ifndef WIRE_H
#define WIRE_H

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define EVENTS_MAX 256

static inline void die(const char *what) {
    perror(what);
    exit(1);
}

static inline uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static inline void *grown(void *old, size_t bytes) {
    void *made = realloc(old, bytes);
    if (made == NULL) die("realloc");
    return made;
}

static inline void all_descriptors(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
}

static inline void no_delay(int fd) {
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

static inline void watch(int epoll, int operation, int fd, uint32_t events, void *who) {
    struct epoll_event event = {.events = events, .data.ptr = who};
    if (epoll_ctl(epoll, operation, fd, &event) < 0) die("epoll_ctl");
}

// A timer that makes epoll_wait return at an absolute time; 0: never.
static inline void alarm_at(int timer, uint64_t at_ns) {
    struct itimerspec when = {0};
    when.it_value.tv_sec = (time_t)(at_ns / 1000000000ull);
    when.it_value.tv_nsec = (long)(at_ns % 1000000000ull);
    if (timerfd_settime(timer, TFD_TIMER_ABSTIME, &when, NULL) < 0) die("timerfd_settime");
}

static inline void alarm_read(int timer) {
    uint64_t fired;
    if (read(timer, &fired, sizeof fired) < 0 && errno != EAGAIN) die("timerfd");
}

// The body of a message: how long it is, and where its end is in what comes in.
enum framing { BY_LENGTH, BY_CHUNKS };
enum chunk_state { SIZE_LINE, DATA, DATA_END, TRAILER };

struct body {
    enum framing framing;
    enum chunk_state state;
    size_t left;        // of the body, or of the chunk
    size_t line;        // bytes of the size line or trailer so far
    int done;
};

// The headers that frame a message. `head` is not terminated; `length` includes the empty line.
// Returns whether a header `name` (lower case, with colon) is there; its value starts at *value.
static inline int header(const char *head, size_t length, const char *name, const char **value) {
    size_t n = strlen(name);
    const char *end = head + length, *line = memchr(head, '\n', length);
    while (line != NULL && ++line + n < end) {
        if (strncasecmp(line, name, n) == 0) {
            *value = line + n;
            while (**value == ' ') ++*value;
            return 1;
        }
        line = memchr(line, '\n', (size_t)(end - line));
    }
    return 0;
}

static inline struct body body_of(const char *head, size_t length) {
    struct body body = {0};
    const char *value;
    if (header(head, length, "content-length:", &value)) {
        body.left = strtoull(value, NULL, 10);
    } else if (header(head, length, "transfer-encoding:", &value)) {
        body.framing = BY_CHUNKS;
    }
    body.done = body.framing == BY_LENGTH && body.left == 0;
    return body;
}

// Read on in `data`. Data of the body is given to `take` (may be NULL) without its framing. Returns the bytes used; -1: not HTTP.
static inline ssize_t body_feed(struct body *body, const char *data, size_t length,
                                void (*take)(void *who, const char *data, size_t length), void *who) {
    size_t at = 0;
    while (at < length && !body->done) {
        if (body->framing == BY_LENGTH || body->state == DATA) {
            size_t part = length - at < body->left ? length - at : body->left;
            if (take != NULL) take(who, data + at, part);
            at += part;
            body->left -= part;
            if (body->left == 0) {
                if (body->framing == BY_LENGTH) body->done = 1;
                else body->state = DATA_END;
            }
            continue;
        }
        char c = data[at++];
        if (body->state == SIZE_LINE) {
            if (c == '\n') {
                if (body->line == 0) return -1;
                body->state = body->left ? DATA : TRAILER;
                body->line = 0;
            } else if (c != '\r') {
                int digit = c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
                if (digit < 0) return -1;
                body->left = body->left * 16 + (size_t)digit;
                body->line++;
            }
        } else if (body->state == DATA_END) {
            if (c == '\n') body->state = SIZE_LINE;
            else if (c != '\r') return -1;
        } else if (c == '\n') {
            if (body->line == 0) body->done = 1;
            body->line = 0;
        } else if (c != '\r') {
            body->line++;
        }
    }
    return (ssize_t)at;
}

#endif
