// A connection and all of them; calls into Python; sending. What requests.h and relays.h stand on.

#ifndef CONNS_H
#define CONNS_H

#include <cerrno>
#include <cmath>
#include <ctime>
#include <memory>
#include <string>
#include <string_view>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>
#include <unordered_map>
#include <vector>

#include "abi.h"
#include "framing.h"
#include "heads.h"

namespace {

constexpr size_t READ_BYTES = 256 << 10;
constexpr size_t FIRST_READ_BYTES = 16 << 10;  // of a request: what is longer is read to where it stays
constexpr size_t HIGH_WATER = 64 << 10, LOW_WATER = 16 << 10;
constexpr size_t RESPONSE_HEAD_BYTES_MAX = 256 << 10;
constexpr size_t WHOLE_BYTES_MAX = 256 << 10;  // a response of known length up to this is passed on whole or not at all
constexpr size_t HELD_BYTES_MAX = 1 << 20;  // of an event that is not complete
constexpr size_t GRANT_BYTES = 256 << 10;
constexpr int EVENTS_MAX = 256;
constexpr size_t NAMES_MAX = 512;

struct Conn {
    int fd;
    PyObject *owner;  // the protocol
    const Rules *rules = nullptr;  // a client's, whose plain requests are read here
    enum { OPEN, CLOSING, DEAD } state = OPEN;
    bool ended = false;  // the other side sends no more
    bool paused = false, told_full = false, close_after = false, shut_after = false;
    bool raw = false;  // a client's: Python's parser is in the middle of a request
    int error = 0;
    uint32_t interest = EPOLLIN;
    std::string out;
    size_t out_at = 0;
    // of a request whose body is under way
    PyObject *target = nullptr, *first = nullptr, *lines = nullptr, *body = nullptr;
    char *body_at = nullptr;
    size_t body_length = 0, body_left = 0;
    size_t body_granted = 0;  // of what is left, so much may be read before Python is asked again
    // of a response before it is passed on
    std::string in;
    size_t needed = 0;  // bytes of `in` before anything can be done
    // of a relay
    Conn *client = nullptr;  // an upstream's: who gets the response
    Conn *upstream = nullptr;  // a client's: whose response it gets
    PyObject *sink = nullptr;
    std::string extra, held;
    bool begun = false, holds = false;
    Framing framing;

