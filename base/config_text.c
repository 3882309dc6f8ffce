/* SPDX-License-Identifier: Apache-2.0 */
/* What a configuration table prints: help, man page, documentation, files. */
#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "base/config.h"
#include "base/text.h"

/* The options that no table lists: config_read understands them itself. */
static const struct {
    const char *term, *meaning;
} own_options[] = {
    {"--config=PATH", "read this configuration file"},
    {"--show-config", "print the configuration in effect, as a file, and exit"},
    {"--sample-config", "print a file with every key explained, and exit"},
    {"-h, --help", "print this text and exit"},
    {"--version", "print the version and exit"},
};

static bool starts_section(const struct config_program *program, size_t k)
{
    return !k || strcmp(program->keys[k].section, program->keys[k - 1].section);
}

static char *option_term(const struct config_key *key)
{
    char *term = x_printf("--%s=%s", key->name, value_word(key->type, key->limits));

    for (char *p = term; *p && *p != '='; p++)
        if (*p == '_')
            *p = '-';
    return term;
}

static char *range_of(const struct config_key *key)
{
    bool range = key->limits && *key->limits && key->type != VALUE_ENUM;
    return range ? x_printf("%s; ", key->limits) : x_strdup("");
}

static void print_help(const struct config_program *program, struct buffer *out)
{
    buffer_printf(out, "%s: %s\n\nUsage: %s [--config=PATH] [--KEY=VALUE...]\n", program->name,
                  program->summary, program->name);
    if (program->about) {
        buffer_printf(out, "\n");
        text_wrap(out, 0, 0, program->about);
    }
    buffer_printf(out, "\nEach option is also a key of the configuration file%s%s.\n",
                  program->default_file ? ", by default " : "",
                  program->default_file ? program->default_file : "");
    for (size_t k = 0; k < program->n_keys; k++) {
        const struct config_key *key = &program->keys[k];
        if (starts_section(program, k))
            buffer_printf(out, "\n[%s]\n", key->section);
        _cleanup_free_ char *term = option_term(key), *range = range_of(key);
        _cleanup_free_ char *meaning = x_printf("%s (%sdefault %s)", key->help, range,
                                                *key->fallback ? key->fallback : "none");
        text_row(out, term, meaning);
    }
    buffer_printf(out, "\nOther options:\n");
    for (size_t i = 0; i < ARRAY_LEN(own_options); i++)
        text_row(out, own_options[i].term, own_options[i].meaning);
}

static void man_text(struct buffer *out, const char *before, const char *text, const char *after)
{
    buffer_printf(out, "%s", before);
    text_man(out, text);
    buffer_printf(out, "%s", after);
}

static void man_head(const struct config_program *program, struct buffer *out)
{
    _cleanup_free_ char *upper = x_strdup(program->name);

    for (char *p = upper; *p; p++)
        *p = (char)toupper((unsigned char)*p);
    buffer_printf(out, ".TH %s 8 \"\" \"%s %s\"\n.SH NAME\n%s \\- ", upper, program->name,
                  program->version, program->name);
    man_text(out, "", program->summary, "\n.SH SYNOPSIS\n");
    buffer_printf(out,
                  ".B %s\n[\\fB\\-\\-config\\fR=\\fIPATH\\fR] "
                  "[\\fB\\-\\-\\fIKEY\\fR=\\fIVALUE\\fR...]\n.SH DESCRIPTION\n",
                  program->name);
    for (const char *p = program->about ? program->about : program->summary; *p;) {
        const char *gap = strstr(p, "\n\n");
        _cleanup_free_ char *part = x_strndup(p, gap ? (size_t)(gap - p) : strlen(p));
        man_text(out, "", part, gap ? "\n.PP\n" : "\n");
        p += strlen(part) + (gap ? 2 : 0);
    }
}

static void print_man(const struct config_program *program, struct buffer *out)
{
    man_head(program, out);
    buffer_printf(out,
                  ".SH CONFIGURATION\nEach key of the configuration file is an option as well. "
                  "The file has [sections] and lines of the form key = value; # and ; begin "
                  "comments. The command line beats the file.\n");
    for (size_t k = 0; k < program->n_keys; k++) {
        const struct config_key *key = &program->keys[k];
        _cleanup_free_ char *term = option_term(key), *range = range_of(key);
        if (starts_section(program, k))
            man_text(out, ".SS [", key->section, "]\n");
        man_text(out, ".TP\n\\fB", term, "\\fR\n");
        man_text(out, "", key->help, ". (");
        man_text(out, "", range, "default ");
        man_text(out, "", *key->fallback ? key->fallback : "none",
                 key->change == CONFIG_RELOAD ? "; a reload applies it)\n" : ")\n");
    }
    buffer_printf(out, ".SH OTHER OPTIONS\n");
    for (size_t i = 0; i < ARRAY_LEN(own_options); i++) {
        man_text(out, ".TP\n\\fB", own_options[i].term, "\\fR\n");
        man_text(out, "", own_options[i].meaning, "\n");
    }
    if (program->default_file) {
        buffer_printf(out, ".SH FILES\n.TP\n");
        man_text(out, "", program->default_file, "\nread when there is no \\-\\-config.\n");
    }
    if (program->own_file) {
        man_text(out, ".TP\n$XDG_CONFIG_HOME/", program->own_file, "\n");
        man_text(out, "", "read instead where it exists; without root also below ~/.config", ".\n");
    }
    if (program->see_also)
        man_text(out, ".SH SEE ALSO\n", program->see_also, "\n");
}

