// The gateway's connections, on the epoll instance of the event loop's selector: wait() serves them and returns when the
// loop has something to do. Python decides about every request; the bytes of requests in plain form and of the responses to them
// pass here. wire.py says what each function means; heads.h what is plain.
//
// Always holds:
// - Everything runs in the loop's thread, with the GIL but for the wait itself.
// - A connection is freed, and its descriptor closed, only between two events and after its protocol was told; so a
//   descriptor that Python knows is never another connection's.
// - Bytes leave in the order they were written; at most one read's worth is taken in for one that cannot be written.

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
    double last_read = 0;
    std::string out;
    size_t out_at = 0;
    // of a request whose body is under way
    PyObject *target = nullptr, *first = nullptr, *lines = nullptr, *body = nullptr;
    char *body_at = nullptr;
    size_t body_left = 0;
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
             *request_begun = word("request_begun"), *request_received = word("request_received"),
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
            PyObject *fd = PyLong_FromLong(conn->fd), *error = PyLong_FromLong(conn->error);
            PyObject *result = returned(wire, PyObject_CallFunctionObjArgs(wire.lost, fd, error, nullptr));
            drop(result);
            drop(fd);
            drop(error);
            unlink(*conn);
            wire.conns[(size_t)conn->fd] = nullptr;
            close(conn->fd);
            drop(conn->owner);
            drop(conn->target);
            drop(conn->first);
            drop(conn->lines);
            drop(conn->body);
            drop(conn->sink);
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

// -- requests

PyObject *name_object(Wire &wire, std::string_view name) {
    std::string key(name);
    auto found = wire.names.find(key);
    if (found != wire.names.end()) {
        Py_IncRef(found->second);
        return found->second;
    }
    PyObject *made = bytes(name);
    if (wire.names.size() < NAMES_MAX && name.size() <= 64) {
        Py_IncRef(made);
        wire.names.emplace(std::move(key), made);
    }
    return made;
}

void give_raw(Wire &wire, Conn &conn, std::string_view data) {
    PyObject *object = bytes(data);
    conn.raw = !tell(wire, conn, conn.owner, words().raw_received, object);
    drop(object);
}

void take_head(Wire &wire, Conn &conn) {
    const RequestHead &head = wire.request;
    conn.target = bytes(head.target);
    conn.first = PyDict_New();
    std::string lines;
    for (size_t i = head.fields.count; i-- > 0;) {  // the first of a name is set last
        const Field &field = head.fields.field[i];
        PyObject *name = name_object(wire, field.name), *value = bytes(field.value);
        PyDict_SetItem(conn.first, name, value);
        drop(name);
        drop(value);
    }
    for (size_t i = 0; i < head.fields.count; i++)
        if (conn.rules->forwards(head.fields.field[i].name)) lines += head.fields.field[i].line;
    conn.lines = bytes(lines);
}

// The whole request of the head taken; `rest` came after it.
void give_request(Wire &wire, Conn &conn, std::string_view rest) {
    PyObject *target = conn.target, *first = conn.first, *lines = conn.lines, *body = conn.body;
    conn.target = conn.first = conn.lines = conn.body = nullptr;
    tell(wire, conn, conn.owner, words().request_received, target, first, lines, body);
    drop(target);
    drop(first);
    drop(lines);
    drop(body);
    if (!rest.empty() && conn.state == Conn::OPEN) give_raw(wire, conn, rest);
}

// The body is read to where it stays. What follows it is not read before Python has had the request.
void read_body(Wire &wire, Conn &conn) {
    while (conn.body_left > 0) {
        ssize_t count = recv(conn.fd, conn.body_at, conn.body_left, 0);
        if (count == 0) {
            conn.ended = true;
            kill(wire, conn, 0);  // the client left
            return;
        }
        if (count < 0) {
            if (errno != EAGAIN && errno != EINTR) kill(wire, conn, errno);
            return;
        }
        conn.body_at += count;
        conn.body_left -= (size_t)count;
        conn.last_read = monotonic();
    }
    give_request(wire, conn, {});
}

