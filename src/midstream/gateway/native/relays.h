// Relays: a request is sent to an upstream, and a plain response to it passed on to the client.

#ifndef RELAYS_H
#define RELAYS_H

#include "conns.h"

namespace {

void end_relay(Conn &conn) {
    if (conn.client != nullptr) conn.client->upstream = nullptr;
    conn.client = nullptr;
    conn.framing.forget_marks();  // an idle connection holds nothing
    std::string().swap(conn.held);
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
    if (used < 0 || (size_t)used < data.size()) {
        conn.framing.fail();
        const char *not_framed = "bad response: its body is not framed as it says";
        break_relay(wire, conn, used < 0 ? not_framed : "bytes follow the end of the response");
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

}  // namespace

#endif
