/* SPDX-License-Identifier: Apache-2.0 */
/* The parser of verb tables and the values of a call; verbs_text.c has what is printed. */
#include "base/verbs.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/verbs_private.h"

/* One option that was given, or fell back. Strings of a repeated one pile up in `strings`. */
struct verb_value {
    const struct verb_option *option;
    union value value;
    bool given;
    char **strings;
    size_t n_strings;
};

struct verb_values {
    size_t n;
    struct verb_value v[];
};

/* The state of one walk over argv. */
struct walk {
    const struct verb_program *program;
    int argc, i;
    char **argv;
    struct verb_call *call;
    const char *group; /* first word of a two-word verb, while the second is awaited */
    bool help, options_ended;
    struct error *err;
};

static size_t options_count(const struct verb_option *options)
{
    size_t n = 0;

    while (options && options[n].name)
        n++;
    return n;
}

static const struct verb_option *option_find(const struct verb_option *options, const char *name,
                                             size_t len)
{
    for (; options && options->name; options++)
        if (strlen(options->name) == len && !memcmp(options->name, name, len))
            return options;
    return NULL;
}

static const struct verb_option *option_by_letter(const struct verb_option *options, char letter)
{
    for (; options && options->name; options++)
        if (options->letter == letter)
            return options;
    return NULL;
}

static struct verb_value *value_slot(const struct verb_call *call, const struct verb_option *option)
{
    for (size_t i = 0; i < call->values->n; i++)
        if (call->values->v[i].option == option)
            return &call->values->v[i];
    return NULL;
}

static const char *next_option(const void *context, size_t i)
{
    const struct walk *w = context;
    const struct verb_option *own = w->call->verb ? w->call->verb->options : NULL;
    size_t n = options_count(own);

    if (i < n)
        return own[i].name;
    return i - n < options_count(w->program->globals) ? w->program->globals[i - n].name : NULL;
}

static const char *next_verb(const void *context, size_t i)
{
    const struct walk *w = context;
    return w->program->verbs[i].name;
}

bool verb_in_group(const char *verb, const char *group, const char **ret_rest)
{
    size_t len = strlen(group);

    if (strncmp(verb, group, len) || verb[len] != ' ')
        return false;
    if (ret_rest)
        *ret_rest = verb + len + 1;
    return true;
}

static const struct verb *verb_find(const struct verb_program *program, const char *name)
{
    for (const struct verb *v = program->verbs; v->name; v++)
        if (!strcmp(v->name, name))
            return v;
    return NULL;
}

static bool verb_is_group(const struct verb_program *program, const char *word)
{
    for (const struct verb *v = program->verbs; v->name; v++)
        if (verb_in_group(v->name, word, NULL))
            return true;
    return false;
}

static int unknown_option(const struct walk *w, const char *name, size_t len)
{
    _cleanup_free_ char *word = x_strndup(name, len);
    const char *near = value_nearest(word, next_option, w);
    const struct verb *verb = w->call->verb;

    return error_set(w->err, EINVAL, "unknown option --%s%s%s%s (\"%s %s%s--help\" lists them)",
                     word, near ? ", did you mean --" : "", near ? near : "", near ? "?" : "",
                     w->program->name, verb ? verb->name : "", verb ? " " : "");
}

static int set_value(struct walk *w, const struct verb_option *option, const char *text)
{
    struct verb_values *values = w->call->values;
    struct verb_value *slot = value_slot(w->call, option);
    union value value;

    int r = value_parse(option->type, option->limits, text, &value, w->err);
    if (r < 0) {
        error_prefix(w->err, "--%s", option->name);
        return r;
    }
    if (slot && slot->given && !option->repeat) {
        value_free(option->type, &value);
        return error_set(w->err, EINVAL, "--%s is given twice", option->name);
    }
    if (!slot) {
        slot = &values->v[values->n++];
        *slot = (struct verb_value){.option = option};
    }
    if (option->repeat) {
        assert(option->type == VALUE_STRING || option->type == VALUE_PATH);
        slot->strings = x_realloc(slot->strings, (slot->n_strings + 1) * sizeof(char *));
        slot->strings[slot->n_strings++] = value.s;
    } else {
        slot->value = value;
    }
    slot->given = true;
    return 0;
}

