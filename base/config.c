/* SPDX-License-Identifier: Apache-2.0 */
/* Reading configuration; config_text.c has what is printed. */
#include "base/config.h"

#include <assert.h>
#include <errno.h>
#include <ini.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fd.h"

#define FILE_MAX (1u << 20)

/* One pass over one source: where it stands, and which keys it has set. */
struct source {
    const struct config_program *program;
    void *options;
    const char *path;    /* the file; NULL for the command line */
    const char *start;   /* the line that was read last */
    const char *at;      /* the file's text from here on is unread */
    int line, bad_line;  /* bad_line: that of the first error, 0 for none yet */
    bool too_long;       /* the line at bad_line is longer than the reader's room */
    bool *seen;          /* one for each key */
    const char *section; /* what next_name offers names from; NULL for all */
    struct error *err;
};

static void *member(const struct config_key *key, void *options)
{
    return (char *)options + key->offset;
}

static void store(const struct config_key *key, const union value *value, void *options)
{
    memcpy(member(key, options), value, value_size(key->type));
}

static void clear(const struct config_key *key, void *options)
{
    union value v = {0};

    memcpy(&v, member(key, options), value_size(key->type));
    value_free(key->type, &v);
    store(key, &v, options);
}

/* True for "cache_limit" as for "cache-limit". */
static bool same_name(const char *key, const char *given, size_t len)
{
    if (strlen(key) != len)
        return false;
    for (size_t i = 0; i < len; i++)
        if (key[i] != given[i] && !(key[i] == '_' && given[i] == '-'))
            return false;
    return true;
}

static const struct config_key *find(const struct config_program *program, const char *name,
                                     size_t len)
{
    for (size_t i = 0; i < program->n_keys; i++)
        if (same_name(program->keys[i].name, name, len))
            return &program->keys[i];
    return NULL;
}

/* For value_nearest: the names of a section's keys, or of all. */
static const char *next_name(const void *context, size_t i)
{
    const struct source *s = context;

    for (size_t k = 0; k < s->program->n_keys; k++) {
        const struct config_key *key = &s->program->keys[k];
        if ((!s->section || !strcmp(key->section, s->section)) && i-- == 0)
            return key->name;
    }
    return NULL;
}

static bool is_first_of_section(const struct config_program *program, size_t k)
{
    for (size_t i = 0; i < k; i++)
        if (!strcmp(program->keys[i].section, program->keys[k].section))
            return false;
    return true;
}

static int unknown_section(const struct config_program *program, const char *section,
                           const char *origin, struct error *err)
{
    _cleanup_(buffer_free) struct buffer known = {0};

    for (size_t k = 0; k < program->n_keys; k++)
        if (is_first_of_section(program, k))
            buffer_printf(&known, "%s[%s]", known.len ? ", " : "", program->keys[k].section);
    if (!*section)
        return error_set(err, EINVAL, "%s: a key before the first section: there are %s", origin,
                         known.data);
    return error_set(err, EINVAL, "%s: unknown section [%.64s]: there are %s", origin, section,
                     known.data);
}

static bool has_section(const struct config_program *program, const char *section)
{
    for (size_t k = 0; k < program->n_keys; k++)
        if (!strcmp(program->keys[k].section, section))
            return true;
    return false;
}

static int unknown_key(const struct config_program *program, const char *section, const char *name,
                       const char *origin, struct error *err)
{
    struct source near_source = {.program = program, .section = section};
    _cleanup_free_ char *word = x_strndup(name, 64);

    for (char *p = word; *p; p++)
        if (*p == '-')
            *p = '_';
    const char *near = value_nearest(word, next_name, &near_source);
    near_source.section = NULL;
    if (!near)
        near = value_nearest(word, next_name, &near_source);
    if (section)
        return error_set(err, EINVAL, "%s: unknown key \"%.64s\" in [%s]%s%s%s", origin, name,
                         section, near ? ": did you mean \"" : ": ", near ? near : "see --help",
                         near ? "\"?" : "");
    _cleanup_free_ char *option = x_strdup(near ? near : "help");
    for (char *p = option; *p; p++)
        if (*p == '_')
            *p = '-';
    return error_set(err, EINVAL, "%s: unknown option --%.64s: %s--%s%s", origin, name,
                     near ? "did you mean " : "", option, near ? "?" : " lists them");
}

