// The test bed of the routers: load generator and mock replicas in one thread, so that one core drives both without a switch.
//
//     bed STATE REPORTS [rests]
//
// STATE: a file of 64-bit words, mapped: what the harness sets and what the mocks count (enums in mock.c); the harness reads it at
// any time. REPORTS: two lines per mock replica for its GET /replica/events: a report, and its trajectories. Prints the ports on one line. Then each line of
// standard input is a run of load, one at a time:
//
//     load PORT REQUEST CONNECTIONS MODE AMOUNT [RATE] [KEYS] [RECORD]
//
// REQUEST: a file with one whole request; each KEY_MARK in it becomes the request's key, 8 digits, from 0 up, modulo KEYS.
// MODE AMOUNT: `seconds S`: each connection sends its next request when the last was answered (with RATE above 0: RATE requests a
// second over all connections, timed from when each was due), none any more after S seconds; `requests N`: N in all; `hold N`: a
// request per connection, nothing more. RECORD: a file that gets a character for each key: which mock answered it last.
// Prints `ready` when every connection has an answer begun, then one JSON object when all are done. Ends with its parent.
// Always holds: while a load runs it polls and never sleeps, so that a router pays for its own work and not for waking this core,
// which on virtual machines costs more than many a request; without a load it sleeps. One that `rests` sleeps during a load, too:
// for routers that share its core.

#include "bed.h"

#include <poll.h>

#define ARGUMENTS_MAX 16
#define LINE_MAX_BYTES 8192
#define REST_MS 1  // the longest rest

static void begin_load(char *line) {
    char *arguments[ARGUMENTS_MAX], *rest = NULL;
    int count = 0;
    for (char *word = strtok_r(line, " \n", &rest); word != NULL && count < ARGUMENTS_MAX; word = strtok_r(NULL, " \n", &rest))
        arguments[count++] = word;
    if (count < 6) {
        fprintf(stderr, "load PORT REQUEST CONNECTIONS seconds|requests|hold AMOUNT [RATE] [KEYS] [RECORD]\n");
        exit(2);
    }
    load_begin(count, arguments);
}

int main(int count, char **arguments) {
    char line[LINE_MAX_BYTES];
    int rests = count == 4 && strcmp(arguments[3], "rests") == 0;
    if (count != 3 && !rests) {
        fprintf(stderr, "usage: bed STATE REPORTS [rests]\n");
        return 2;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    all_descriptors();
    setvbuf(stdin, NULL, _IONBF, 0);
    struct pollfd waiting[2] = {{.fd = mock_begin(arguments[1], arguments[2]), .events = POLLIN}, {.fd = 0, .events = POLLIN}};
    for (;;) {
        if (poll(waiting, 2, mock_rests() ? -1 : 0) < 0 && errno != EINTR) die("poll");
        mock_step();
        if (waiting[1].revents == 0) continue;
        if (fgets(line, sizeof line, stdin) == NULL) return 0;
        begin_load(line);
        while (load_step()) {
            struct pollfd both[2] = {{.fd = waiting[0].fd, .events = POLLIN}, {.fd = load_fd(), .events = POLLIN}};
            if (rests && poll(both, 2, REST_MS) < 0 && errno != EINTR) die("poll");
            mock_step();
        }
        load_end();
    }
}