/* The value behind an option that needs one: after '=', or the next word. */
static int take_value(struct walk *w, const struct verb_option *option, const char *equals)
{
    if (equals)
        return set_value(w, option, equals + 1);
    if (w->i + 1 >= w->argc)
        return error_set(w->err, EINVAL, "--%s needs a value: --%s=%s", option->name, option->name,
                         value_word(option->type, option->limits));
    return set_value(w, option, w->argv[++w->i]);
}

static const struct verb_option *lookup(const struct walk *w, const char *name, size_t len)
{
    const struct verb_option *option = NULL;

    if (w->call->verb)
        option = option_find(w->call->verb->options, name, len);
    return option ? option : option_find(w->program->globals, name, len);
}

static int long_option(struct walk *w, const char *name)
{
    const char *equals = strchr(name, '=');
    size_t len = equals ? (size_t)(equals - name) : strlen(name);
    const struct verb_option *option;

    if (!strcmp(name, "help")) {
        w->help = true;
        return 0;
    }
    option = lookup(w, name, len);
    if (option && option->type == VALUE_BOOL)
        return set_value(w, option, equals ? equals + 1 : "yes");
    if (option)
        return take_value(w, option, equals);
    if (len > 3 && !strncmp(name, "no-", 3) && !equals) {
        option = lookup(w, name + 3, len - 3);
        if (option && option->type == VALUE_BOOL)
            return set_value(w, option, "no");
    }
    return unknown_option(w, name, len);
}

/* -h, -n5, -n 5, -vq */
static int short_options(struct walk *w, const char *letters)
{
    for (; *letters; letters++) {
        const struct verb_option *option = NULL;
        if (w->call->verb)
            option = option_by_letter(w->call->verb->options, *letters);
        if (!option)
            option = option_by_letter(w->program->globals, *letters);
        if (!option && *letters == 'h') {
            w->help = true;
            continue;
        }
        if (!option)
            return error_set(w->err, EINVAL, "unknown option -%c (\"%s --help\" lists them)",
                             *letters, w->program->name);
        if (option->type != VALUE_BOOL)
            return letters[1] ? set_value(w, option, letters + 1) : take_value(w, option, NULL);
        int r = set_value(w, option, "yes");
        if (r < 0)
            return r;
    }
    return 0;
}

/* "verify" is a verb and "verify tokenizer" is another: the longer one wins ("./tokenizer" for a
 * file). */
static void longer_verb(struct walk *w, const char *word)
{
    if (w->i + 1 >= w->argc)
        return;
    _cleanup_free_ char *full = x_printf("%s %s", word, w->argv[w->i + 1]);
    const struct verb *verb = verb_find(w->program, full);
    if (!verb)
        return;
    w->call->verb = verb;
    w->i++;
}

static int verb_word(struct walk *w, char *word)
{
    _cleanup_free_ char *full = w->group ? x_printf("%s %s", w->group, word) : x_strdup(word);

    w->call->verb = verb_find(w->program, full);
    if (w->call->verb) {
        if (!w->group && verb_is_group(w->program, word))
            longer_verb(w, word);
        return 0;
    }
    if (!w->group && verb_is_group(w->program, word)) {
        w->group = word;
        return 0;
    }
    const char *near = value_nearest(full, next_verb, w);
    return error_set(w->err, EINVAL, "unknown verb \"%s\"%s%s%s (\"%s --help\" lists them)", full,
                     near ? ", did you mean \"" : "", near ? near : "", near ? "\"?" : "",
                     w->program->name);
}

