// Requests of clients: plain ones handed to Python whole, all other bytes as they come.

#ifndef REQUESTS_H
#define REQUESTS_H

#include "conns.h"

namespace {

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

// Nobody wants the request whose body is under way: what is still to come of it means nothing.
void forget_body(Conn &conn) {
    for (PyObject **object : {&conn.target, &conn.first, &conn.lines, &conn.body}) drop(*object);
    conn.body_left = 0;
    conn.raw = true;
}

// Whether more of the body may be read. Python counts it before it is.
bool may_grow(Wire &wire, Conn &conn) {
    if (conn.body_granted > 0) return true;
    conn.body_granted = std::min(conn.body_left, GRANT_BYTES);
    PyObject *more = PyLong_FromLong((long)conn.body_granted);
    const bool wanted = tell(wire, conn, conn.owner, words().body_grows, more) && conn.state == Conn::OPEN;
    drop(more);
    if (!wanted) forget_body(conn);
    return wanted;
}

// The body is read to where it stays. What follows it is not read before Python has had the request.
void read_body(Wire &wire, Conn &conn) {
    while (conn.body_left > 0) {
        if (!may_grow(wire, conn)) return;
        ssize_t count = recv(conn.fd, conn.body_at, conn.body_granted, 0);
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
        conn.body_granted -= (size_t)count;
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
    conn.body_length = length;
    conn.body_left = length - rest.size();
    PyObject *answer = returned(
        wire, PyObject_CallMethodObjArgs(conn.owner, words().request_begun, conn.target, conn.first, nullptr));
    if (answer == nullptr) kill(wire, conn, ECONNABORTED);
    const long granted = answer == nullptr || answer == none() ? 0 : PyLong_AsLong(answer);
    drop(answer);
    if (granted <= 0 || conn.state != Conn::OPEN) {
        forget_body(conn);
        return;
    }
    conn.body = returned(wire, PyBytes_FromStringAndSize(nullptr, (Py_ssize_t)length));
    if (conn.body == nullptr) {  // no memory: what comes next would be taken for a request
        kill(wire, conn, ENOMEM);
        return;
    }
    char *const start = PyBytes_AsString(conn.body);
    memcpy(start, rest.data(), rest.size());
    const size_t kept = std::min((size_t)granted, length);
    conn.body_granted = kept > rest.size() ? kept - rest.size() : 0;
    conn.body_at = start + rest.size();
    read_body(wire, conn);
}

}  // namespace

#endif
