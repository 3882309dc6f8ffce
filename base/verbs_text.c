/* SPDX-License-Identifier: Apache-2.0 */
/* What a verb table prints: help, man page, bash completion. */
#include <ctype.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/text.h"
#include "base/verbs_private.h"

/* What is done without being asked: its option is the one that stops it. */
static bool negated(const struct verb_option *o)
{
    return o->type == VALUE_BOOL && o->fallback && !strcmp(o->fallback, "yes");
}

/* "--name=TEXT", "--quiet", "--no-wait" when yes is what it is without being asked. */
static void option_term(const struct verb_option *o, char *out, size_t room)
{
    const char *word = value_word(o->type, o->limits);

    snprintf(out, room, "--%s%s%s%s", negated(o) ? "no-" : "", o->name,
             o->type == VALUE_BOOL ? "" : "=", o->type == VALUE_BOOL ? "" : word);
}

/* The help line of an option with its default, range and repeatability behind. */
static char *option_meaning(const struct verb_option *o)
{
    bool shown = o->fallback && *o->fallback && o->type != VALUE_BOOL;
    bool range = o->limits && *o->limits && o->type != VALUE_ENUM;

    return x_printf("%s%s%s%s%s%s%s%s%s", negated(o) ? "do not " : "", o->help ? o->help : "",
                    o->repeat ? "; may be repeated" : "", shown || range ? " (" : "",
                    range ? o->limits : "", shown && range ? "; " : "", shown ? "default " : "",
                    shown ? o->fallback : "", shown || range ? ")" : "");
}

static void option_rows(const struct verb_option *options, struct buffer *out)
{
    for (; options && options->name; options++) {
        char term[128], row[140];
        _cleanup_free_ char *meaning = option_meaning(options);
        option_term(options, term, sizeof term);
        if (options->letter)
            snprintf(row, sizeof row, "-%c, %s", options->letter, term);
        else
            snprintf(row, sizeof row, "    %s", term);
        text_row(out, row, meaning);
    }
}

static void exit_rows(const struct verb_program *program, struct buffer *out)
{
    if (!program->exits)
        return;
    buffer_printf(out, "\nExit status:\n");
    for (const struct verb_exit *e = program->exits; e->meaning; e++) {
        char code[16];
        snprintf(code, sizeof code, "%d", e->code);
        buffer_printf(out, "  %-4s", code);
        text_wrap(out, 6, 6, e->meaning);
    }
}

/* Calls f for each line "arguments\tmeaning" of an examples text. */
static void each_example(const char *examples,
                         void (*f)(const char *arguments, const char *meaning,
                                   const struct verb_program *, struct buffer *),
                         const struct verb_program *program, struct buffer *out)
{
    while (examples && *examples) {
        size_t line = strcspn(examples, "\n"), term = strcspn(examples, "\t\n");
        _cleanup_free_ char *arguments = x_strndup(examples, term);
        _cleanup_free_ char *meaning =
            term < line ? x_strndup(examples + term + 1, line - term - 1) : x_strdup("");
        f(arguments, meaning, program, out);
        examples += line + (examples[line] == '\n');
    }
}

static void help_example(const char *arguments, const char *meaning,
                         const struct verb_program *program, struct buffer *out)
{
    buffer_printf(out, "  %s %s\n", program->name, arguments);
    if (*meaning) {
        buffer_printf(out, "      ");
        text_wrap(out, 6, 6, meaning);
    }
}

static void verb_rows(const struct verb_program *program, const char *group, struct buffer *out)
{
    for (const struct verb *v = program->verbs; v->name; v++) {
        char term[128];
        if (group && !verb_in_group(v->name, group, NULL))
            continue;
        snprintf(term, sizeof term, "%s%s%s", v->name, v->args && *v->args ? " " : "",
                 v->args ? v->args : "");
        text_row(out, term, v->summary);
    }
}

static void program_help(const struct verb_program *program, struct buffer *out)
{
    buffer_printf(out, "%s: %s\n\nUsage: %s [OPTION...] VERB [ARGUMENT...]\n", program->name,
                  program->summary, program->name);
    if (program->about) {
        buffer_printf(out, "\n");
        text_wrap(out, 0, 0, program->about);
    }
    buffer_printf(out, "\nVerbs (\"%s VERB --help\" explains one, with examples):\n",
                  program->name);
    verb_rows(program, NULL, out);
    buffer_printf(out, "\nOptions:\n");
    option_rows(program->globals, out);
    text_row(out, "-h, --help", "this text, or a verb's own");
    text_row(out, "    --version", "the version");
    exit_rows(program, out);
}

