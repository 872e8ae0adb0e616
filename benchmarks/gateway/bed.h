// The parts of the test bed, which bed.c runs in turn on one core.

#ifndef BED_H
#define BED_H

#include "wire.h"

// Listen, print the ports; the descriptor to wait on.
int mock_begin(const char *state_path, const char *reports);
// Serve whatever is there now.
void mock_step(void);
// Whether there is nothing to do until the descriptor says so.
int mock_rests(void);

// Begin a run; `arguments` as after "load" in bed.c.
void load_begin(int count, char **arguments);
// Do whatever is there to do now; whether the run goes on.
int load_step(void);
// What to wait on until there is more to do.
int load_fd(void);
// Print what was counted.
void load_end(void);

#endif
