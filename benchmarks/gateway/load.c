// The load generator: HTTP/1.1 over kept connections.
//
// Always holds: what is called ok was answered 200 and whole; an event stream is whole when it ends with [DONE].

#include "bed.h"

#define KEY_MARK "KKKKKKKK"
#define MARKS_MAX 8
#define EVENT_BYTES_MAX 16384
#define STATUSES 600
#define CONNECT_GAP_US 100  // a listen backlog of 128, which some routers have, is not to be what is measured

struct samples {
    uint32_t *ns;
    size_t used, room;
};

struct client {
    int fd, busy, in_head, event_stream, closing, late, connecting;
    uint32_t key;
    char *in;                 // of the head, while it is not whole
    size_t in_used;
    int status;
    struct body body;
    char *event;              // the event, or the begin of a plain answer
    size_t event_used, sent;
    int done_seen, error_seen, begun;
    uint64_t due, started;
};

static int epoll_fd = -1, port;
static char *request;
static size_t request_length, marks[MARKS_MAX], mark_count;
static uint64_t started, lasts, stop_at, limit = UINT64_MAX, keys = 1024, interval;
static uint64_t asked, ok, failed, cut, events_seen, bytes, reads, begun, error_events, opening_events;
static uint64_t statuses[STATUSES];
static struct samples latency, first_byte, event_delay;
static int client_count, hold, said_ready, busy_count;
static struct client *clients;
static char *record;
static const char *record_path;
static struct sockaddr_in address;

static void sample(struct samples *samples, uint64_t ns) {
    if (samples->used == samples->room) {
        if (samples->room >= 1u << 23) return;
        samples->ns = grown(samples->ns, (samples->room = samples->room * 2 + 4096) * sizeof *samples->ns);
    }
    samples->ns[samples->used++] = ns > UINT32_MAX ? UINT32_MAX : (uint32_t)ns;
}

static int more_to_ask(void) { return asked < limit && (stop_at == 0 || now_ns() < stop_at); }

static void reconnect(struct client *client) {
    if (client->fd >= 0) close(client->fd);
    client->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (client->fd < 0) die("socket");
    no_delay(client->fd);
    if (connect(client->fd, (struct sockaddr *)&address, sizeof address) < 0 && errno != EINPROGRESS) die("connect");
    client->connecting = 1;
    watch(epoll_fd, EPOLL_CTL_ADD, client->fd, EPOLLIN | EPOLLOUT, client);
}

static void ended(struct client *client, int whole);

static void push(struct client *client) {
    while (client->sent < request_length) {
        ssize_t sent = send(client->fd, request + client->sent, request_length - client->sent, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno == EAGAIN) watch(epoll_fd, EPOLL_CTL_MOD, client->fd, EPOLLIN | EPOLLOUT, client);
            return;  // a broken connection is read to be so
        }
        client->sent += (size_t)sent;
    }
}

static void write_key(struct client *client) {
    char digits[16];
    snprintf(digits, sizeof digits, "%08u", client->key);
    for (size_t i = 0; i < mark_count; i++) memcpy(request + marks[i], digits, 8);
}

static void ask(struct client *client, uint64_t due) {
    client->key = (uint32_t)(asked++ % keys);
    client->busy = client->in_head = 1;
    client->in_used = client->event_used = client->sent = 0;
    client->event_stream = client->done_seen = client->error_seen = client->closing = 0;
    client->started = due ? due : now_ns();
    busy_count++;
    write_key(client);
    if (!client->connecting) push(client);
}

static void next(struct client *client) {
    if (hold || !more_to_ask()) return;
    if (interval == 0) {
        ask(client, 0);
    } else if (client->late) {
        client->late--;
        ask(client, client->due - interval * (uint64_t)(client->late + 1));
    }
}

static void ended(struct client *client, int whole) {
    int good = whole && client->status == 200 && !client->error_seen && (!client->event_stream || client->done_seen);
    busy_count--;
    client->busy = 0;
    if (good) ok++;
    else failed++;
    if (!whole || (client->event_stream && !client->done_seen)) cut++;
    if (whole) sample(&latency, now_ns() - client->started);
    if (!whole || client->closing) reconnect(client);
    next(client);
}

static void take_event(struct client *client) {
    const char *stamp;
    client->event[client->event_used] = 0;
    if (client->event[0] == ':' && strstr(client->event, "\ndata:") == NULL) {  // a comment
        client->event_used = 0;
        return;
    }
    events_seen++;
    if (memmem(client->event, client->event_used, "data: [DONE]", 12) != NULL) {
        client->done_seen = 1;
        events_seen--;
    } else if ((stamp = memmem(client->event, client->event_used, "\"t\":", 4)) != NULL) {
        uint64_t at = strtoull(stamp + 4, NULL, 10), now = now_ns();
        if (at <= now) sample(&event_delay, now - at);
    } else {
        client->error_seen = 1;
        error_events++;
        events_seen--;
    }
    client->event_used = 0;
}

