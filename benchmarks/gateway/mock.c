// The mock replicas: one port each, answers that cost next to nothing.
//
// To midstream's gateway they are replicas of midstream: on GET /replica/events they tell the sessions placed on them, and report
// when requests came or ended, at most each 50 ms, and each second, with IN_FLIGHT_MARK replaced by the streams under way; asked by
// x-midstream-resumable, a stream tells of itself in comments (resumption.py). To other routers they are any OpenAI server.
// Always holds: a request is counted when its whole body has been read; a chunk when it was given to the system whole.

#include "bed.h"
#include "wire.h"

#define IN_FLIGHT_MARK "@INFLT@@"
#define REPLICAS_MAX 16
#define REPORT_GAP_NS 50000000ull
#define REPORT_AT_LEAST_NS 1000000000ull
#define PLAIN_BODY_BYTES 1024
#define ENTRY_BYTES 112          // a session as JSON
#define TOLD_AT_ONCE_MAX 1000

enum { INTERVAL_NS, CHUNKS, REPLICAS, GLOBALS = 8 };
enum { REQUESTS, SENT_CHUNKS, CONNECTIONS, STREAMS, RESUMABLE, LISTENERS, PER_REPLICA = 8 };

static volatile uint64_t *state;
static int epoll_fd, stream_timer, report_timer;
static uint64_t report_due;

struct conn {
    int fd, replica;
    char *in;
    size_t in_used, in_room;
    size_t head;          // bytes of the request's head; 0: not complete yet
    struct body body;
    char *out;            // what the system did not take yet
    size_t out_used, out_room;
    uint64_t left, due;   // of a stream: chunks to send, and when the next
    int streaming, marked, opened, listening, counted, dead;
    size_t place;         // in the heap, from 1; 0: not in it
    uint64_t told, told_at;  // a listener: the requests and streams last reported, and when
    uint64_t trajectories_at;
    size_t sessions_told;
    struct conn *next_listener, *next_dead;
};

struct replica {
    int fd;
    char *plain, *stream_head, *marked_head, *report, *trajectories;
    size_t plain_length, stream_head_length, marked_head_length, report_length, trajectories_length;
    char *in_flight;      // within report
    char (*sessions)[ENTRY_BYTES];
    size_t sessions_used, sessions_room;
};

static struct replica replicas[REPLICAS_MAX];
static struct conn *listeners, *dead;

static uint64_t volatile *counter(int replica, int which) {
    return state + GLOBALS + replica * PER_REPLICA + which;
}

// -- streams by when their next chunk is due: a binary heap

static struct conn **heap;
static size_t heap_used, heap_room;

static void heap_put(size_t place, struct conn *conn) {
    heap[place] = conn;
    conn->place = place;
}

static void heap_settle(size_t place, struct conn *conn) {
    while (place > 1 && heap[place / 2]->due > conn->due) {
        heap_put(place, heap[place / 2]);
        place /= 2;
    }
    for (;;) {
        size_t child = 2 * place;
        if (child > heap_used) break;
        if (child + 1 <= heap_used && heap[child + 1]->due < heap[child]->due) child++;
        if (heap[child]->due >= conn->due) break;
        heap_put(place, heap[child]);
        place = child;
    }
    heap_put(place, conn);
}

static void heap_add(struct conn *conn) {
    if (heap_used + 2 > heap_room) heap = grown(heap, (heap_room = heap_room * 2 + 64) * sizeof *heap);
    heap_settle(++heap_used, conn);
}

static void heap_remove(struct conn *conn) {
    struct conn *last = heap[heap_used--];
    size_t place = conn->place;
    conn->place = 0;
    if (last != conn) heap_settle(place, last);
}

// -- connections

static void drop(struct conn *conn) {
    if (conn->dead) return;
    conn->dead = 1;
    close(conn->fd);
    if (conn->place) heap_remove(conn);
    if (conn->streaming) --*counter(conn->replica, STREAMS);
    if (conn->listening) {
        struct conn **at = &listeners;
        while (*at != conn) at = &(*at)->next_listener;
        *at = conn->next_listener;
        --*counter(conn->replica, LISTENERS);
    }
    --*counter(conn->replica, CONNECTIONS);
    conn->next_dead = dead;
    dead = conn;  // events of this round may still point at it
}

