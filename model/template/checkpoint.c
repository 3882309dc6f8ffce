/* SPDX-License-Identifier: Apache-2.0 */
/* The templates and special tokens of a checkpoint's folder. */
#include "model/template/template.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "base/fd.h"

#define CONFIG_MAX ((size_t)64 << 20)

struct named {
    char *name, *text;
    struct template *t;
    size_t len;
};

struct chat_template {
    struct named *v;
    size_t n;
    json_t *tokens;
};

void chat_template_free(struct chat_template *c)
{
    if (!c)
        return;
    for (size_t i = 0; i < c->n; i++) {
        free(c->v[i].name);
        free(c->v[i].text);
        template_free(c->v[i].t);
    }
    free(c->v);
    json_decref(c->tokens);
    free(c);
}

static int add(struct chat_template *c, const char *path, const char *name, const char *text,
               size_t len, struct error *err)
{
    struct template *t;
    int r = template_compile(text, len, &t, err);
    if (r < 0)
        return error_prefix(err, "%s: chat template %s", path, name);
    c->v = x_realloc(c->v, (c->n + 1) * sizeof *c->v);
    c->v[c->n++] = (struct named){x_strdup(name), x_strndup(text, len), t, len};
    return 0;
}

static int add_json(struct chat_template *c, const char *path, const char *name, const json_t *text,
                    struct error *err)
{
    if (!name || !json_is_string(text))
        return error_set(err, EBADMSG,
                         "%s: chat_template is neither a string nor a list of {name, template}",
                         path);
    return add(c, path, name, json_string_value(text), json_string_length(text), err);
}

static int add_config(struct chat_template *c, const char *path, const json_t *j, struct error *err)
{
    size_t i;
    const char *key;
    json_t *item;
    int r = 0;
    if (json_is_array(j)) {
        json_array_foreach(j, i, item)
        {
            if (r >= 0)
                r = add_json(c, path, json_string_value(json_object_get(item, "name")),
                             json_object_get(item, "template"), err);
        }
    } else if (json_is_object(j)) {
        json_object_foreach((json_t *)j, key, item)
        {
            if (r >= 0)
                r = add_json(c, path, key, item, err);
        }
    } else if (j && !json_is_null(j)) {
        r = add_json(c, path, "default", j, err);
    }
    return r;
}

/* Keys that end with _token: strings, or AddedToken objects. */
static void add_tokens(struct chat_template *c, const json_t *config)
{
    const char *key;
    json_t *item;
    json_object_foreach((json_t *)config, key, item)
    {
        size_t len = strlen(key);
        if (json_is_object(item))
            item = json_object_get(item, "content");
        if (len > 6 && !strcmp(key + len - 6, "_token") && json_is_string(item))
            json_object_set(c->tokens, key, item);
    }
}

static int read_config(const char *path, json_t **ret, struct error *err)
{
    _cleanup_free_ char *data = NULL;
    json_error_t e;
    size_t len;
    int r = fd_read_file(path, CONFIG_MAX, &data, &len, err);
    if (r < 0)
        return r;
    /* Only texts matter here; model_max_length is often 10^30, which is no integer for the parser.
     */
    json_t *j = json_loadb(data, len, JSON_DECODE_INT_AS_REAL, &e);
    if (!json_is_object(j)) {
        json_decref(j);
        return error_set(err, EBADMSG, "%s: line %d: %s", path, e.line,
                         j ? "not an object" : e.text);
    }
    *ret = j;
    return 0;
}

static int read_folder(struct chat_template *c, const char *dir, struct error *err)
{
    _cleanup_free_ char *file = x_printf("%s/chat_template.jinja", dir), *data = NULL;
    _cleanup_free_ char *path = x_printf("%s/tokenizer_config.json", dir);
    json_auto_t *config = NULL;
    size_t len;
    int r = 0;
    if (access(path, F_OK) == 0)
        r = read_config(path, &config, err);
    if (r < 0)
        return r;
    if (config)
        add_tokens(c, config);
    if (access(file, F_OK) == 0) {
        r = fd_read_file(file, CONFIG_MAX, &data, &len, err);
        return r < 0 ? r : add(c, file, "default", data, len, err);
    }
    r = add_config(c, path, json_object_get(config, "chat_template"), err);
    if (r >= 0 && !c->n)
        return error_set(err, ENOENT,
                         "%s has no chat template: neither chat_template.jinja nor chat_template "
                         "in tokenizer_config.json",
                         dir);
    return r;
}

int template_from_checkpoint(const char *dir, struct chat_template **ret, struct error *err)
{
    _cleanup_(chat_template_freep) struct chat_template *c = x_alloc(sizeof *c);
    c->tokens = json_object();
    int r = read_folder(c, dir, err);
    if (r < 0)
        return r;
    *ret = TAKE(c);
    return 0;
}

static const struct named *named(const struct chat_template *c, const char *name)
{
    for (size_t i = 0; i < c->n; i++)
        if (!strcmp(c->v[i].name, name))
            return &c->v[i];
    return NULL;
}

static const struct named *pick(const struct chat_template *c, const char *name, bool has_tools)
{
    const struct named *t = NULL;
    if (name)
        return named(c, name);
    if (has_tools)
        t = named(c, "tool_use");
    if (!t)
        t = named(c, "default");
    return t || c->n != 1 ? t : &c->v[0];
}

const char *chat_template_text(const struct chat_template *c, const char *name, bool has_tools,
                               size_t *ret_len)
{
    const struct named *t = pick(c, name, has_tools);
    if (!t)
        return NULL;
    *ret_len = t->len;
    return t->text;
}

int chat_template_render(const struct chat_template *c, const char *name, const json_t *request,
                         const struct template_options *options, struct buffer *out,
                         enum template_outcome *ret_outcome, struct error *err)
{
    const json_t *tools = json_object_get(request, "tools");
    const struct named *t = pick(c, name, json_is_array(tools) && json_array_size(tools));
    if (ret_outcome)
        *ret_outcome = TEMPLATE_ERROR;
    if (!t)
        return error_set(err, ENOENT, "the model has no chat template named %s",
                         name ? name : "default");
    json_auto_t *context = json_copy(c->tokens);
    if (!context || json_object_update(context, (json_t *)request) < 0)
        return error_set(err, EBADMSG, "the context of a chat template is no JSON object");
    return template_render(t->t, context, options, out, ret_outcome, err);
}