void verb_help(const struct verb_program *program, const struct verb *verb, struct buffer *out)
{
    if (!verb) {
        program_help(program, out);
        return;
    }
    buffer_printf(out, "%s %s: %s\n\nUsage: %s %s%s%s%s\n", program->name, verb->name,
                  verb->summary, program->name, verb->name, verb->options ? " [OPTION...]" : "",
                  verb->args && *verb->args ? " " : "", verb->args ? verb->args : "");
    if (verb->about) {
        buffer_printf(out, "\n");
        text_wrap(out, 0, 0, verb->about);
    }
    if (verb->options) {
        buffer_printf(out, "\nOptions:\n");
        option_rows(verb->options, out);
    }
    buffer_printf(out, "\nOptions of every verb:\n");
    option_rows(program->globals, out);
    text_row(out, "-h, --help", "this text");
    if (verb->examples) {
        buffer_printf(out, "\nExamples:\n");
        each_example(verb->examples, help_example, program, out);
    }
    exit_rows(program, out);
}

void verb_group_help(const struct verb_program *program, const char *group, struct buffer *out)
{
    buffer_printf(out, "Usage: %s %s VERB [ARGUMENT...]\n\nVerbs:\n", program->name, group);
    verb_rows(program, group, out);
}

static void man_options(const struct verb_option *options, struct buffer *out)
{
    for (; options && options->name; options++) {
        char term[128];
        _cleanup_free_ char *meaning = option_meaning(options);
        option_term(options, term, sizeof term);
        buffer_printf(out, ".TP\n\\fB");
        if (options->letter)
            buffer_printf(out, "\\-%c\\fR, \\fB", options->letter);
        text_man(out, term);
        buffer_printf(out, "\\fR\n");
        text_man(out, meaning);
        buffer_printf(out, "\n");
    }
}

/* Paragraphs: a blank line in the text becomes .PP. */
static void man_paragraphs(const char *text, struct buffer *out)
{
    while (text && *text) {
        const char *gap = strstr(text, "\n\n");
        size_t len = gap ? (size_t)(gap - text) : strlen(text);
        _cleanup_free_ char *part = x_strndup(text, len);
        text_man(out, part);
        buffer_printf(out, gap ? "\n.PP\n" : "\n");
        text += len + (gap ? 2 : 0);
    }
}

static void man_example(const char *arguments, const char *meaning,
                        const struct verb_program *program, struct buffer *out)
{
    buffer_printf(out, *meaning ? ".TP\n\\fB" : ".PP\n\\fB");
    text_man(out, program->name);
    buffer_printf(out, " ");
    text_man(out, arguments);
    buffer_printf(out, "\\fR\n");
    if (*meaning) {
        text_man(out, meaning);
        buffer_printf(out, "\n");
    }
}

static void man_verb(const struct verb_program *program, const struct verb *v, struct buffer *out)
{
    buffer_printf(out, ".SS ");
    text_man(out, v->name);
    if (v->args && *v->args) {
        buffer_printf(out, " ");
        text_man(out, v->args);
    }
    buffer_printf(out, "\n");
    text_man(out, v->summary);
    buffer_printf(out, ".\n");
    if (v->about) {
        buffer_printf(out, ".PP\n");
        man_paragraphs(v->about, out);
    }
    man_options(v->options, out);
    each_example(v->examples, man_example, program, out);
}