void read_client(Wire &wire, Conn &conn, std::string_view data) {
    size_t end = data.find("\r\n\r\n");
    if (end == std::string_view::npos || !read_request(data.substr(0, end + 4), *conn.rules, wire.request)) {
        give_raw(wire, conn, data);
        return;
    }
    std::string_view rest = data.substr(end + 4);
    const size_t length = (size_t)wire.request.length;
    take_head(wire, conn);
    if (rest.size() >= length) {
        conn.body = bytes(rest.substr(0, length));
        give_request(wire, conn, rest.substr(length));
        return;
    }
    conn.last_read = monotonic();
    conn.body_left = length - rest.size();
    if (!tell(wire, conn, conn.owner, words().request_begun, conn.target, conn.first) || conn.state != Conn::OPEN ||
        (conn.body = returned(wire, PyBytes_FromStringAndSize(nullptr, (Py_ssize_t)length))) == nullptr) {
        conn.body_left = 0;
        conn.raw = true;  // refused: the rest is nobody's
        return;
    }
    char *const start = PyBytes_AsString(conn.body);
    memcpy(start, rest.data(), rest.size());
    conn.body_at = start + rest.size();
    read_body(wire, conn);
}

// -- relays

void end_relay(Conn &conn) {
    if (conn.client != nullptr) conn.client->upstream = nullptr;
    conn.client = nullptr;
    drop(conn.sink);
}

void break_relay(Wire &wire, Conn &conn, const char *reason) {
    PyObject *why = word(reason);
    tell(wire, conn, conn.owner, words().relay_broken, why);
    drop(why);
}

// Not for a relay: Python reads this response from its first byte.
void leave_relay(Wire &wire, Conn &conn, std::string_view data) {
    PyObject *object = bytes(data);
    end_relay(conn);
    tell(wire, conn, conn.owner, words().relay_left, object);
    drop(object);
}

void finish_relay(Wire &wire, Conn &conn, bool begun_before, bool clean) {
    end_relay(conn);
    PyObject *first = PyBool_FromLong(!begun_before), *reusable = PyBool_FromLong(clean);
    tell(wire, conn, conn.owner, words().relay_ended, first, reusable);
    drop(first);
    drop(reusable);
}

void pass_on(Wire &wire, Conn &conn, std::string_view head, std::string_view data) {
    size_t boundary = 0;
    ptrdiff_t used = conn.framing.feed(data.data(), data.size(), &boundary);
    if (used < 0) {
        break_relay(wire, conn, "bad response: its body is not framed as it says");
        return;
    }
    if ((size_t)used < data.size()) {
        break_relay(wire, conn, "bytes follow the end of the response");
        return;
    }
    const bool done = conn.framing.done(), before = conn.begun;
    Conn &client = *conn.client;
    conn.begun = true;
    if (conn.holds && !done && conn.held.size() + data.size() - boundary > HELD_BYTES_MAX) conn.holds = false;
    size_t now = conn.holds ? boundary : data.size();
    iovec parts[3] = {{(void *)head.data(), head.size()}, {conn.held.data(), conn.held.size()}, {(void *)data.data(), now}};
    if (now == 0) parts[1].iov_len = 0;
    if (parts[0].iov_len + parts[1].iov_len + parts[2].iov_len) send_parts(wire, client, parts, 3);
    if (now) conn.held.clear();
    conn.held.append(data.data() + now, data.size() - now);
    if (conn.client == nullptr) return;  // Python gave it up meanwhile
    if (done) finish_relay(wire, conn, before, true);
    else if (!before) tell(wire, conn, conn.sink, words().relay_begun);
}