static int set_key(const struct config_key *key, const char *text, const char *origin, bool append,
                   void *options, struct error *err)
{
    union value v = {0};

    int r = value_parse(key->type, key->limits, text, &v, err);
    if (r < 0) {
        error_prefix(err, "%s: %s", origin, key->name);
        return r;
    }
    char ***list = member(key, options);
    if (append && key->type == VALUE_PATHS && *list) {
        size_t n = 0, m = 0;
        while ((*list)[n])
            n++;
        while (v.list[m])
            m++;
        *list = x_realloc(*list, (n + m + 1) * sizeof(char *));
        memcpy(*list + n, v.list, (m + 1) * sizeof(char *));
        free(v.list);
        return 0;
    }
    clear(key, options);
    store(key, &v, options);
    return 0;
}

static int lookup(const struct config_program *program, const char *section, const char *name,
                  const char *origin, const struct config_key **ret_key, struct error *err)
{
    const struct config_key *key = find(program, name, strlen(name));

    if (section && !has_section(program, section))
        return unknown_section(program, section, origin, err);
    if (!key || (section && strcmp(key->name, name)))
        return unknown_key(program, section, name, origin, err);
    if (section && strcmp(key->section, section))
        return error_set(err, EINVAL, "%s: %s belongs in [%s], not in [%s]", origin, key->name,
                         key->section, section);
    *ret_key = key;
    return 0;
}

int config_defaults(const struct config_program *program, void *options, struct error *err)
{
    for (size_t k = 0; k < program->n_keys; k++) {
        const struct config_key *key = &program->keys[k];
        int r = set_key(key, key->fallback, "default", false, options, err);
        if (r < 0)
            return r;
    }
    return 0;
}

/* inih's reader: one line at a time out of memory, counting, refusing what does not fit. */
static char *read_line(char *line, int room, void *stream)
{
    struct source *s = stream;
    size_t len = strcspn(s->at, "\n");

    if (!*s->at)
        return NULL;
    len += s->at[len] == '\n';
    s->line++;
    s->start = s->at;
    if (len >= (size_t)room && !s->bad_line) {
        s->bad_line = s->line;
        s->too_long = true;
    }
    size_t n = MIN(len, (size_t)room - 1);
    memcpy(line, s->at, n);
    line[n] = 0;
    s->at += len;
    return line;
}

/* inih's callback: 1 when the value is good. Only the first error of a file is kept. */
static int on_value(void *context, const char *section, const char *name, const char *text)
{
    struct source *s = context;
    const struct config_key *key = NULL;

    if (s->bad_line)
        return 0;
    _cleanup_free_ char *origin = x_printf("%s:%d", s->path, s->line);
    int r = lookup(s->program, section, name, origin, &key, s->err);
    if (r == 0) {
        bool *seen = &s->seen[key - s->program->keys];
        if (*seen && key->type != VALUE_PATHS)
            r = error_set(s->err, EINVAL, "%s: %s is set for the second time%s", origin, name,
                          strchr(" \t", *s->start) ? " (an indented line goes on with the key "
                                                     "before)"
                                                   : "");
        else
            r = set_key(key, text, origin, *seen, s->options, s->err);
        *seen = true;
    }
    if (r < 0)
        s->bad_line = s->line;
    return r == 0;
}

int config_read_file(const struct config_program *program, const char *path, void *options,
                     struct error *err)
{
    _cleanup_free_ char *text = NULL;
    size_t len;

