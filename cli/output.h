/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What emberctl prints. A verb makes one JSON value; with --json it is printed as it is, without it
 * as a table or as lines, from the same value: nothing can be in the one and not in the other.
 */
#ifndef EMBER_CLI_OUTPUT_H
#define EMBER_CLI_OUTPUT_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "base/verbs.h"

/* Exit codes of emberctl; the table in main.c explains them to people. */
enum cli_exit {
    CLI_OK = 0,
    CLI_FAILED = 1,    /* what was asked for failed or did not pass */
    CLI_USAGE = 2,     /* the command line is wrong */
    CLI_NO_DAEMON = 3, /* emberd cannot be reached */
    CLI_NOT_FOUND = 4, /* no such model, instance, file or folder */
    CLI_NO_ROOM = 5,   /* not enough memory or disk */
    CLI_INTERRUPTED = 130
};

enum column_kind {
    COLUMN_TEXT,
    COLUMN_NUMBER,
    COLUMN_BYTES,
    COLUMN_MS,
    COLUMN_SECONDS,
    COLUMN_ERROR,
    COLUMN_CHANGE /* a share of what was: percent, with a sign */
};

struct column {
    const char *key, *title; /* key NULL ends the list; "a.b" is b of the object a */
    enum column_kind kind;
};

bool cli_json(const struct verb_call *call);

/* The choices of --isa, and the one that was made; NULL: none. */
#define CLI_ISAS "baseline|avx2|avx512|avx512-vnni|amx"
const char *cli_isa(const struct verb_call *call);

/* Prints a list of objects; `empty` is said instead of an empty table. Returns CLI_OK; frees the
 * list. */
int cli_print_list(const struct verb_call *call, json_t *list, const struct column *columns,
                   const char *empty);
/* Prints one object, a line a column. */
int cli_print_object(const struct verb_call *call, json_t *object, const struct column *columns);
/* Prints any JSON value on stdout, as --json does; frees it. */
void cli_print_json(json_t *value);

/* Prints the error (as {"error": {...}} with --json) to stderr; returns the exit code it maps to.
 */
int cli_fail(const struct verb_call *call, const struct error *err);
/* That exit code alone: of a verb whose output says what went wrong. */
int cli_exit(const struct error *err);
/* Of a verb with several arguments: CLI_FAILED when one of them failed, else the first exit code
 * that is not CLI_OK. */
int cli_worse(int a, int b);
/* The same as cli_fail for a command line that verb_parse has refused; returns CLI_USAGE. */
int cli_fail_usage(int argc, char **argv, const struct error *err);

/* "1.2 GiB", "3.4 ms": into buf, returned. */
const char *cli_bytes(uint64_t bytes, char buf[24]);
const char *cli_ms(double ms, char buf[24]);

/* A progress bar on stderr, only where that is a terminal and --json is not given. */
struct progress {
    bool on, drawn;
    const char *label;
    uint64_t started_ns, drawn_ns;
};
void progress_begin(struct progress *p, const struct verb_call *call, const char *label);
void progress_update(struct progress *p, const char *phase, uint64_t done, uint64_t total);
void progress_end(struct progress *p);
/* Begins with what is said while an instance of `model` (NULL: the default one) is waited for. */
void progress_wait(struct progress *p, const struct verb_call *call, const char *model);

/* Set by SIGINT and SIGTERM once cli_catch_interrupts was called: long work looks at it. */
extern volatile int cli_interrupted;
void cli_catch_interrupts(void);

/* One line: what the machine can do, as the benches that hold kernels against it print it. */
struct kernels_bench_machine;
void print_machine(const struct kernels_bench_machine *machine);

#endif