// Whether more is needed before anything can be done; then conn.needed says how much at least.
bool read_response_head(Wire &wire, Conn &conn, std::string_view data) {
    size_t end = data.find("\r\n\r\n");
    if (end == std::string_view::npos && data.size() <= RESPONSE_HEAD_BYTES_MAX) {
        conn.needed = data.size() + 1;
        return true;
    }
    ResponseHead &response = wire.response;
    if (end == std::string_view::npos || !read_response(data.substr(0, end + 4), response)) {
        leave_relay(wire, conn, data);
        return false;
    }
    std::string_view body = data.substr(end + 4);
    if (!response.chunked && response.length <= WHOLE_BYTES_MAX && body.size() < response.length) {
        conn.needed = end + 4 + response.length;
        return true;
    }
    if (response.chunked) conn.framing.begin_chunks(response.events);
    else conn.framing.begin_length(response.length);
    static const std::string_view HOP_BY_HOP[] = {"connection", "keep-alive", "proxy-connection", "te", "trailer"};
    std::string head(data.substr(0, data.find('\n') + 1));
    head.reserve(end + 4 + conn.extra.size() + 24);
    bool tells = false;  // what another replica needs to go on with it
    for (size_t i = 0; i < response.fields.count; i++) {
        const Field &field = response.fields.field[i];
        tells |= field.name == "x-midstream-resumable";
        const bool hop = std::find(std::begin(HOP_BY_HOP), std::end(HOP_BY_HOP), field.name) != std::end(HOP_BY_HOP);
        if (!hop && field.name.substr(0, Rules::PRIVATE.size()) != Rules::PRIVATE) head += field.line;
    }
    conn.holds = conn.framing.keeps_marks && response.chunked && response.events && tells;
    head += conn.extra;
    head += conn.client->close_after ? "connection: close\r\n\r\n" : "\r\n";
    pass_on(wire, conn, head, body);
    return false;
}

void read_upstream(Wire &wire, Conn &conn, std::string_view data) {
    if (conn.begun) {
        pass_on(wire, conn, {}, data);
    } else if (conn.in.empty()) {
        if (read_response_head(wire, conn, data)) {
            conn.in.reserve(conn.needed);
            conn.in.assign(data.data(), data.size());
        }
    } else {
        conn.in.append(data.data(), data.size());
        if (conn.in.size() < conn.needed) return;
        std::string all;
        all.swap(conn.in);
        if (read_response_head(wire, conn, all)) conn.in.swap(all);
    }
}

// -- events

void readable(Wire &wire, Conn &conn) {
    if (conn.body_left > 0 && conn.state == Conn::OPEN) {
        read_body(wire, conn);
        return;
    }
    const bool first = conn.rules != nullptr && !conn.raw;
    ssize_t count = recv(conn.fd, wire.buffer, first ? FIRST_READ_BYTES : READ_BYTES, 0);
    if (count < 0) {
        if (errno != EAGAIN && errno != EINTR) kill(wire, conn, errno);
        return;
    }
    if (count == 0) {
        conn.ended = true;
        if (conn.state == Conn::OPEN && !tell(wire, conn, conn.owner, words().eof_received) && conn.state == Conn::OPEN)
            conn.state = Conn::CLOSING;
        if (conn.state == Conn::CLOSING && conn.pending() == 0) kill(wire, conn, 0);
        watch(wire, conn);
        return;
    }
    if (conn.state == Conn::CLOSING) return;  // nobody reads what comes after close()
    std::string_view data(wire.buffer, (size_t)count);
    if (conn.client != nullptr) {
        read_upstream(wire, conn, data);
    } else if (first) {
        read_client(wire, conn, data);
    } else if (conn.rules != nullptr) {
        give_raw(wire, conn, data);
    } else {
        PyObject *object = bytes(data);
        tell(wire, conn, conn.owner, words().data_received, object);
        drop(object);
    }
}

void serve(Wire &wire, Conn &conn, uint32_t events) {
    if (events & EPOLLOUT) flush(wire, conn);
    if (conn.state != Conn::DEAD && events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
        if (conn.ended) {
            if (events & (EPOLLHUP | EPOLLERR)) kill(wire, conn, EPIPE);
        } else {
            readable(wire, conn);
        }
    }
}

// -- functions

#define FUNCTION(name) PyObject *name(PyObject *self, PyObject *const *args, Py_ssize_t)