    int r = fd_read_file(path, FILE_MAX, &text, &len, err);
    if (r < 0)
        return r;
    if (strlen(text) != len)
        return error_set(err, EINVAL, "%s: a NUL byte at offset %zu: not a text file", path,
                         strlen(text));
    _cleanup_free_ bool *seen = x_alloc(program->n_keys * sizeof *seen);
    struct source s = {
        .program = program, .options = options, .path = path, .at = text, .seen = seen, .err = err};
    int line = ini_parse_stream(read_line, &s, on_value, &s);
    if (line == 0 && !s.bad_line)
        return 0;
    if (s.bad_line && (line <= 0 || s.bad_line <= line)) {
        if (s.too_long)
            return error_set(err, EINVAL,
                             "%s:%d: the line is too long; give a list of paths in "
                             "several lines",
                             path, s.bad_line);
        return -EINVAL; /* on_value has set the text */
    }
    return error_set(err, EINVAL, "%s:%d: neither [section] nor key = value", path, line);
}

/* --show-config and its like. */
static enum config_action action_of(const char *arg)
{
    static const struct {
        const char *arg;
        enum config_action action;
    } actions[] = {
        {"--help", CONFIG_HELP},
        {"-h", CONFIG_HELP},
        {"--version", CONFIG_VERSION},
        {"--show-config", CONFIG_SHOW},
        {"--man", CONFIG_MAN},
        {"--markdown", CONFIG_MARKDOWN},
        {"--sample-config", CONFIG_SAMPLE},
    };
    for (size_t i = 0; i < ARRAY_LEN(actions); i++)
        if (!strcmp(arg, actions[i].arg))
            return actions[i].action;
    return CONFIG_RUN;
}

/*
 * What stands at argv[*i] for an option named up to `equals`: its value, after '=' or as the next
 * word (*i moves on), or the yes or no that a BOOL stands for by itself.
 */
static const char *value_of(const struct config_key *key, int argc, char **argv, int *i,
                            const char *equals)
{
    if (equals)
        return equals + 1;
    if (key && key->type == VALUE_BOOL)
        return "yes";
    return *i + 1 < argc ? argv[++*i] : NULL;
}

static int set_option(struct source *s, int argc, char **argv, int *i)
{
    const char *name = argv[*i] + 2, *equals = strchr(name, '='), *origin = "command line";
    size_t len = equals ? (size_t)(equals - name) : strlen(name);
    const struct config_key *key = find(s->program, name, len);

    if (!key && len > 3 && !strncmp(name, "no-", 3) && !equals) {
        key = find(s->program, name + 3, len - 3);
        if (key && key->type == VALUE_BOOL)
            return set_key(key, "no", origin, false, s->options, s->err);
        key = NULL;
    }
    if (!key) {
        _cleanup_free_ char *word = x_strndup(name, len);
        return unknown_key(s->program, NULL, word, origin, s->err);
    }
    const char *text = value_of(key, argc, argv, i, equals);
    if (!text)
        return error_set(s->err, EINVAL, "%s: --%s needs a value: %s", origin, name,
                         value_word(key->type, key->limits));
    bool *seen = &s->seen[key - s->program->keys];
    bool again = *seen;
    *seen = true;
    return set_key(key, text, origin, again, s->options, s->err);
}

/* Whether argv[*i] is --config; *ret_path is then its value (NULL: missing). */
static bool is_config(int argc, char **argv, int *i, const char **ret_path)
{
    const char *arg = argv[*i];

    if (strncmp(arg, "--config", 8) || (arg[8] && arg[8] != '='))
        return false;
    *ret_path = value_of(NULL, argc, argv, i, arg[8] ? arg + 8 : NULL);
    return true;
}

/* The user's own file: below $XDG_CONFIG_HOME, without root also ~/.config. NULL: none. */
static char *own_file(const struct config_program *program)
{
    const char *xdg = getenv("XDG_CONFIG_HOME"), *home = getenv("HOME");

    if (!program->own_file)
        return NULL;
    if (xdg && *xdg == '/')
        return x_printf("%s/%s", xdg, program->own_file);
    if (geteuid() != 0 && home && *home == '/')
        return x_printf("%s/.config/%s", home, program->own_file);
    return NULL;
}