static void take_body(void *who, const char *data, size_t length) {
    struct client *client = who;
    if (!client->event_stream) {
        size_t room = 255 - client->event_used, part = length < room ? length : room;
        memcpy(client->event + client->event_used, data, part);
        client->event_used += part;
        return;
    }
    while (length > 0) {
        const char *end = memchr(data, '\n', length);
        size_t part = end == NULL ? length : (size_t)(end - data) + 1;
        if (client->event_used + part >= EVENT_BYTES_MAX) client->event_used = 0;  // no event of the mock is so long
        int empty_line = part == 1 && end != NULL && client->event_used > 0 && client->event[client->event_used - 1] == '\n';
        memcpy(client->event + client->event_used, data, part);
        client->event_used += part;
        if (empty_line) take_event(client);
        data += part;
        length -= part;
    }
}

static void note_mock(struct client *client) {
    client->event[client->event_used] = 0;
    const char *id = strstr(client->event, "cmpl-");
    if (record != NULL) record[client->key] = id != NULL ? id[5] : '?';
}

static int take_head(struct client *client) {
    char *end = memmem(client->in, client->in_used, "\r\n\r\n", 4);
    const char *value;
    if (end == NULL) return 0;
    size_t length = (size_t)(end - client->in) + 4;
    client->in_head = 0;
    client->status = client->in_used > 12 ? atoi(client->in + 9) : 0;
    if (client->status >= 0 && client->status < STATUSES) statuses[client->status]++;
    client->body = body_of(client->in, length);
    client->event_stream =
        header(client->in, length, "content-type:", &value) && strncmp(value, "text/event-stream", 17) == 0;
    client->closing = header(client->in, length, "connection:", &value) && strncasecmp(value, "close", 5) == 0;
    sample(&first_byte, now_ns() - client->started);
    if (!client->begun) {
        client->begun = 1;
        begun++;
    }
    ssize_t used = body_feed(&client->body, client->in + length, client->in_used - length, take_body, client);
    if (used < 0) die("the answer is not HTTP");
    return 1;
}

static void receive(struct client *client) {
    static char buffer[65536];
    ssize_t got = recv(client->fd, buffer, sizeof buffer, 0);
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
        if (client->busy) ended(client, 0);
        else reconnect(client);
        return;
    }
    reads++;
    bytes += (uint64_t)got;
    if (!client->busy) die("bytes without a request");
    if (client->in_head) {
        if (client->in_used + (size_t)got > sizeof buffer * 2) die("a long head");
        memcpy(client->in + client->in_used, buffer, (size_t)got);
        client->in_used += (size_t)got;
        if (!take_head(client)) return;
    } else if (body_feed(&client->body, buffer, (size_t)got, take_body, client) < 0) {
        die("the answer is not HTTP");
    }
    if (client->body.done) {
        if (!client->event_stream) note_mock(client);
        ended(client, 1);
    }
}