/* Room for one value of each option that this call can have. */
static void values_reserve(struct walk *w)
{
    size_t n = options_count(w->program->globals);

    if (w->call->verb)
        n += options_count(w->call->verb->options);
    size_t had = w->call->values ? w->call->values->n : 0;
    w->call->values =
        x_realloc(w->call->values, sizeof(struct verb_values) + n * sizeof(struct verb_value));
    w->call->values->n = had;
}

static int walk_word(struct walk *w)
{
    char *arg = w->argv[w->i];
    struct verb_call *call = w->call;

    if (!w->options_ended && !strcmp(arg, "--")) {
        w->options_ended = true;
        return 0;
    }
    if (!w->options_ended && !strncmp(arg, "--", 2))
        return long_option(w, arg + 2);
    if (!w->options_ended && arg[0] == '-' && arg[1])
        return short_options(w, arg + 1);
    if (call->verb) {
        call->argv[call->argc++] = arg;
        return 0;
    }
    int r = verb_word(w, arg);
    if (!r && call->verb)
        values_reserve(w);
    return r;
}

/* The next word of an args text such as "DIR [NAME...]"; false at its end. */
static bool verb_args_next(const char **text, char *word, size_t room, bool *ret_optional,
                           bool *ret_many)
{
    const char *p = *text + strspn(*text, " ");
    size_t len = strcspn(p, " ");

    if (!len)
        return false;
    snprintf(word, room, "%.*s", (int)len, p);
    *ret_optional = *p == '[';
    *ret_many = strstr(word, "...") != NULL;
    *text = p + len;
    return true;
}

static int check_count(const struct walk *w)
{
    const struct verb_call *call = w->call;
    const char *text = call->verb->args ? call->verb->args : "";
    char word[64];
    bool optional, many = false;
    int n = 0;

    while (verb_args_next(&text, word, sizeof word, &optional, &many)) {
        if (n >= call->argc && !optional)
            return error_set(w->err, EINVAL, "%s needs %s: %s %s %s", call->verb->name, word,
                             w->program->name, call->verb->name, call->verb->args);
        n++;
        if (many)
            return 0;
    }
    if (call->argc > n)
        return error_set(w->err, EINVAL, "\"%s\" is one argument too many: %s %s%s%s",
                         call->argv[n], w->program->name, call->verb->name, n ? " " : "",
                         n ? call->verb->args : "");
    return 0;
}

static void fill_fallbacks(struct walk *w, const struct verb_option *options)
{
    for (; options && options->name; options++) {
        if (!options->fallback || value_slot(w->call, options))
            continue;
        struct error *err = w->err;
        w->err = NULL;
        int r = set_value(w, options, options->fallback);
        assert(r == 0); /* the table's own text */
        w->err = err;
        value_slot(w->call, options)->given = false;
    }
}

/* --version and the generated texts, asked for in place of a verb. */
static int whole_text(const struct verb_program *program, const char *arg, struct buffer *text)
{
    if (!strcmp(arg, "--version"))
        buffer_printf(text, "%s %s\n", program->name, program->version);
    else if (!strcmp(arg, "--man"))
        verb_man(program, text);
    else if (!strcmp(arg, "--bash-completion"))
        verb_bash_completion(program, text);
    else
        return 0;
    return VERB_TEXT;
}

static int answer_help(struct walk *w, struct buffer *text)
{
    if (w->group && !w->call->verb)
        verb_group_help(w->program, w->group, text);
    else
        verb_help(w->program, w->call->verb, text);
    return VERB_TEXT;
}