    Conn(int fd, PyObject *owner) : fd(fd), owner(owner) { Py_IncRef(owner); }
    ~Conn() {
        for (PyObject **object : {&owner, &target, &first, &lines, &body, &sink}) drop(*object);
    }
    size_t pending() const { return out.size() - out_at; }
};

struct Wire {
    int epoll;
    PyObject *lost, *failed;
    std::unordered_map<std::string, PyObject *> names;  // header names as objects, so that most requests make none
    std::vector<std::unique_ptr<Rules>> rules;
    std::vector<Conn *> conns;  // by descriptor
    std::vector<Conn *> dead;
    bool called = false;  // Python ran
    bool broken = false;  // an exception that is not for handling is set
    RequestHead request;
    ResponseHead response;
    char buffer[READ_BYTES];
    epoll_event events[EVENTS_MAX];
};

constexpr char CAPSULE[] = "midstream.wire";

Wire *wire_of(PyObject *self) { return (Wire *)PyCapsule_GetPointer(self, CAPSULE); }

double monotonic() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

PyObject *bytes(std::string_view text) { return PyBytes_FromStringAndSize(text.data(), (Py_ssize_t)text.size()); }

// Of text that is the same each time.
PyObject *word(const char *text) { return PyUnicode_InternFromString(text); }

struct Words {
    PyObject *data_received = word("data_received"), *raw_received = word("raw_received"),
             *request_begun = word("request_begun"), *body_grows = word("body_grows"), *request_received = word("request_received"),
             *eof_received = word("eof_received"), *pause_writing = word("pause_writing"),
             *resume_writing = word("resume_writing"), *relay_begun = word("relay_begun"), *relay_ended = word("relay_ended"),
             *relay_broken = word("relay_broken"), *relay_left = word("relay_left");
};
Words &words() {
    static Words made;
    return made;
}

// -- calls into Python

// What a call returned, taken over; null after an exception, which is handed to the loop.
PyObject *returned(Wire &wire, PyObject *result) {
    wire.called = true;
    if (result != nullptr) return result;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (!PyErr_GivenExceptionMatches(type, PyExc_Exception)) {
        PyErr_Restore(type, value, trace);
        wire.broken = true;
        return nullptr;
    }
    PyErr_NormalizeException(&type, &value, &trace);
    PyObject *done = PyObject_CallFunctionObjArgs(wire.failed, value, trace ? trace : none(), nullptr);
    drop(type);
    drop(value);
    drop(trace);
    if (done == nullptr) wire.broken = true;
    drop(done);
    return nullptr;
}

// -- sockets

void watch(Wire &wire, Conn &conn) {
    uint32_t wanted = (conn.paused || conn.ended ? 0u : EPOLLIN) | (conn.pending() ? EPOLLOUT : 0u);
    if (wanted == conn.interest || conn.state == Conn::DEAD) return;
    epoll_event event = {};
    event.events = conn.interest = wanted;
    event.data.fd = conn.fd;
    epoll_ctl(wire.epoll, EPOLL_CTL_MOD, conn.fd, &event);
}

void unlink(Conn &conn) {
    if (conn.client != nullptr) conn.client->upstream = nullptr;
    if (conn.upstream != nullptr) conn.upstream->client = nullptr;
    conn.client = conn.upstream = nullptr;
}

void kill(Wire &wire, Conn &conn, int error) {
    if (conn.state == Conn::DEAD) return;
    conn.state = Conn::DEAD;
    conn.error = error;
    epoll_ctl(wire.epoll, EPOLL_CTL_DEL, conn.fd, nullptr);
    wire.dead.push_back(&conn);
}

// Calls a method for a connection, which does not outlive an exception. Whether it returned something true.
template <typename... Arguments>
bool tell(Wire &wire, Conn &conn, PyObject *object, PyObject *method, Arguments... arguments) {
    PyObject *result = returned(wire, PyObject_CallMethodObjArgs(object, method, arguments..., nullptr));
    const bool yes = result != nullptr && result != none() && PyObject_IsTrue(result) == 1;
    if (result == nullptr) kill(wire, conn, ECONNABORTED);
    drop(result);
    return yes;
}

void bury(Wire &wire) {
    while (!wire.dead.empty() && !wire.broken) {
        std::vector<Conn *> dead;
        dead.swap(wire.dead);
        for (Conn *conn : dead) {
            if (wire.broken) {  // nothing may be called before that exception was seen
                wire.dead.push_back(conn);
                continue;
            }
            PyObject *fd = PyLong_FromLong(conn->fd), *error = PyLong_FromLong(conn->error);
            PyObject *result = returned(wire, PyObject_CallFunctionObjArgs(wire.lost, fd, error, nullptr));
            drop(result);
            drop(fd);
            drop(error);
            unlink(*conn);
            wire.conns[(size_t)conn->fd] = nullptr;
            close(conn->fd);
            delete conn;
        }
    }
}

void after_sending(Wire &wire, Conn &conn) {
    if (conn.pending() == 0) {
        if (conn.state == Conn::CLOSING) {
            kill(wire, conn, 0);
            return;
        }
        if (conn.shut_after) {
            conn.shut_after = false;
            shutdown(conn.fd, SHUT_WR);
        }
    }
    watch(wire, conn);
    if (conn.state != Conn::OPEN) return;
    if (conn.told_full ? conn.pending() <= LOW_WATER : conn.pending() > HIGH_WATER) {
        conn.told_full = !conn.told_full;
        tell(wire, conn, conn.owner, conn.told_full ? words().pause_writing : words().resume_writing);
    }
}

void flush(Wire &wire, Conn &conn) {
    while (conn.pending()) {
        ssize_t sent = send(conn.fd, conn.out.data() + conn.out_at, conn.pending(), MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno == EINTR) continue;
            if (errno != EAGAIN) kill(wire, conn, errno);
            break;
        }
        conn.out_at += (size_t)sent;
    }
    if (conn.pending() == 0) {
        conn.out_at = 0;
        conn.out.clear();
        if (conn.out.capacity() > READ_BYTES) conn.out.shrink_to_fit();
    } else if (conn.out_at > READ_BYTES) {
        conn.out.erase(0, conn.out_at);
        conn.out_at = 0;
    }
    if (conn.state != Conn::DEAD) after_sending(wire, conn);
}

void send_parts(Wire &wire, Conn &conn, iovec *parts, int count) {
    if (conn.state != Conn::OPEN) return;
    if (conn.pending() == 0) {
        msghdr message = {};
        message.msg_iov = parts;
        message.msg_iovlen = (size_t)count;
        ssize_t sent = sendmsg(conn.fd, &message, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno != EAGAIN && errno != EINTR) {
                kill(wire, conn, errno);
                return;
            }
            sent = 0;
        }
        for (size_t gone = (size_t)sent; count > 0;) {
            if (gone < parts->iov_len) {
                parts->iov_base = (char *)parts->iov_base + gone;
                parts->iov_len -= gone;
                break;
            }
            gone -= parts->iov_len;
            parts++;
            count--;
        }
        if (count == 0) return;
    }
    for (int i = 0; i < count; i++) conn.out.append((const char *)parts[i].iov_base, parts[i].iov_len);
    after_sending(wire, conn);
}

}  // namespace

#endif