static void bury(void) {
    while (dead != NULL) {
        struct conn *conn = dead;
        dead = conn->next_dead;
        free(conn->in);
        free(conn->out);
        free(conn);
    }
}

static void send_bytes(struct conn *conn, const char *data, size_t length) {
    if (conn->out_used == 0) {
        ssize_t sent = send(conn->fd, data, length, MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN) {
            drop(conn);
            return;
        }
        if (sent > 0) {
            data += sent;
            length -= (size_t)sent;
        }
        if (length == 0) return;
        watch(epoll_fd, EPOLL_CTL_MOD, conn->fd, EPOLLIN | EPOLLOUT, conn);
    }
    if (conn->out_used + length > conn->out_room)
        conn->out = grown(conn->out, conn->out_room = (conn->out_used + length) * 2);
    memcpy(conn->out + conn->out_used, data, length);
    conn->out_used += length;
}

static void flush(struct conn *conn) {
    ssize_t sent = send(conn->fd, conn->out, conn->out_used, MSG_NOSIGNAL);
    if (sent < 0) {
        if (errno != EAGAIN) drop(conn);
        return;
    }
    conn->out_used -= (size_t)sent;
    memmove(conn->out, conn->out + sent, conn->out_used);
    if (conn->out_used > 0) return;
    watch(epoll_fd, EPOLL_CTL_MOD, conn->fd, EPOLLIN, conn);
    if (conn->streaming) {
        conn->due = now_ns();
        heap_add(conn);
    }
}

// -- answers

static const char EVENT[] =
    "data: {\"id\":\"chatcmpl-%d-5f2a9c01\",\"object\":\"chat.completion.chunk\",\"created\":1790000000,"
    "\"model\":\"m@step-000012\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"},\"logprobs\":{\"content\":"
    "[{\"token\":\" word\",\"logprob\":-1.2345678,\"bytes\":[32,119,111,114,100],\"top_logprobs\":[]}]},"
    "\"finish_reason\":null}],\"t\":%20llu}\n\n";

static const char OPENING[] =
    ": m {\"id\":\"chatcmpl-%d-5f2a9c01\",\"created\":1790000000,\"seed\":123456789,\"prompts\":"
    "\"0123456789abcdef0123456789abcdef\"}\n: m {\"c\":0,\"t\":[%u],\"s\":\"step-000012\",\"cached\":0,"
    "\"kv\":[[\"step-000012\",0,128]]}\n\n";