static void serve(struct epoll_event event) {
    struct client *client = event.data.ptr;
    if (client->connecting && event.events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) {
        int error = 0;
        socklen_t size = sizeof error;
        getsockopt(client->fd, SOL_SOCKET, SO_ERROR, &error, &size);
        errno = error;
        if (error != 0) die("connect");
        client->connecting = 0;
    }
    if (event.events & EPOLLOUT) {
        watch(epoll_fd, EPOLL_CTL_MOD, client->fd, EPOLLIN, client);
        if (client->busy) {
            write_key(client);
            push(client);
        }
    }
    if (event.events & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive(client);
}

// With a rate: those that are due ask, or owe one when they wait for an answer.
static void ask_due(void) {
    uint64_t now = now_ns();
    for (int i = 0; i < client_count; i++) {
        struct client *client = &clients[i];
        while (client->due <= now && more_to_ask()) {
            if (client->busy) client->late++;
            else ask(client, client->due);
            client->due += interval;
        }
    }
}

static int by_size(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static void print_samples(const char *name, struct samples *samples) {
    qsort(samples->ns, samples->used, sizeof *samples->ns, by_size);
    size_t n = samples->used;
    printf(", \"%s\": {\"count\": %zu, \"p50_us\": %.1f, \"p99_us\": %.1f, \"max_us\": %.1f}", name, n,
           n ? samples->ns[n / 2] / 1e3 : 0.0, n ? samples->ns[n * 99 / 100] / 1e3 : 0.0, n ? samples->ns[n - 1] / 1e3 : 0.0);
}

static void print_result(uint64_t ended_at) {
    double seconds = (double)(ended_at - started) / 1e9;
    printf("{\"asked\": %llu, \"ok\": %llu, \"failed\": %llu, \"cut\": %llu, \"events\": %llu, \"error_events\": %llu, "
           "\"opening_events\": %llu, \"bytes\": %llu, \"reads\": %llu, \"seconds\": %.6f, \"statuses\": {",
           (unsigned long long)asked, (unsigned long long)ok, (unsigned long long)failed, (unsigned long long)cut,
           (unsigned long long)events_seen, (unsigned long long)error_events,
           (unsigned long long)opening_events, (unsigned long long)bytes,
           (unsigned long long)reads, seconds);
    const char *between = "";
    for (int i = 0; i < STATUSES; i++) {
        if (statuses[i] == 0) continue;
        printf("%s\"%d\": %llu", between, i, (unsigned long long)statuses[i]);
        between = ", ";
    }
    printf("}");
    print_samples("latency", &latency);
    print_samples("first_byte", &first_byte);
    print_samples("event_delay", &event_delay);
    printf("}\n");
}

static void read_request(const char *path) {
    FILE *file = fopen(path, "rb");
    if (file == NULL) die(path);
    request = grown(NULL, 1 << 24);
    request_length = fread(request, 1, 1 << 24, file);
    fclose(file);
    char *at = request;
    while (mark_count < MARKS_MAX && (at = memmem(at, request_length - (size_t)(at - request), KEY_MARK, 8)) != NULL) {
        marks[mark_count++] = (size_t)(at - request);
        at += 8;
    }
}

static void forget_the_last(void) {
    for (int i = 0; i < client_count; i++) {
        free(clients[i].in);
        free(clients[i].event);
    }
    free(clients);
    free(record);
    free(request);
    if (epoll_fd >= 0) close(epoll_fd);
    record = NULL;
    mark_count = 0;
    lasts = stop_at = interval = asked = ok = failed = cut = events_seen = bytes = reads = begun = error_events = opening_events = 0;
    limit = UINT64_MAX;
    keys = 1024;
    hold = said_ready = busy_count = 0;
    memset(statuses, 0, sizeof statuses);
    latency.used = first_byte.used = event_delay.used = 0;
}

static void read_arguments(int count, char **arguments) {
    port = atoi(arguments[1]);
    read_request(arguments[2]);
    client_count = atoi(arguments[3]);
    const char *mode = arguments[4];
    double amount = atof(arguments[5]), rate = count > 6 ? atof(arguments[6]) : 0;
    if (count > 7) keys = strtoull(arguments[7], NULL, 10);
    if (strcmp(mode, "seconds") == 0) {
        lasts = (uint64_t)(amount * 1e9);
    } else if (strcmp(mode, "requests") == 0) {
        limit = (uint64_t)amount;
    } else {
        hold = 1;
        limit = (uint64_t)client_count;
    }
    if (rate > 0) interval = (uint64_t)(1e9 * client_count / rate);
    record_path = count > 8 ? strdup(arguments[8]) : NULL;
    if (record_path != NULL) record = memset(grown(NULL, keys), '-', keys);
}

void load_begin(int count, char **arguments) {
    forget_the_last();
    read_arguments(count, arguments);
    epoll_fd = epoll_create1(0);
    if (epoll_fd < 0) die("epoll");
    address = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    address.sin_port = htons((uint16_t)port);
    clients = calloc((size_t)client_count, sizeof *clients);
    if (clients == NULL) die("calloc");
    for (int i = 0; i < client_count; i++) {
        struct client *client = &clients[i];
        client->fd = -1;
        client->in = grown(NULL, 2 * 65536);
        client->event = grown(NULL, EVENT_BYTES_MAX + 1);
        reconnect(client);
        usleep(CONNECT_GAP_US);
    }
    started = now_ns();
    stop_at = lasts ? started + lasts : 0;
    for (int i = 0; i < client_count; i++) {
        struct client *client = &clients[i];
        client->due = started + 1000000 + interval * (uint64_t)i / (uint64_t)client_count;
        if (interval == 0 && more_to_ask()) ask(client, 0);
    }
}

int load_fd(void) { return epoll_fd; }

int load_step(void) {
    struct epoll_event events[EVENTS_MAX];
    if (busy_count == 0 && !(interval != 0 && more_to_ask())) return 0;
    if (interval != 0) ask_due();
    int found = epoll_wait(epoll_fd, events, EVENTS_MAX, 0);
    if (found < 0 && errno != EINTR) die("epoll_wait");
    for (int i = 0; i < found; i++) serve(events[i]);
    if (!said_ready && (begun >= (uint64_t)client_count || begun >= limit)) {
        said_ready = 1;
        // The delays of streams that ran while others were opened are not counted.
        if (hold) {
            opening_events = event_delay.used;
            event_delay.used = 0;
        }
        printf("ready\n");
        fflush(stdout);
    }
    return 1;
}

void load_end(void) {
    if (record != NULL) {
        FILE *file = fopen(record_path, "wb");
        if (file == NULL || fwrite(record, 1, keys, file) != keys || fclose(file) != 0) die(record_path);
    }
    if (!said_ready) printf("ready\n");
    print_result(now_ns());
    fflush(stdout);
    for (int i = 0; i < client_count; i++) close(clients[i].fd);
    for (int i = 0; i < client_count; i++) clients[i].fd = -1;
}
