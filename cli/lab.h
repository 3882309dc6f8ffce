/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A private emberd for measuring: its own folder for sockets and cache, started, stopped, killed
 * and restarted as a service manager would, its fd store included. Nothing of it is left when
 * lab_free returns.
 */
#ifndef EMBER_CLI_LAB_H
#define EMBER_CLI_LAB_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/error.h"
#include "base/mem.h"
#include "cli/control.h"

#define LAB_STORE_MAX 64

struct lab {
    char *dir, *socket;
    pid_t pid;
    int notify; /* datagram socket that emberd notifies */
    struct {
        char name[128];
        int fd;
    } store[LAB_STORE_MAX];
    size_t n_store;
    uint64_t exec_ns; /* CLOCK_MONOTONIC just before the last start */
    double ready_ms;  /* from there to READY=1 */
};

struct lab_options {
    const char *model;     /* the default model's folder */
    const char *cache_dir; /* NULL: inside the lab's folder */
    unsigned standby;
    bool compile_never;
    uint64_t kv_bytes; /* of each instance; 0: the daemon's default */
};

/* Where a program of ours is: beside emberctl, or where the build tree and the installation have
 * it. The caller frees it; NULL: nowhere. */
char *lab_program(const char *name);

/*
 * A new folder below $TMPDIR, or /tmp where that is not set; `sockets`: also where it is too long
 * for paths of sockets. NULL when there is none; the caller ends it with lab_dir_remove.
 */
char *lab_dir_new(bool sockets, struct error *err);
/* Removes the folder and all in it, and frees its name; NULL is fine. */
void lab_dir_remove(char *dir);

/* An empty lab; nothing runs yet. The caller ends it with lab_free. */
int lab_new(struct lab *lab, struct error *err);
/* Starts emberd and waits for READY=1. with_store hands the stored descriptors over as systemd
 * does. */
int lab_start(struct lab *lab, const struct lab_options *options, bool with_store,
              struct error *err);
/* Ends emberd: SIGTERM and wait, or SIGKILL. Stored descriptors stay. */
int lab_stop(struct lab *lab, bool kill_it, struct error *err);
void lab_drop_store(struct lab *lab);
/* A control connection to it. */
int lab_control(struct lab *lab, struct control **ret, struct error *err);
/* Resident memory of emberd itself, bytes. */
uint64_t lab_rss(const struct lab *lab);
void lab_free(struct lab *lab);

/* Waits until `standby` instances of the default model are warm. */
int lab_wait_standby(struct control *control, unsigned standby, int timeout_ms, struct error *err);

#endif