static void send_chunk(struct conn *conn) {
    char data[2048], chunk[2100];
    int length = 0;
    if (conn->left == 0) {
        length = snprintf(chunk, sizeof chunk, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
        conn->streaming = 0;
        --*counter(conn->replica, STREAMS);
    } else {
        unsigned token = (unsigned)(10000 + conn->left % 50000);
        if (conn->marked && conn->opened) length = sprintf(data, ": m 0:%u\n\n", token);
        else if (conn->marked) length = sprintf(data, OPENING, conn->replica, token);
        conn->opened = 1;
        length += sprintf(data + length, EVENT, conn->replica, (unsigned long long)now_ns());
        length = snprintf(chunk, sizeof chunk, "%x\r\n%s\r\n", (unsigned)length, data);
        conn->left--;
        ++*counter(conn->replica, SENT_CHUNKS);
    }
    send_bytes(conn, chunk, (size_t)length);
}

static void begin_stream(struct conn *conn) {
    struct replica *replica = &replicas[conn->replica];
    uint64_t interval = state[INTERVAL_NS];
    conn->streaming = 1;
    conn->left = state[CHUNKS];
    ++*counter(conn->replica, STREAMS);
    conn->opened = 0;
    if (conn->marked) send_bytes(conn, replica->marked_head, replica->marked_head_length);
    else send_bytes(conn, replica->stream_head, replica->stream_head_length);
    if (conn->dead) return;
    conn->due = now_ns() + (interval ? (uint64_t)random() % interval : 0);  // streams keep apart as they began
    if (conn->out_used == 0) heap_add(conn);
}

static void send_due(void) {
    uint64_t now = now_ns(), interval = state[INTERVAL_NS];
    for (size_t turn = heap_used; turn > 0 && heap_used > 0 && heap[1]->due <= now; turn--) {
        struct conn *conn = heap[1];
        conn->due = interval ? conn->due + interval : now_ns();
        send_chunk(conn);
        if (conn->dead) continue;
        if (conn->streaming && conn->out_used == 0) heap_settle(1, conn);
        else heap_remove(conn);  // it goes on when the router has taken what is there
    }
}

static uint64_t news(int replica) { return *counter(replica, REQUESTS) * 4096 + *counter(replica, STREAMS); }

static void send_line(struct conn *conn, const char *line, size_t length) {
    char size[24];
    if (conn->dead) return;
    send_bytes(conn, size, (size_t)snprintf(size, sizeof size, "%zx\r\n", length));
    if (!conn->dead) send_bytes(conn, line, length);
    if (!conn->dead) send_bytes(conn, "\r\n", 2);
}

static void tell_sessions(struct conn *conn) {
    static char line[64 + TOLD_AT_ONCE_MAX * ENTRY_BYTES];
    struct replica *replica = &replicas[conn->replica];
    while (!conn->dead && conn->sessions_told < replica->sessions_used) {
        size_t used = (size_t)sprintf(line, "{\"kind\":\"sessions\",\"held\":[");
        for (int i = 0; i < TOLD_AT_ONCE_MAX && conn->sessions_told < replica->sessions_used; i++)
            used += (size_t)sprintf(line + used, i ? ",%s" : "%s", replica->sessions[conn->sessions_told++]);
        used += (size_t)sprintf(line + used, "]}\n");
        send_line(conn, line, used);
    }
}

static void send_report(struct conn *conn) {
    struct replica *replica = &replicas[conn->replica];
    char digits[16];
    if (replica->in_flight != NULL) {
        snprintf(digits, sizeof digits, "%8llu", (unsigned long long)*counter(conn->replica, STREAMS));
        memcpy(replica->in_flight, digits, 8);
    }
    conn->told = news(conn->replica);
    conn->told_at = now_ns();
    tell_sessions(conn);
    send_line(conn, replica->report, replica->report_length);
    if (conn->told != 0 && conn->told_at - conn->trajectories_at >= REPORT_AT_LEAST_NS) {
        conn->trajectories_at = conn->told_at;
        send_line(conn, replica->trajectories, replica->trajectories_length);
    }
}

// The gateway says that it placed a session here: remembered for ever, as the text that event streams tell.
static void place_session(struct conn *conn, const char *stamp) {
    struct replica *replica = &replicas[conn->replica];
    const char *key;
    if (!header(conn->in, conn->head, "x-midstream-session:", &key)) return;
    if (replica->sessions_used == replica->sessions_room)
        replica->sessions = grown(replica->sessions, (replica->sessions_room = replica->sessions_room * 2 + 1024) * ENTRY_BYTES);
    snprintf(replica->sessions[replica->sessions_used++], ENTRY_BYTES, "[[\"\",\"%.*s\"],%llu]", (int)strcspn(key, "\r"), key,
             strtoull(stamp, NULL, 10));
}

static void begin_events(struct conn *conn) {
    static const char head[] =
        "HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n";
    conn->listening = 1;
    conn->next_listener = listeners;
    listeners = conn;
    ++*counter(conn->replica, LISTENERS);
    send_bytes(conn, head, sizeof head - 1);
    if (!conn->dead) send_report(conn);
}

static void send_small(struct conn *conn, int status, const char *body) {
    char answer[1024];
    int length = snprintf(answer, sizeof answer,
                          "HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s", status,
                          strlen(body), body);
    send_bytes(conn, answer, (size_t)length);
}

static int begins(const char *text, const char *with) { return strncmp(text, with, strlen(with)) == 0; }

static void answer(struct conn *conn, const char *body, size_t body_bytes) {
    struct replica *replica = &replicas[conn->replica];
    const char *value;
    if (begins(conn->in, "POST /v1/chat/completions") || begins(conn->in, "POST /v1/completions")) {
        ++*counter(conn->replica, REQUESTS);
        conn->marked = header(conn->in, conn->head, "x-midstream-resumable:", &value);
        if (conn->marked) ++*counter(conn->replica, RESUMABLE);
        if (header(conn->in, conn->head, "x-midstream-placed:", &value)) place_session(conn, value);
        if (body_bytes < 8192 && memmem(body, body_bytes, "\"stream\":true", 13) != NULL) begin_stream(conn);
        else send_bytes(conn, replica->plain, replica->plain_length);
    } else if (begins(conn->in, "GET /replica/events")) {
        begin_events(conn);
    } else if (begins(conn->in, "POST /replica/")) {
        send_small(conn, 202, "{}");
    } else if (begins(conn->in, "GET /v1/models")) {
        send_small(conn, 200, "{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":\"model\",\"created\":1,\"owned_by\":\"mock\"}]}");
    } else if (begins(conn->in, "GET ")) {
        send_small(conn, 200, "{\"status\":\"ok\",\"model_path\":\"m\",\"served_model_name\":\"m\",\"model_id\":\"m\"}");
    } else {
        send_small(conn, 404, "{\"error\":{\"message\":\"not here\"}}");
    }
}

// One request, when it is there whole. The framed body is kept only as far as it came unchunked.
static int serve_one(struct conn *conn) {
    if (conn->head == 0) {
        char *end = memmem(conn->in, conn->in_used, "\r\n\r\n", 4);
        if (end == NULL) return 0;
        conn->head = (size_t)(end - conn->in) + 4;
        conn->body = body_of(conn->in, conn->head);
        conn->counted = 0;
    }
    size_t fed = conn->head + (size_t)conn->counted;
    if (!conn->body.done) {
        ssize_t used = body_feed(&conn->body, conn->in + fed, conn->in_used - fed, NULL, NULL);
        if (used < 0) {
            drop(conn);
            return 0;
        }
        conn->counted += (int)used;
    }
    if (!conn->body.done) return 0;
    size_t whole = conn->head + (size_t)conn->counted;
    answer(conn, conn->in + conn->head, (size_t)conn->counted);
    if (conn->dead) return 0;
    conn->in_used -= whole;
    memmove(conn->in, conn->in + whole, conn->in_used);
    conn->head = 0;
    return conn->in_used > 0;
}

static void receive(struct conn *conn) {
    if (conn->in_room - conn->in_used < 32768) conn->in = grown(conn->in, conn->in_room = conn->in_room * 2 + 65536);
    ssize_t got = recv(conn->fd, conn->in + conn->in_used, conn->in_room - conn->in_used, 0);
    if (got <= 0) {
        if (got == 0 || errno != EAGAIN) drop(conn);
        return;
    }
    conn->in_used += (size_t)got;
    if (conn->streaming || conn->listening) return;  // the next request waits
    while (serve_one(conn) && !conn->streaming) {
    }
}

static void welcome(int index) {
    int fd;
    while ((fd = accept4(replicas[index].fd, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        struct conn *conn = calloc(1, sizeof *conn);
        if (conn == NULL) die("calloc");
        conn->fd = fd;
        conn->replica = index;
        no_delay(fd);
        ++*counter(index, CONNECTIONS);
        watch(epoll_fd, EPOLL_CTL_ADD, fd, EPOLLIN, conn);
    }
    if (errno != EAGAIN && errno != ECONNABORTED) die("accept");
}

// -- beginning

static void map_state(const char *path) {
    int fd = open(path, O_RDWR);
    if (fd < 0) die(path);
    state = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (state == MAP_FAILED) die("mmap");
    close(fd);
}

static void prepare(int index, const char *report, const char *trajectories) {
    struct replica *replica = &replicas[index];
    char body[PLAIN_BODY_BYTES + 1], text[512];
    int used = snprintf(body, sizeof body,
                        "{\"id\":\"chatcmpl-%d-5f2a9c01\",\"object\":\"chat.completion\",\"created\":1790000000,"
                        "\"model\":\"m@step-000012\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"",
                        index);
    static const char end[] = "\"},\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":100,\"completion_tokens\":100,\"total_tokens\":200}}";
    memset(body + used, 'w', sizeof body - (size_t)used);
    strcpy(body + PLAIN_BODY_BYTES - (sizeof end - 1), end);
    replica->plain = grown(NULL, PLAIN_BODY_BYTES + 512);
    replica->plain_length = (size_t)sprintf(
        replica->plain,
        "HTTP/1.1 200 OK\r\ndate: Sat, 21 Nov 2026 20:00:00 GMT\r\nserver: uvicorn\r\ncontent-type: application/json\r\n"
        "x-request-id: 0123456789abcdef\r\ncontent-length: %d\r\n\r\n%s",
        PLAIN_BODY_BYTES, body);
    snprintf(text, sizeof text,
             "HTTP/1.1 200 OK\r\ndate: Sat, 21 Nov 2026 20:00:00 GMT\r\nserver: uvicorn\r\n"
             "content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\nx-request-id: 0123456789abcdef\r\n"
             "transfer-encoding: chunked\r\n\r\n");
    replica->stream_head = strdup(text);
    replica->stream_head_length = strlen(text);
    replica->marked_head_length = (size_t)sprintf(text + strlen(text) - 2, "x-midstream-resumable: 1\r\n\r\n") + replica->stream_head_length - 2;
    replica->marked_head = strdup(text);
    replica->report = strdup(report);
    replica->report_length = strlen(report);
    replica->trajectories = strdup(trajectories);
    replica->trajectories_length = strlen(trajectories);
    replica->in_flight = strstr(replica->report, IN_FLIGHT_MARK);
}

static int listen_somewhere(int index) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, size) < 0 || listen(fd, 4096) < 0) die("listen");
    if (getsockname(fd, (struct sockaddr *)&address, &size) < 0) die("getsockname");
    replicas[index].fd = fd;
    watch(epoll_fd, EPOLL_CTL_ADD, fd, EPOLLIN, &replicas[index]);
    return ntohs(address.sin_port);
}