/* The file to read: that of --config, else the first of the usual ones that is there. */
static int read_files(const struct config_program *program, int argc, char **argv, void *options,
                      struct error *err)
{
    const char *path = NULL;
    bool given = false;

    for (int i = 1; i < argc; i++)
        given |= is_config(argc, argv, &i, &path);
    if (given && (!path || !*path))
        return error_set(err, EINVAL, "command line: --config needs a value: PATH");
    if (given)
        return config_read_file(program, path, options, err);
    _cleanup_free_ char *own = own_file(program);
    int r = own ? config_read_file(program, own, options, err) : -ENOENT;
    if (r == -ENOTDIR) /* services have /dev/null as their home */
        r = -ENOENT;
    if (r == -ENOENT && program->default_file)
        r = config_read_file(program, program->default_file, options, err);
    return r == -ENOENT ? 0 : r;
}

static int read_options(const struct config_program *program, int argc, char **argv, void *options,
                        struct error *err)
{
    _cleanup_free_ bool *seen = x_alloc(program->n_keys * sizeof *seen);
    struct source s = {.program = program, .options = options, .seen = seen, .err = err};
    enum config_action action = CONFIG_RUN, asked;
    const char *path;

    for (int i = 1; i < argc; i++) {
        if ((asked = action_of(argv[i]))) {
            action = asked;
            continue;
        }
        if (is_config(argc, argv, &i, &path))
            continue;
        if (strncmp(argv[i], "--", 2) || !argv[i][2])
            return error_set(err, EINVAL,
                             "command line: unexpected \"%.64s\": options are written "
                             "--name=value, --help lists them",
                             argv[i]);
        int r = set_option(&s, argc, argv, &i);
        if (r < 0)
            return r;
    }
    return (int)action;
}

int config_read(const struct config_program *program, int argc, char **argv, void *options,
                struct error *err)
{
    config_free(program, options);
    int r = config_defaults(program, options, err);
    if (r == 0 && argc == 2 && action_of(argv[1]) && action_of(argv[1]) != CONFIG_SHOW)
        return (int)action_of(argv[1]); /* --help works with a broken file, too */
    if (r == 0)
        r = read_files(program, argc, argv, options, err);
    if (r == 0)
        r = read_options(program, argc, argv, options, err);
    if (r < 0)
        config_free(program, options);
    return r;
}

void config_free(const struct config_program *program, void *options)
{
    for (size_t k = 0; k < program->n_keys; k++)
        clear(&program->keys[k], options);
}

static bool equal(const struct config_key *key, void *a, void *b)
{
    union value v = {0}, w = {0};
    size_t i = 0;

    memcpy(&v, member(key, a), value_size(key->type));
    memcpy(&w, member(key, b), value_size(key->type));
    if (key->type == VALUE_STRING || key->type == VALUE_PATH)
        return !strcmp(v.s, w.s);
    if (key->type != VALUE_PATHS)
        return v.u == w.u; /* the unused bytes of both are 0 */
    while (v.list[i] && w.list[i] && !strcmp(v.list[i], w.list[i]))
        i++;
    return !v.list[i] && !w.list[i];
}

void config_reload(const struct config_program *program, void *options, void *fresh,
                   void (*differs)(const struct config_key *key, void *context), void *context)
{
    for (size_t k = 0; k < program->n_keys; k++) {
        const struct config_key *key = &program->keys[k];
        if (equal(key, options, fresh))
            continue;
        if (key->change == CONFIG_RELOAD) {
            union value a = {0}, b = {0};
            size_t size = value_size(key->type);
            memcpy(&a, member(key, options), size);
            memcpy(&b, member(key, fresh), size);
            store(key, &b, options);
            store(key, &a, fresh);
        }
        if (differs)
            differs(key, context);
    }
}
