/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Configuration of a program as one table: the parser of its INI file and of its command line,
 * --help, the man page and docs/configuration.md all come from it.
 *
 *     #define FOO_OPTIONS(X)                                                                     \
 *         X("cache", cache_limit, BYTES, "1GiB", "1MiB..", RELOAD, "largest size of the cache")  \
 *         X("log", log_level, ENUM, "info", "error|warn|info|debug", RELOAD, "what is logged")
 *     struct foo_options { FOO_OPTIONS(CONFIG_MEMBER) };
 *     static const struct config_key foo_keys[] = {
 *     #define X(...) CONFIG_ROW(struct foo_options, __VA_ARGS__)
 *         FOO_OPTIONS(X)
 *     #undef X
 *     };
 *
 * In the file: `[cache]`, then `cache_limit = 2GiB`; lines that begin with # or ; are comments. On
 * the command line: `--cache-limit=2GiB` or `--cache-limit 2GiB`; a BOOL also `--name`,
 * `--no-name`. The command line beats the file. PATHS given several times add up; anything else may
 * be set once in the file, and the last one counts on the command line.
 */
#ifndef EMBER_BASE_CONFIG_H
#define EMBER_BASE_CONFIG_H

#include "base/value.h"

enum config_change { CONFIG_RESTART, CONFIG_RELOAD };

struct config_key {
    const char *section, *name; /* name is the struct's member, unique in the table */
    enum value_type type;
    const char *fallback;      /* as the file would have it */
    const char *limits;        /* see value_parse */
    enum config_change change; /* whether a reload applies it or only a restart */
    const char *help;          /* one line, lower case, no full stop */
    size_t offset;
};

/* The member of the struct, and the row of the array, that come from one X(...) of the table. */
#define CONFIG_MEMBER(section, name, type, ...) VALUE_CTYPE_##type name;
#define CONFIG_ROW(tag, section, name, type, fallback, limits, change, help)                       \
    {section, #name, VALUE_##type, fallback, limits, CONFIG_##change, help, offsetof(tag, name)},

struct config_program {
    const char *name, *version;
    const char *summary;      /* "keeps model weights resident and ..." */
    const char *about;        /* paragraphs, may be NULL */
    const char *default_file; /* read when it exists and --config is not given; may be NULL */
    const char *own_file;     /* below $XDG_CONFIG_HOME, or ~/.config without root: instead of
                               * default_file where it exists; may be NULL */
    const char *see_also;
    const struct config_key *keys;
    size_t n_keys;
};

/* What the command line asks for. */
enum config_action {
    CONFIG_RUN,      /* go on */
    CONFIG_HELP,     /* --help, -h */
    CONFIG_VERSION,  /* --version */
    CONFIG_SHOW,     /* --show-config: the effective configuration, as a file */
    CONFIG_MAN,      /* --man */
    CONFIG_MARKDOWN, /* --markdown: docs/configuration.md */
    CONFIG_SAMPLE    /* --sample-config: every key at its default, explained, commented out */
};

/*
 * Sets every member of `options` (a zeroed struct, or one that config_free has seen): defaults,
 * then the file (--config=FILE, which must exist, or own_file, or default_file), then the command
 * line. Returns an enum config_action (what is to be printed by config_print instead of running) or
 * -EINVAL, -ENOENT, ...: the text names file, line and key, what is allowed, and the nearest key.
 * On failure `options` is empty again.
 */
int config_read(const struct config_program *program, int argc, char **argv, void *options,
                struct error *err);

void config_free(const struct config_program *program, void *options); /* idempotent */

/* Single steps of config_read. */
int config_defaults(const struct config_program *program, void *options, struct error *err);
int config_read_file(const struct config_program *program, const char *path, void *options,
                     struct error *err);

/*
 * After a reload: takes over from `fresh` what may change while running (the two values change
 * places) and calls `differs` (may be NULL) for each key whose values differ.
 */
void config_reload(const struct config_program *program, void *options, void *fresh,
                   void (*differs)(const struct config_key *key, void *context), void *context);

/* Appends what `action` asked for. */
void config_print(const struct config_program *program, enum config_action action,
                  const void *options, struct buffer *out);

#endif