Conn *conn_of(Wire &wire, PyObject *number) {
    const long fd = PyLong_AsLong(number);
    if (fd >= 0 && (size_t)fd < wire.conns.size() && wire.conns[(size_t)fd] != nullptr) return wire.conns[(size_t)fd];
    PyErr_SetString(PyExc_ValueError, "no such connection");
    return nullptr;
}

#define WIRE_AND_CONN             \
    Wire &wire = *wire_of(self);  \
    Conn *found = conn_of(wire, args[0]); \
    if (found == nullptr) return nullptr; \
    Conn &conn = *found

// wait(seconds or None, the loop's ready, the loop's timers) -> [(descriptor, events)] of those that are not connections here
FUNCTION(wait) {
    Wire &wire = *wire_of(self);
    double until = args[0] == none() ? INFINITY : PyFloat_AsDouble(args[0]);
    if (PyErr_Occurred()) return nullptr;
    bool timed = until > 0 && until != INFINITY;
    if (timed) until += monotonic();
    PyObject *foreign = PyList_New(0);
    PyObject *const ready = args[1], *const scheduled = args[2];
    const Py_ssize_t timers = PyObject_Size(scheduled);
    const auto loop_has_work = [&] {
        return wire.called && (PyObject_Size(ready) > 0 || PyObject_Size(scheduled) != timers);
    };
    for (;;) {
        wire.called = false;
        bury(wire);
        if (wire.broken) break;
        double left = timed ? until - monotonic() : until;
        if (loop_has_work()) left = 0;
        wire.called = false;
        int milliseconds = left <= 0 ? 0 : left == INFINITY ? -1 : (int)std::min(std::ceil(left * 1e3), 86400e3);
        PyThreadState *state = PyEval_SaveThread();
        int count = epoll_wait(wire.epoll, wire.events, EVENTS_MAX, milliseconds);
        int error = errno;
        PyEval_RestoreThread(state);
        if (count < 0) {
            if (error == EINTR && PyErr_CheckSignals() == 0) break;
            if (error != EINTR) {
                errno = error;
                PyErr_SetFromErrno(PyExc_OSError);
            }
            wire.broken = true;
            break;
        }
        bool others = false;
        for (int i = 0; i < count && !wire.broken; i++) {
            const int fd = wire.events[i].data.fd;
            Conn *conn = (size_t)fd < wire.conns.size() ? wire.conns[(size_t)fd] : nullptr;
            if (conn != nullptr) {
                if (conn->state != Conn::DEAD) serve(wire, *conn, wire.events[i].events);
                continue;
            }
            PyObject *pair = PyTuple_New(2);
            PyTuple_SetItem(pair, 0, PyLong_FromLong(fd));
            PyTuple_SetItem(pair, 1, PyLong_FromLong((long)wire.events[i].events));
            PyList_Append(foreign, pair);
            drop(pair);
            others = true;
        }
        if (others || wire.broken || left <= 0) break;
        if (loop_has_work()) break;
        if (count == 0 && timed && monotonic() >= until) break;
    }
    if (!wire.broken) return foreign;
    wire.broken = false;
    drop(foreign);
    return nullptr;
}

// adopt(descriptor, protocol, rules or -1)
FUNCTION(adopt) {
    Wire &wire = *wire_of(self);
    const long fd = PyLong_AsLong(args[0]), rules = PyLong_AsLong(args[2]);
    if (fd < 0 || rules >= (long)wire.rules.size()) {
        PyErr_SetString(PyExc_ValueError, "no such descriptor or rules");
        return nullptr;
    }
    epoll_event event = {};
    event.events = EPOLLIN;
    event.data.fd = (int)fd;
    if (epoll_ctl(wire.epoll, EPOLL_CTL_ADD, (int)fd, &event) < 0) return PyErr_SetFromErrno(PyExc_OSError);
    if (wire.conns.size() <= (size_t)fd) wire.conns.resize((size_t)fd * 2 + 64);
    Conn *conn = new Conn((int)fd, args[1]);
    if (rules >= 0) conn->rules = wire.rules[(size_t)rules].get();
    wire.conns[(size_t)fd] = conn;
    return new_none();
}

