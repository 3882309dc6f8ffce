/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A child process of the manager: its whole life is in child.c.
 *
 *   child_start   vfork and exec; descriptor 3 of the child is its end of a SOCK_SEQPACKET pair,
 *                 stdout and stderr are a pipe to us, stdin is /dev/null; it dies when we die,
 *                 before us when the host is out of memory, and not by a terminal's Ctrl-C
 *   child_send    messages of proto/ember/v1/internal.proto, with descriptors
 *   child_deadline  it is killed when it has not reached its next mark by then
 *   child_stop    end of stream on descriptor 3, SIGKILL after a grace; child_kill: at once
 *   exited        the last callback: reaped, with its last words; the child is freed behind it
 *
 * Nothing here blocks but the exec itself (vfork: a fraction of a millisecond).
 */
#ifndef EMBER_DAEMON_MANAGER_CHILD_H
#define EMBER_DAEMON_MANAGER_CHILD_H

#include <event2/event.h>
#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/error.h"

struct child;

struct child_handlers {
    int nice; /* of the process: 0 for what somebody waits for */
    /* A message; a descriptor that the owner keeps is taken out of fds (set to -1). */
    void (*message)(void *owner, const uint8_t *data, size_t len, int *fds, size_t n_fds);
    /* The process has gone and everything it wrote has been read. `why` says how it ended;
     * -EPIPE: by itself, with status 0. */
    void (*exited)(void *owner, const struct error *why);
};

/*
 * Starts `program` (looked for in $EMBER_LIBEXEC, or beside our own executable and in the build
 * tree's neighbouring folders). -ENOEXEC: not there; -EAGAIN, -EMFILE, -ENOMEM: the host is short.
 */
int child_start(struct event_base *base, const char *program, const char *label,
                const struct child_handlers *handlers, void *owner, struct child **ret,
                struct error *err);

/* 0, or a negative errno after which the child is on its way out (`exited` will come). */
int child_send(struct child *child, const ProtobufCMessage *message, const int *fds, size_t n_fds);

/* Kills the child unless another call moves the deadline: `missing` completes "no ... within". 0:
 * none. */
void child_deadline(struct child *child, uint64_t ns, const char *missing);

/*
 * What it died of, in its own words (ChildFailed) or in ours; the first one said counts. A crash
 * (SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT) that nobody has explained has the code EFAULT.
 */
void child_last_words(struct child *child, int errnum, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

void child_stop(struct child *child, uint64_t grace_ns);
void child_kill(struct child *child);

pid_t child_pid(const struct child *child);
uint64_t child_forked_ns(const struct child *child); /* CLOCK_MONOTONIC just before the fork */

/* The file that child_start would execute; false when there is none. */
bool child_program(const char *program, char *path, size_t room);

#endif