static void start(const char *reports) {
    FILE *file = fopen(reports, "r");
    char *line = NULL, *second = NULL;
    size_t room = 0, second_room = 0;
    int count = 0;
    if (file == NULL) die(reports);
    while (count < REPLICAS_MAX && getline(&line, &room, file) > 0 && getline(&second, &second_room, file) > 0) {
        prepare(count, line, second);
        printf(count ? " %d" : "%d", listen_somewhere(count));
        count++;
    }
    printf("\n");
    fflush(stdout);
    fclose(file);
    state[REPLICAS] = (uint64_t)count;
}

static void serve(struct epoll_event event) {
    void *who = event.data.ptr;
    if (who == &stream_timer) {
        alarm_read(stream_timer);
    } else if (who == &report_timer) {
        alarm_read(report_timer);
        for (struct conn *conn = listeners, *next; conn != NULL; conn = next) {
            next = conn->next_listener;
            if (news(conn->replica) != conn->told || now_ns() - conn->told_at >= REPORT_AT_LEAST_NS) send_report(conn);
        }
        alarm_at(report_timer, report_due += REPORT_GAP_NS);
    } else if ((struct replica *)who >= replicas && (struct replica *)who < replicas + REPLICAS_MAX) {
        welcome((int)((struct replica *)who - replicas));
    } else {
        struct conn *conn = who;
        if (!conn->dead && event.events & EPOLLOUT) flush(conn);
        if (!conn->dead && event.events & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive(conn);
    }
}

int mock_begin(const char *state_path, const char *reports) {
    map_state(state_path);
    epoll_fd = epoll_create1(0);
    stream_timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    report_timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    if (epoll_fd < 0 || stream_timer < 0 || report_timer < 0) die("epoll");
    watch(epoll_fd, EPOLL_CTL_ADD, stream_timer, EPOLLIN, &stream_timer);
    watch(epoll_fd, EPOLL_CTL_ADD, report_timer, EPOLLIN, &report_timer);
    start(reports);
    alarm_at(report_timer, report_due = now_ns() + REPORT_GAP_NS);
    return epoll_fd;
}

void mock_step(void) {
    struct epoll_event events[EVENTS_MAX];
    int found = epoll_wait(epoll_fd, events, EVENTS_MAX, 0);
    if (found < 0 && errno != EINTR) die("epoll_wait");
    for (int i = 0; i < found; i++) serve(events[i]);
    if (heap_used > 0) send_due();
    bury();
}

int mock_rests(void) {
    if (heap_used == 0) return 1;
    if (state[INTERVAL_NS] == 0) return 0;
    alarm_at(stream_timer, heap[1]->due);
    return 1;
}