// write(descriptor, bytes...)
PyObject *write_all(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    WIRE_AND_CONN;
    iovec parts[4];
    for (Py_ssize_t i = 1; i < count && i <= 4; i++) {
        char *data;
        Py_ssize_t size;
        if (PyBytes_AsStringAndSize(args[i], &data, &size) < 0) return nullptr;
        parts[i - 1] = {data, (size_t)size};
    }
    send_parts(wire, conn, parts, (int)count - 1);
    return new_none();
}

// relay(upstream, client, sink, head, body, extra, keeps_marks): send a request, pass its response to the client
FUNCTION(relay) {
    WIRE_AND_CONN;
    Conn *client = conn_of(wire, args[1]);
    if (client == nullptr) return nullptr;
    iovec parts[2];
    char *extra;
    Py_ssize_t sizes[2], extra_size;
    for (int i = 0; i < 2; i++) {
        if (PyBytes_AsStringAndSize(args[3 + i], (char **)&parts[i].iov_base, &sizes[i]) < 0) return nullptr;
        parts[i].iov_len = (size_t)sizes[i];
    }
    if (PyBytes_AsStringAndSize(args[5], &extra, &extra_size) < 0) return nullptr;
    end_relay(conn);
    if (client->upstream != nullptr) end_relay(*client->upstream);
    conn.client = client;
    client->upstream = &conn;
    conn.sink = args[2];
    Py_IncRef(conn.sink);
    conn.extra.assign(extra, (size_t)extra_size);
    conn.begun = conn.holds = false;
    conn.in.clear();
    conn.held.clear();
    conn.framing.begin_length(0);
    conn.framing.keeps_marks = PyObject_IsTrue(args[6]) == 1;
    send_parts(wire, conn, parts, 2);
    return new_none();
}

// relayed(upstream) -> (anything arrived, head passed on, chunked, events, in a chunk, at a boundary, marks or None)
// for the client: what is held back never reached it
FUNCTION(relayed) {
    WIRE_AND_CONN;
    (void)wire;
    const Framing &framing = conn.framing;
    const bool arrived = conn.begun || !conn.in.empty();
    const bool whole = conn.holds || framing.at_boundary();
    const bool values[] = {arrived, conn.begun, framing.chunked(), framing.events(), !conn.holds && framing.in_chunk(), whole};
    PyObject *all = PyTuple_New(7);
    for (int i = 0; i < 6; i++) PyTuple_SetItem(all, i, PyBool_FromLong(values[i]));
    const bool marks = conn.holds && !framing.lost_marks;
    PyTuple_SetItem(all, 6, marks ? bytes(framing.marks()) : new_none());
    return all;
}

// leave(upstream): its response is for nobody any more
FUNCTION(leave) {
    WIRE_AND_CONN;
    (void)wire;
    end_relay(conn);
    return new_none();
}

FUNCTION(shut) {  // close once all is sent
    WIRE_AND_CONN;
    if (conn.state == Conn::OPEN) conn.state = Conn::CLOSING;
    if (conn.state == Conn::CLOSING && conn.pending() == 0) kill(wire, conn, 0);
    return new_none();
}

FUNCTION(abandon) {
    WIRE_AND_CONN;
    kill(wire, conn, 0);
    return new_none();
}

FUNCTION(write_eof) {
    WIRE_AND_CONN;
    conn.shut_after = true;
    after_sending(wire, conn);
    return new_none();
}

FUNCTION(pause) {  // pause(descriptor, whether)
    WIRE_AND_CONN;
    conn.paused = PyObject_IsTrue(args[1]) == 1;
    watch(wire, conn);
    return new_none();
}

FUNCTION(pending) {
    WIRE_AND_CONN;
    (void)wire;
    return PyLong_FromLong((long)conn.pending());
}