void verb_man(const struct verb_program *program, struct buffer *out)
{
    char upper[64];
    size_t n = 0;

    for (; program->name[n] && n + 1 < sizeof upper; n++)
        upper[n] = (char)toupper((unsigned char)program->name[n]);
    upper[n] = 0;
    buffer_printf(out, ".TH %s 1 \"\" \"emberd %s\"\n.SH NAME\n%s \\- ", upper, program->version,
                  program->name);
    text_man(out, program->summary);
    buffer_printf(out,
                  "\n.SH SYNOPSIS\n.B %s\n[\\fIOPTION\\fR...] \\fIVERB\\fR "
                  "[\\fIARGUMENT\\fR...]\n.SH DESCRIPTION\n",
                  program->name);
    man_paragraphs(program->about ? program->about : program->summary, out);
    buffer_printf(out, ".SH VERBS\n");
    for (const struct verb *v = program->verbs; v->name; v++)
        man_verb(program, v, out);
    buffer_printf(out, ".SH OPTIONS\nThese are understood by every verb.\n");
    man_options(program->globals, out);
    buffer_printf(out, ".TP\n\\fB\\-h\\fR, \\fB\\-\\-help\\fR\nHelp on the program or the verb.\n");
    if (program->exits) {
        buffer_printf(out, ".SH EXIT STATUS\n");
        for (const struct verb_exit *e = program->exits; e->meaning; e++) {
            buffer_printf(out, ".TP\n%d\n", e->code);
            text_man(out, e->meaning);
            buffer_printf(out, "\n");
        }
    }
    if (program->see_also) {
        buffer_printf(out, ".SH SEE ALSO\n");
        text_man(out, program->see_also);
        buffer_printf(out, "\n");
    }
}

/* `word)` lists what may follow; groups once, two-word verbs under their group. */
static void completion_verbs(const struct verb_program *program, const char *group,
                             struct buffer *out)
{
    const char *last = "";
    size_t last_len = 0;

    for (const struct verb *v = program->verbs; v->name; v++) {
        const char *word = v->name;
        if (group && !verb_in_group(v->name, group, &word))
            continue;
        size_t len = strcspn(word, " ");
        if (len == last_len && !memcmp(word, last, len))
            continue; /* the group's name again: its verbs stand together in the table */
        buffer_printf(out, "%s%.*s", last_len ? " " : "", (int)len, word);
        last = word;
        last_len = len;
    }
}

static void completion_options(const struct verb_option *options, struct buffer *out)
{
    for (; options && options->name; options++) {
        char term[128];
        option_term(options, term, sizeof term);
        term[strcspn(term, "=")] = 0;
        buffer_printf(out, "%s%s ", term, options->type == VALUE_BOOL ? "" : "=");
    }
}

/* Values that can be completed: choices, folders, files. One `case` arm each; any verb for NULL. */
/* The verb that prints the names of a thing ("[MODEL...]" or "model"), or NULL; the caller frees.
 */
static char *names_of(const struct verb_program *program, const char *thing)
{
    for (const char *line = program->named; line && *line; line += strcspn(line, "\n") + 1) {
        size_t len = strcspn(line, " ");
        const char *at = thing + strspn(thing, "[");
        if (!strncasecmp(at, line, len) && !isalnum((unsigned char)at[len]) && at[len] != ' ')
            return x_strndup(line + len + 1, strcspn(line + len + 1, "\n"));
        if (!line[strcspn(line, "\n")])
            break;
    }
    return NULL;
}

/* The first column of what a verb prints, without its title. */
static void completion_names(const struct verb_program *program, const char *verb,
                             struct buffer *out)
{
    buffer_printf(out, "$(%s %s 2>/dev/null | awk 'NR>1 {print $1}')", program->name, verb);
}

static void completion_values(const struct verb_program *program, const struct verb_option *options,
                              const char *verb, struct buffer *out)
{
    for (; options && options->name; options++) {
        bool paths = options->type == VALUE_PATH || options->type == VALUE_PATHS;
        _cleanup_free_ char *names =
            options->type == VALUE_STRING ? names_of(program, options->name) : NULL;
        if (!paths && options->type != VALUE_ENUM && !names)
            continue;
        if (options->letter)
            buffer_printf(out, "    %s%s -%c'|\\\n", verb ? "'" : "*'", verb ? verb : "",
                          options->letter);
        buffer_printf(out, "    %s%s --%s') ", verb ? "'" : "*'", verb ? verb : "", options->name);
        if (names) {
            buffer_printf(out, "COMPREPLY=($(compgen -W \"");
            completion_names(program, names, out);
            buffer_printf(out, "\" -- \"$cur\")); return;;\n");
        } else if (paths) {
            buffer_printf(out, "compopt -o filenames 2>/dev/null;"
                               " COMPREPLY=($(compgen -f -- \"$cur\")); return;;\n");
        } else if (options->type == VALUE_ENUM) {
            buffer_printf(out, "COMPREPLY=($(compgen -W '");
            for (const char *c = options->limits; *c; c++)
                buffer_printf(out, "%c", *c == '|' ? ' ' : *c);
            buffer_printf(out, "' -- \"$cur\")); return;;\n");
        }
    }
}