/* A table cell: the bar would end it. */
static void cell(struct buffer *out, const char *text)
{
    for (; *text; text++)
        buffer_printf(out, *text == '|' ? "\\|" : "%c", *text);
}

static void print_markdown(const struct config_program *program, struct buffer *out)
{
    _cleanup_free_ char *own =
        program->own_file ? x_printf("A file of your own, `$XDG_CONFIG_HOME/%s` (without root also "
                                     "below `~/.config`),\nis read instead where it exists. ",
                                     program->own_file)
                          : NULL;

    buffer_printf(out,
                  "<!-- SPDX-License-Identifier: Apache-2.0 -->\n"
                  "<!-- Generated by `%s --markdown`; a test compares them. -->\n"
                  "# Configuration of %s\n\n"
                  "One INI file%s%s%s, or `--config=PATH`; every key is also an option "
                  "(`cache_limit` is `--cache-limit=VALUE`), and the\ncommand line beats the file. "
                  "%s"
                  "Sizes are written `512KiB`, `64MiB`, `2GiB`; times `250ms`, `30s`, `5m`, `1h`. "
                  "In paths `%%t` is the\nfolder for run-time files (`$XDG_RUNTIME_DIR`; else "
                  "`/run`, without root `/tmp/emberd-UID`), `%%C` that for caches "
                  "(`$XDG_CACHE_HOME`; else\n`/var/cache`, without root `~/.cache`), `%%D` the "
                  "program's data (`../share/emberd` from the program, or its source tree), "
                  "`%%%%` a percent sign.\nFor root a `$XDG_RUNTIME_DIR` below `/run/user` does "
                  "not count. Keys "
                  "marked \"reload\" change without a restart (SIGHUP, `systemctl reload`).\n",
                  program->name, program->name, program->default_file ? ", `" : "",
                  program->default_file ? program->default_file : "",
                  program->default_file ? "`" : "", own ? own : "");
    for (size_t k = 0; k < program->n_keys; k++) {
        const struct config_key *key = &program->keys[k];
        _cleanup_free_ char *range = range_of(key);
        if (starts_section(program, k))
            buffer_printf(out,
                          "\n## [%s]\n\n| key | value | default | change by | meaning |\n"
                          "| --- | --- | --- | --- | --- |\n",
                          key->section);
        buffer_printf(out, "| `%s` | ", key->name);
        cell(out, value_word(key->type, key->limits));
        buffer_printf(out, "%s%.*s", *range ? ", " : "", (int)(*range ? strlen(range) - 2 : 0),
                      range);
        buffer_printf(out, " | %s%s%s | %s | ", *key->fallback ? "`" : "none", key->fallback,
                      *key->fallback ? "`" : "",
                      key->change == CONFIG_RELOAD ? "reload" : "restart");
        cell(out, key->help);
        buffer_printf(out, " |\n");
    }
}

/* Wrapped, since readers of the file have lines of a certain length. */
static void comment(struct buffer *out, const char *text)
{
    size_t start;

    buffer_printf(out, "# ");
    start = out->len;
    text_wrap(out, 2, 2, text);
    for (size_t i = start; i + 2 < out->len; i++)
        if (out->data[i] == '\n') /* the indent of two behind it */
            out->data[i + 1] = '#';
}

static void print_sample(const struct config_program *program, struct buffer *out)
{
    buffer_printf(out,
                  "# SPDX-License-Identifier: Apache-2.0\n"
                  "# Configuration of %s: every key, at its default. Remove the # to change one.\n",
                  program->name);
    for (size_t k = 0; k < program->n_keys; k++) {
        const struct config_key *key = &program->keys[k];
        _cleanup_free_ char *range = range_of(key);
        if (starts_section(program, k))
            buffer_printf(out, "\n[%s]\n", key->section);
        _cleanup_free_ char *text =
            x_printf("%s (%s%s)", key->help, range, value_word(key->type, key->limits));
        comment(out, text);
        buffer_printf(out, "#%s =%s%s\n", key->name, *key->fallback ? " " : "", key->fallback);
    }
}

static void print_effective(const struct config_program *program, const void *options,
                            struct buffer *out)
{
    for (size_t k = 0; k < program->n_keys; k++) {
        const struct config_key *key = &program->keys[k];
        union value v = {0};
        if (starts_section(program, k))
            buffer_printf(out, "%s[%s]\n", k ? "\n" : "", key->section);
        memcpy(&v, (const char *)options + key->offset, value_size(key->type));
        buffer_printf(out, "%s = ", key->name);
        value_print(key->type, key->limits, &v, out);
        buffer_printf(out, "\n");
    }
}

void config_print(const struct config_program *program, enum config_action action,
                  const void *options, struct buffer *out)
{
    switch (action) {
    case CONFIG_RUN:
        break;
    case CONFIG_HELP:
        print_help(program, out);
        break;
    case CONFIG_VERSION:
        buffer_printf(out, "%s %s\n", program->name, program->version);
        break;
    case CONFIG_SHOW:
        print_effective(program, options, out);
        break;
    case CONFIG_MAN:
        print_man(program, out);
        break;
    case CONFIG_MARKDOWN:
        print_markdown(program, out);
        break;
    case CONFIG_SAMPLE:
        print_sample(program, out);
        break;
    }
}