FUNCTION(last_read) {  // when a part of a request's body last came; 0: none is under way
    WIRE_AND_CONN;
    (void)wire;
    return PyFloat_FromDouble(conn.body_left ? conn.last_read : 0);
}

FUNCTION(close_after) {  // the next response to be relayed says that it is the last
    WIRE_AND_CONN;
    (void)wire;
    conn.close_after = true;
    return new_none();
}

void name_list(PyObject *names, std::vector<std::string> &list) {
    PyObject *iterator = PyObject_GetIter(names);
    for (PyObject *name; iterator && (name = PyIter_Next(iterator)); drop(name)) {
        char *data;
        Py_ssize_t size;
        if (PyBytes_AsStringAndSize(name, &data, &size) == 0 && size > 0) list.emplace_back(data, (size_t)size);
    }
    drop(iterator);
}

FUNCTION(rules) {  // rules(dropped, let_through, head_bytes_max, body_bytes_max) -> their number
    Wire &wire = *wire_of(self);
    auto made = std::make_unique<Rules>();
    name_list(args[0], made->dropped);
    name_list(args[1], made->let_through);
    made->head_bytes_max = (size_t)PyLong_AsLong(args[2]);
    made->body_bytes_max = (uint64_t)PyLong_AsLong(args[3]);
    if (PyErr_Occurred()) return nullptr;
    wire.rules.push_back(std::move(made));
    return PyLong_FromLong((long)wire.rules.size() - 1);
}

PyMethodDef FUNCTIONS[] = {
    {"wait", (void *)wait, METH_FASTCALL, nullptr},
    {"adopt", (void *)adopt, METH_FASTCALL, nullptr},
    {"write", (void *)write_all, METH_FASTCALL, nullptr},
    {"relay", (void *)relay, METH_FASTCALL, nullptr},
    {"relayed", (void *)relayed, METH_FASTCALL, nullptr},
    {"leave", (void *)leave, METH_FASTCALL, nullptr},
    {"close", (void *)shut, METH_FASTCALL, nullptr},
    {"abort", (void *)abandon, METH_FASTCALL, nullptr},
    {"write_eof", (void *)write_eof, METH_FASTCALL, nullptr},
    {"pause", (void *)pause, METH_FASTCALL, nullptr},
    {"pending", (void *)pending, METH_FASTCALL, nullptr},
    {"last_read", (void *)last_read, METH_FASTCALL, nullptr},
    {"close_after", (void *)close_after, METH_FASTCALL, nullptr},
    {"rules", (void *)rules, METH_FASTCALL, nullptr},
};
constexpr Py_ssize_t FUNCTION_COUNT = sizeof FUNCTIONS / sizeof *FUNCTIONS;

void end_wire(PyObject *capsule) {
    Wire *wire = wire_of(capsule);
    for (Conn *conn : wire->conns) {
        if (conn == nullptr) continue;
        close(conn->fd);
        for (PyObject **object : {&conn->owner, &conn->target, &conn->first, &conn->lines, &conn->body, &conn->sink}) drop(*object);
        delete conn;
    }
    for (auto &name : wire->names) drop(name.second);
    drop(wire->lost);
    drop(wire->failed);
    delete wire;
}

}  // namespace

// (epoll descriptor, lost, failed) -> the functions above, in order. Objects are borrowed. Needs the GIL.
extern "C" PyObject *wire_open(int epoll, PyObject *lost, PyObject *failed) {
    Wire *wire = new Wire();
    wire->epoll = epoll;
    wire->lost = lost;
    wire->failed = failed;
    Py_IncRef(lost);
    Py_IncRef(failed);
    PyObject *capsule = PyCapsule_New(wire, CAPSULE, end_wire);
    PyObject *all = PyTuple_New(FUNCTION_COUNT);
    for (Py_ssize_t i = 0; i < FUNCTION_COUNT; i++)
        PyTuple_SetItem(all, i, PyCFunction_NewEx(&FUNCTIONS[i], capsule, nullptr));
    Py_DecRef(capsule);
    return all;
}