static int walk_all(struct walk *w, struct buffer *text)
{
    /* `help load` is `load --help`. */
    bool help_verb = w->argc > 1 && !strcmp(w->argv[1], "help") && !verb_find(w->program, "help");

    w->help = help_verb;
    for (w->i = 1 + help_verb; w->i < w->argc; w->i++) {
        int r = walk_word(w);
        if (r < 0)
            return r;
    }
    if (w->help || (!w->call->verb && !w->group))
        return answer_help(w, text);
    if (!w->call->verb)
        return error_set(w->err, EINVAL, "%s what? \"%s %s --help\" lists what there is", w->group,
                         w->program->name, w->group);
    int r = check_count(w);
    if (r < 0)
        return r;
    fill_fallbacks(w, w->call->verb->options);
    fill_fallbacks(w, w->program->globals);
    return 0;
}

int verb_parse(const struct verb_program *program, int argc, char **argv,
               struct verb_call **ret_call, struct buffer *text, struct error *err)
{
    if (argc == 2 && whole_text(program, argv[1], text))
        return VERB_TEXT;

    _cleanup_(verb_call_freep) struct verb_call *call = x_alloc(sizeof *call);
    struct walk w = {.program = program, .argc = argc, .argv = argv, .call = call, .err = err};
    call->program = program;
    call->argv = x_alloc(((size_t)MAX(argc, 0) + 1) * sizeof(char *));
    values_reserve(&w);

    int r = walk_all(&w, text);
    if (r == 0)
        *ret_call = TAKE(call);
    return r;
}

void verb_call_free(struct verb_call *call)
{
    if (!call)
        return;
    for (size_t i = 0; i < call->values->n; i++) {
        struct verb_value *v = &call->values->v[i];
        for (size_t k = 0; k < v->n_strings; k++)
            free(v->strings[k]);
        free(v->strings);
        value_free(v->option->type, &v->value);
    }
    free(call->values);
    free(call->argv);
    free(call);
}

/* The option of that name, which the table must have; its value, or NULL when there is none. */
static struct verb_value *get(const struct verb_call *call, const char *name, unsigned types)
{
    const struct walk w = {.program = call->program, .call = (struct verb_call *)call};
    const struct verb_option *option = lookup(&w, name, strlen(name));

    assert(option);
    assert(types & (1u << option->type));
    return value_slot(call, option);
}

#define TYPE(t) (1u << VALUE_##t)

bool verb_given(const struct verb_call *call, const char *name)
{
    const struct verb_value *v = get(call, name, ~0u);
    return v && v->given;
}

bool verb_flag(const struct verb_call *call, const char *name)
{
    const struct verb_value *v = get(call, name, TYPE(BOOL));
    return v && v->value.b;
}

int64_t verb_int(const struct verb_call *call, const char *name)
{
    const struct verb_value *v = get(call, name, TYPE(INT));
    return v ? v->value.i : 0;
}

double verb_real(const struct verb_call *call, const char *name)
{
    const struct verb_value *v = get(call, name, TYPE(REAL));
    return v ? v->value.r : 0;
}

uint64_t verb_bytes(const struct verb_call *call, const char *name)
{
    const struct verb_value *v = get(call, name, TYPE(BYTES));
    return v ? v->value.u : 0;
}

uint64_t verb_duration(const struct verb_call *call, const char *name)
{
    const struct verb_value *v = get(call, name, TYPE(DURATION));
    return v ? v->value.u : 0;
}

const char *verb_string(const struct verb_call *call, const char *name)
{
    const struct verb_value *v = get(call, name, TYPE(STRING) | TYPE(PATH));

    if (v && v->option->repeat)
        return v->strings[v->n_strings - 1];
    return v ? v->value.s : NULL;
}

int verb_choice(const struct verb_call *call, const char *name)
{
    const struct verb_value *v = get(call, name, TYPE(ENUM));
    return v ? v->value.choice : -1;
}

const char *const *verb_strings(const struct verb_call *call, const char *name, size_t *ret_n)
{
    const struct verb_value *v = get(call, name, TYPE(STRING) | TYPE(PATH));

    *ret_n = v ? v->n_strings : 0;
    return v ? (const char *const *)v->strings : NULL;
}
