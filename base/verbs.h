/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Verbs: the command line of a tool such as emberctl as one table, from which come the parser, the
 * help that teaches, the man page and the bash completion.
 *
 *     static int run_load(const struct verb_call *call);
 *
 *     static const struct verb_option load_options[] = {
 *         {"name", VALUE_STRING, .help = "serve it under this name instead of the folder's"},
 *         {"wait", VALUE_BOOL, .fallback = "yes", .help = "wait until it is resident"},
 *         {"timeout", VALUE_DURATION, .fallback = "60s", .limits = "1s..", .help = "..."},
 *         {0},
 *     };
 *     static const struct verb verbs[] = {
 *         {"load", "DIR [NAME]", "make a model resident", .options = load_options,
 *          .examples = "load ./models/ember-tiny\tunder the name ember-tiny\n", .run = run_load},
 *         {"cache ls", "", "list cached kernels and graphs", .run = run_cache_ls},
 *         {0},
 *     };
 *
 * Every verb takes --help (-h); the program's `globals` (--json, --socket, ...) are accepted before
 * and after the verb. Options are `--name=value` or `--name value`; a BOOL is `--name`,
 * `--no-name` or `--name=yes|no`. `--` ends options. Two words make a group: `cache ls`;
 * a group's first word may be a verb of its own (`verify DIR`, `verify tokenizer FILE`).
 */
#ifndef EMBER_BASE_VERBS_H
#define EMBER_BASE_VERBS_H

#include "base/value.h"

struct verb_option {
    const char *name; /* without dashes, "dry-run"; NULL ends the list */
    enum value_type type;
    const char *fallback; /* the value when not given, as text; NULL: none (BOOL: no) */
    const char *limits;   /* see value_parse */
    const char *help;     /* one line */
    char letter;          /* short form: 'n' makes -n; 0: none. -n 5, -n5 */
    bool repeat;          /* may be given several times (verb_strings) */
};

struct verb_call;

struct verb {
    const char *name; /* "load" or "cache ls"; NULL ends the list */
    /*
     * Positional arguments as the synopsis prints them; also what the parser counts by:
     * "DIR", "DIR [NAME]", "DIR...", "[MODEL...]". A word that contains DIR or FILE completes to
     * folders or files.
     */
    const char *args;
    const char *summary; /* one line, lower case, no full stop */
    const char *about;   /* what --help says beyond that: plain paragraphs, may be NULL */
    const struct verb_option *options;
    /* Lines "arguments\twhat it does\n"; the program's name is put in front. */
    const char *examples;
    int (*run)(const struct verb_call *call); /* returns the exit code */
};

struct verb_exit {
    int code;
    const char *meaning; /* NULL ends the list */
};

struct verb_program {
    const char *name, *version;
    const char *summary;
    const char *about; /* paragraphs, may be NULL */
    const struct verb_option *globals;
    const struct verb *verbs;
    const struct verb_exit *exits;
    /* For completion: lines "NAME VERB". An argument or option of that name completes to the first
     * column of what the verb prints. May be NULL. */
    const char *named;
    const char *see_also; /* for the man page: "emberd(8), emberd.conf(5)" or NULL */
};

struct verb_call {
    const struct verb_program *program;
    const struct verb *verb;
    int argc; /* positional arguments, NULL behind the last */
    char **argv;
    struct verb_values *values; /* private */
};

/* verb_parse's positive return: print the text, exit with 0. */
#define VERB_TEXT 1

/*
 * Reads a command line. 0: *ret_call is to be run as ret_call->verb->run(ret_call), and freed.
 * VERB_TEXT: `text` holds the answer to --help, --version, `help [VERB]`, --man or
 * --bash-completion. -EINVAL: the text says what was wrong and what is close to it; the
 * conventional exit code is 2. Pointers into argv stay in the call: argv must outlive it.
 */
int verb_parse(const struct verb_program *program, int argc, char **argv,
               struct verb_call **ret_call, struct buffer *text, struct error *err);
void verb_call_free(struct verb_call *call);
DEFINE_CLEANUP(struct verb_call *, verb_call_free)

/*
 * Values of options, the verb's or the global ones: what was given, else the fallback. Values were
 * checked by verb_parse, so these cannot fail; a name that is not in the table, or of another type,
 * is a bug and aborts. A string without fallback is NULL, a number 0, a choice -1.
 */
bool verb_given(const struct verb_call *call, const char *name);
bool verb_flag(const struct verb_call *call, const char *name);
int64_t verb_int(const struct verb_call *call, const char *name);
double verb_real(const struct verb_call *call, const char *name);
uint64_t verb_bytes(const struct verb_call *call, const char *name);
uint64_t verb_duration(const struct verb_call *call, const char *name);  /* nanoseconds */
const char *verb_string(const struct verb_call *call, const char *name); /* STRING, PATH */
int verb_choice(const struct verb_call *call, const char *name);
/* All values of a repeatable STRING or PATH option; *ret_n may be 0. Owned by the call. */
const char *const *verb_strings(const struct verb_call *call, const char *name, size_t *ret_n);

/* Texts. `verb` NULL: the program's own page. */
void verb_help(const struct verb_program *program, const struct verb *verb, struct buffer *out);
void verb_man(const struct verb_program *program, struct buffer *out); /* man(7), section 1 */
void verb_bash_completion(const struct verb_program *program, struct buffer *out);

#endif