static void completion_groups(const struct verb_program *program, struct buffer *out)
{
    for (const struct verb *v = program->verbs; v->name; v++) {
        const char *space = strchr(v->name, ' ');
        if (!space)
            continue;
        _cleanup_free_ char *group = x_strndup(v->name, (size_t)(space - v->name));
        if (v > program->verbs && verb_in_group(v[-1].name, group, NULL))
            continue;
        buffer_printf(out, "    '%s') words='", group);
        completion_verbs(program, group, out);
        buffer_printf(out, "';;\n");
    }
}

static void completion_arms(const struct verb_program *program, struct buffer *out)
{
    for (const struct verb *v = program->verbs; v->name; v++) {
        const char *args = v->args ? v->args : "";
        bool file = strstr(args, "FILE") || strstr(args, "CONFIG");
        const char *files = file ? "-f" : strstr(args, "DIR") ? "-d" : "";
        _cleanup_free_ char *names = names_of(program, args);
        buffer_printf(out, "    '%s') files='%s'; words='", v->name, files);
        completion_options(v->options, out);
        buffer_printf(out, "'");
        if (names) {
            buffer_printf(out, "\n      [[ $cur == -* ]] || words=\"");
            completion_names(program, names, out);
            buffer_printf(out, "\"");
        }
        buffer_printf(out, ";;\n");
    }
}

void verb_bash_completion(const struct verb_program *program, struct buffer *out)
{
    buffer_printf(out,
                  "# bash completion for %s; generated by \"%s --bash-completion\".\n"
                  "_%s() {\n"
                  "  local cur=${COMP_WORDS[COMP_CWORD]} option=${COMP_WORDS[COMP_CWORD-1]}\n"
                  "  local verb= words= files= value= i globals='",
                  program->name, program->name, program->name);
    completion_options(program->globals, out);
    /* bash splits --name=value at the '='. */
    buffer_printf(out, "--help'\n"
                       "  if [[ $cur == '=' ]]; then cur= value=yes\n"
                       "  elif [[ $option == '=' ]]; then\n"
                       "    option=${COMP_WORDS[COMP_CWORD-2]} value=yes\n  fi\n"
                       "  for ((i = 1; i < COMP_CWORD; i++)); do\n"
                       "    case ${COMP_WORDS[i]} in -*|=) continue;; esac\n"
                       "    case ${COMP_WORDS[i-1]} in =");
    for (const struct verb_option *o = program->globals; o && o->name; o++)
        if (o->type != VALUE_BOOL)
            buffer_printf(out, "|--%s", o->name);
    buffer_printf(out, ") continue;; esac\n"
                       "    case \"$verb ${COMP_WORDS[i]}\" in\n"
                       "    ' '*) verb=${COMP_WORDS[i]};;\n");
    for (const struct verb *v = program->verbs; v->name; v++)
        if (strchr(v->name, ' '))
            buffer_printf(out, "    '%s') verb='%s';;\n", v->name, v->name);
    buffer_printf(out, "    esac\n  done\n  COMPREPLY=()\n  case \"$verb $option\" in\n");
    for (const struct verb *v = program->verbs; v->name; v++)
        completion_values(program, v->options, v->name, out);
    completion_values(program, program->globals, NULL, out);
    buffer_printf(out, "  esac\n  [[ $value ]] && return\n  case \"$verb\" in\n    '') words='");
    completion_verbs(program, NULL, out);
    buffer_printf(out, "';;\n");
    completion_groups(program, out);
    completion_arms(program, out);
    buffer_printf(out,
                  "  esac\n"
                  "  if [[ $cur == -* ]]; then\n"
                  "    COMPREPLY=($(compgen -W \"$words $globals\" -- \"$cur\"))\n"
                  "    [[ ${COMPREPLY[0]-} == *= ]] && compopt -o nospace 2>/dev/null\n"
                  "  elif [[ $files ]]; then\n"
                  "    compopt -o filenames 2>/dev/null\n"
                  "    COMPREPLY=($(compgen $files -- \"$cur\"))\n"
                  "  else\n"
                  "    [[ $words == -* ]] && words=\n"
                  "    COMPREPLY=($(compgen -W \"$words\" -- \"$cur\"))\n"
                  "  fi\n"
                  "}\n"
                  "complete -F _%s %s\n",
                  program->name, program->name);
}
