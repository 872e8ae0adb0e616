// The gateway's connections, on the epoll instance of the event loop's selector: wait() serves them and returns when the
// loop has something to do. Python decides about every request; the bytes of requests in plain form and of the responses to them
// pass here. wire.py says what each function means; heads.h what is plain.
//
// Always holds:
// - Everything runs in the loop's thread, with the GIL but for the wait itself.
// - A connection is freed, and its descriptor closed, only between two events and after its protocol was told; so a
//   descriptor that Python knows is never another connection's.
// - Bytes leave in the order they were written; at most one read's worth is taken in for one that cannot be written.

#include "relays.h"
#include "requests.h"

namespace {

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

FUNCTION(body_arrived) {  // bytes of the request's body under way; -1: none is
    WIRE_AND_CONN;
    (void)wire;
    return PyLong_FromLong(conn.body_left ? (long)(conn.body_length - conn.body_left) : -1);
}

FUNCTION(drop_body) {  // the request's body under way is for nobody
    WIRE_AND_CONN;
    (void)wire;
    if (conn.body_left) forget_body(conn);
    return new_none();
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
    {"body_arrived", (void *)body_arrived, METH_FASTCALL, nullptr},
    {"drop_body", (void *)drop_body, METH_FASTCALL, nullptr},
    {"close_after", (void *)close_after, METH_FASTCALL, nullptr},
    {"rules", (void *)rules, METH_FASTCALL, nullptr},
};
constexpr Py_ssize_t FUNCTION_COUNT = sizeof FUNCTIONS / sizeof *FUNCTIONS;

void end_wire(PyObject *capsule) {
    Wire *wire = wire_of(capsule);
    for (Conn *conn : wire->conns) {
        if (conn == nullptr) continue;
        close(conn->fd);
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
