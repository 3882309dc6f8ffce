/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Objects and arrays. The properties that a schema names come in its order, each at most once;
 * others ("free" ones) behind them, when a schema asks for them: with additionalProperties, with
 * patternProperties, or by saying nothing at all about properties.
 */
#include <errno.h>
#include <string.h>

#include "model/grammar/schema.h"

static struct node *found_by(struct schema *x, const char *pattern)
{
    return regex_node(x->b, pattern, strlen(pattern), REGEX_FIND, false);
}

bool pattern_matches(struct schema *x, const char *pattern, const char *text, size_t len)
{
    struct machine *m = machine_of(x->b, found_by(x, pattern), NULL, false);
    bool found = m && machine_accepts(m, text, len);

    machine_free(m);
    return found;
}

static struct node *seq3(struct build *b, struct node *one, struct node *two, struct node *three)
{
    struct node *kids[] = {one, two, three};
    return node_seq(b, kids, 3);
}

static struct node *comma(struct schema *x)
{
    return x->compact ? node_text(x->b, ", ") : node_pair(x->b, node_text(x->b, ","), x->space);
}

static struct node *property(struct schema *x, struct node *name, struct node *value)
{
    struct node *colon =
        x->compact ? node_text(x->b, ": ") : node_pair(x->b, node_text(x->b, ":"), x->space);
    return seq3(x->b, name, colon, value);
}

/* ---- which properties there are ---- */

struct props {
    struct prop {
        const char *name;
        bool required;
        struct node *node; /* name and value */
    } * list;
    size_t n, cap;
    struct node *free; /* a free one, name and value; NONE: there are none */
};

static struct prop *find_prop(struct props *p, const char *name)
{
    for (size_t i = 0; i < p->n; i++)
        if (!strcmp(p->list[i].name, name))
            return &p->list[i];
    return NULL;
}

static struct prop *add_prop(struct schema *x, struct props *p, const char *name)
{
    struct prop *known = find_prop(p, name);

    if (known || !build_work(x->b, p->n))
        return known;
    if (p->n == p->cap) {
        p->cap = MAX(16, 2 * p->cap);
        p->list = x_realloc(p->list, p->cap * sizeof *p->list);
    }
    p->list[p->n] = (struct prop){.name = name};
    return &p->list[p->n++];
}

static void name_properties(struct schema *x, const struct conj *c, struct props *p)
{
    const json_t *v;
    const char *key;
    json_t *kid;
    size_t k;

    for (size_t i = 0; (v = conj_next(c, "properties", &i)) && !x->b->failed;) {
        if (!json_is_object(v))
            schema_fail(x, EINVAL, c->parts[i - 1].s, "properties", "expected an object");
        json_object_foreach((json_t *)v, key, kid) add_prop(x, p, key);
    }
    for (size_t i = 0; (v = conj_next(c, "required", &i)) && !x->b->failed;) {
        if (!json_is_array(v))
            schema_fail(x, EINVAL, c->parts[i - 1].s, "required", "expected a list of names");
        json_array_foreach(v, k, kid)
        {
            struct prop *prop = json_is_string(kid) ? add_prop(x, p, json_string_value(kid)) : NULL;
            if (!prop && !x->b->failed)
                schema_fail(x, EINVAL, c->parts[i - 1].s, "required", "expected a list of names");
            if (prop)
                prop->required = true;
        }
    }
}

/* What each part says of a property by this name. */
static void property_conj(struct schema *x, const struct conj *c, const char *name,
                          struct conj *ret)
{
    for (size_t i = 0; i < c->n && !x->b->failed; i++) {
        const json_t *s = c->parts[i].s, *more = json_object_get(s, "additionalProperties"),
                     *own = json_object_get(json_object_get(s, "properties"), name),
                     *names = json_object_get(s, "propertyNames");
        bool known = own != NULL;
        const char *pattern;
        json_t *v;

        if (own)
            conj_add(x, ret, own);
        json_object_foreach(json_object_get(s, "patternProperties"), pattern, v)
        {
            if (!pattern_matches(x, pattern, name, strlen(name)))
                continue;
            known = true;
            conj_add(x, ret, v);
        }
        if (!known && more)
            conj_add(x, ret, more);
        if (names) {
            json_t *text = json_string(name);
            if (!value_valid(x, names, text))
                ret->none = true;
            json_decref(text);
        }
    }
}

/* ---- free properties ---- */

/* Names without escapes that nobody has given a property; NULL: there are none. */
static struct machine *free_names(struct schema *x, const struct conj *c, const struct props *p)
{
    struct machine *m = machine_of(x->b, node_repeat(x->b, plain_char(x->b), 0, MANY), NULL, false);
    struct list names = {0};
    const json_t *v;

    for (size_t i = 0; i < p->n; i++)
        list_add(x->b, &names, node_text(x->b, p->list[i].name));
    if (names.n)
        m = machine_narrow(x->b, m, node_alt(x->b, names.items, names.n), true);
    list_free(&names);
    for (size_t i = 0; (v = conj_next(c, "propertyNames", &i)) && m && !x->b->failed;) {
        const json_t *s = c->parts[i - 1].s, *pattern = json_object_get(v, "pattern");
        struct conj of = {0};
        const char *key;
        json_t *kid;
        json_object_foreach((json_t *)v, key, kid)
        {
            if (strcmp(key, "pattern") && strcmp(key, "minLength") && strcmp(key, "maxLength") &&
                strcmp(key, "type") && strcmp(key, "title") && strcmp(key, "description"))
                schema_fail(x, ENOTSUP, v, key, "not supported for the names of free properties");
        }
        if (!json_is_object(v) && !json_is_true(v))
            schema_fail(x, ENOTSUP, s, "propertyNames", "only an object is supported");
        conj_add(x, &of, v);
        uint32_t min = conj_count(x, &of, "minLength", true, 0),
                 max = conj_count(x, &of, "maxLength", false, MANY);
        if (json_is_string(pattern))
            m = machine_narrow(x->b, m, found_by(x, json_string_value(pattern)), false);
        if (m && (min || max != MANY))
            m = machine_narrow(x->b, m, node_repeat(x->b, any_char(x->b, false), min, max), false);
        if (json_is_object(v) && !(schema_types(x, v) & TYPE(string)))
            machine_free(TAKE(m)); /* a name is a string */
    }
    return m;
}

/* One pattern's names, which no other pattern finds. */
static struct machine *pattern_names(struct schema *x, const struct conj *c,
                                     const struct machine *free, const char *pattern)
{
    struct machine *own = machine_of(x->b, found_by(x, pattern), NULL, false),
                   *m = machine_combine(x->b, free, own, false);
    const json_t *v;
    const char *key;
    json_t *kid;

    machine_free(own);
    for (size_t i = 0; (v = conj_next(c, "patternProperties", &i)) && m;)
        json_object_foreach((json_t *)v, key, kid)
        {
            if (m && strcmp(key, pattern))
                m = machine_narrow(x->b, m, found_by(x, key), true);
        }
    return m;
}

/* By pattern: what the pattern asks, and the additionalProperties of those who do not have it. */
static void pattern_props(struct schema *x, const struct conj *c, const struct machine *free,
                          struct list *all)
{
    const json_t *v;
    const char *pattern;
    json_t *kid;

    for (size_t i = 0; (v = conj_next(c, "patternProperties", &i)) && !x->b->failed;) {
        if (!json_is_object(v))
            schema_fail(x, EINVAL, c->parts[i - 1].s, "patternProperties", "expected an object");
        json_object_foreach((json_t *)v, pattern, kid)
        {
            struct machine *m = pattern_names(x, c, free, pattern);
            struct conj value = {0};
            for (size_t k = 0; m && k < c->n; k++) {
                const json_t *own =
                    json_object_get(json_object_get(c->parts[k].s, "patternProperties"), pattern);
                const json_t *more = json_object_get(c->parts[k].s, "additionalProperties");
                if (own)
                    conj_add(x, &value, own);
                else if (more)
                    conj_add(x, &value, more);
            }
            if (m)
                list_add(
                    x->b, all,
                    property(x, quoted_node(x->b, node_machine(x->b, m)), value_node(x, &value)));
        }
    }
}

static bool asks_for_free(const struct conj *c)
{
    bool mentions = false, asks = false;

    for (size_t i = 0; i < c->n; i++) {
        const json_t *s = c->parts[i].s, *more = json_object_get(s, "additionalProperties"),
                     *rest = json_object_get(s, "unevaluatedProperties");
        if (json_is_false(more) || json_is_false(rest))
            return false;
        asks |= more != NULL || rest != NULL;
        mentions |= json_object_get(s, "properties") || json_object_get(s, "patternProperties");
    }
    return asks || !mentions;
}

static void free_properties(struct schema *x, const struct conj *c, struct props *p)
{
    struct conj value = {0};
    struct list all = {0};
    bool asks = asks_for_free(c), patterns = false, simple = !p->n;
    const json_t *v;
    size_t i = 0;

    patterns = conj_next(c, "patternProperties", &i) != NULL;
    i = 0;
    simple = simple && !patterns && !conj_next(c, "propertyNames", &i);
    for (i = 0; (v = conj_next(c, "additionalProperties", &i));)
        conj_add(x, &value, v);
    for (i = 0; (v = conj_next(c, "unevaluatedProperties", &i));) {
        if (json_is_object(v))
            schema_fail(x, ENOTSUP, c->parts[i - 1].s, "unevaluatedProperties",
                        "only true and false are supported");
    }
    if (simple && asks && !value.none) { /* any name at all, escapes too */
        struct conj any = {0};
        list_add(x->b, &all, property(x, string_node(x, &any), value_node(x, &value)));
    } else if (asks || patterns) {
        struct machine *m = free_names(x, c, p);
        if (m)
            pattern_props(x, c, m, &all);
        for (i = 0; m && (v = conj_next(c, "patternProperties", &i));) {
            const char *pattern;
            json_t *kid;
            json_object_foreach((json_t *)v, pattern, kid)
            {
                if (m)
                    m = machine_narrow(x->b, m, found_by(x, pattern), true);
            }
        }
        if (m && asks && !value.none)
            list_add(x->b, &all,
                     property(x, quoted_node(x->b, node_machine(x->b, m)), value_node(x, &value)));
        else
            machine_free(m);
    }
    p->free = node_alt(x->b, all.items, all.n);
    list_free(&all);
}

/* ---- the object's automaton ---- */

/*
 * States: how many of the named properties have been passed, how many properties are written (up to
 * `cap`, beyond which it does not matter), and whether the comma of the next one is.
 */
struct object {
    struct schema *x;
    struct graph *g;
    const struct props *p;
    uint32_t min, max, cap;
    uint32_t close; /* the state before '}' of an object with properties */
};

static uint32_t object_state(const struct object *o, size_t at, uint32_t count, bool behind_comma)
{
    return 4 + (uint32_t)((at * (o->cap + 1) + count) * 2 + behind_comma);
}

static void object_edges(struct object *o, size_t at, uint32_t count)
{
    uint32_t from = object_state(o, at, count, false), next = object_state(o, at, count, true);
    uint32_t more = MIN(count + 1, o->cap);
    struct build *b = o->x->b;

    if (o->max == MANY || count < o->max)
        graph_edge(b, o->g, from, next, count ? comma(o->x) : NULL);
    else
        next = 0;
    if (at < o->p->n) {
        const struct prop *p = &o->p->list[at];
        if (!p->required)
            graph_edge(b, o->g, from, object_state(o, at + 1, count, false), NULL);
        if (next)
            graph_edge(b, o->g, next, object_state(o, at + 1, more, false), p->node);
        return;
    }
    if (at == o->p->n && count >= o->min)
        graph_edge(b, o->g, from, count ? o->close : 3, NULL);
    if (at == o->p->n + 1) /* a free one has been written: another name, or the same, may follow */
        graph_edge(b, o->g, from, o->close, NULL);
    /* Free names may be the same: only the first counts for minProperties. */
    if (next && (at > o->p->n || count + 1 >= o->min))
        graph_edge(b, o->g, next, object_state(o, o->p->n + 1, more, false), o->p->free);
}

static struct node *object_graph(struct schema *x, const struct props *p, uint32_t min,
                                 uint32_t max)
{
    struct object o = {.x = x, .p = p, .min = min, .max = max, .close = 2};
    uint64_t states;

    o.cap = max != MANY ? max : MAX(min, 1);
    if (!size_mul(p->n + 2, ((uint64_t)o.cap + 1) * 2, &states) || states > NFA_STATES_MAX) {
        build_fail(x->b, E2BIG, "an object of %zu properties with limits is too large", p->n);
        return node_none(x->b);
    }
    o.g = graph_new(x->b, (uint32_t)states + 4);
    if (!o.g)
        return node_none(x->b);
    graph_edge(x->b, o.g, 0, object_state(&o, 0, 0, false),
               node_pair(x->b, node_text(x->b, "{"), x->space));
    graph_edge(x->b, o.g, 2, 3, x->space);
    graph_edge(x->b, o.g, 3, 1, node_text(x->b, "}"));
    for (size_t at = 0; at <= p->n + 1; at++)
        for (uint32_t count = 0; count <= o.cap && !x->b->failed; count++)
            object_edges(&o, at, count);
    return node_graph(x->b, o.g);
}

struct node *object_node(struct schema *x, const struct conj *c)
{
    uint32_t min = conj_count(x, c, "minProperties", true, 0),
             max = conj_count(x, c, "maxProperties", false, MANY);
    struct props p = {0};

    name_properties(x, c, &p);
    free_properties(x, c, &p);
    for (size_t i = 0; i < p.n && !x->b->failed; i++) {
        struct conj value = {0};
        json_t *name = json_string(p.list[i].name);
        property_conj(x, c, p.list[i].name, &value);
        p.list[i].node = property(x, literal_node(x, name), value_node(x, &value));
        json_decref(name);
    }
    if (min > p.n + 1 && p.free->kind != NODE_NONE)
        schema_fail(x, ENOTSUP, c->n ? c->parts[0].s : x->root, "minProperties",
                    "%u, with %zu names given: no more than one other can be counted on", min, p.n);
    if (max > p.n && p.free->kind == NODE_NONE)
        max = MANY;
    struct node *node = max < min ? node_none(x->b) : object_graph(x, &p, min, max);
    free(p.list);
    return node;
}

/* ---- arrays ---- */

/* What each part says of element i; beyond all prefixes: of the rest. False: nobody says anything.
 */
static bool item_conj(struct schema *x, const struct conj *c, size_t i, struct conj *ret)
{
    bool any = false;

    for (size_t k = 0; k < c->n; k++) {
        const json_t *s = c->parts[k].s, *items = json_object_get(s, "items"), *rest = items,
                     *prefix = json_object_get(s, "prefixItems");
        if (json_is_array(items)) { /* until 2019 */
            prefix = items;
            rest = json_object_get(s, "additionalItems");
        }
        if (prefix && !json_is_array(prefix))
            schema_fail(x, EINVAL, s, "prefixItems", "expected a list of schemas");
        if (!rest && json_is_boolean(json_object_get(s, "unevaluatedItems")))
            rest = json_object_get(s, "unevaluatedItems");
        else if (json_is_object(json_object_get(s, "unevaluatedItems")))
            schema_fail(x, ENOTSUP, s, "unevaluatedItems", "only true and false are supported");
        const json_t *own = i < json_array_size(prefix) ? json_array_get(prefix, i) : rest;
        any |= own != NULL;
        if (own)
            conj_add(x, ret, own);
    }
    return any;
}

static size_t longest_prefix(const struct conj *c)
{
    size_t n = 0, i;
    const json_t *v;

    for (i = 0; (v = conj_next(c, "prefixItems", &i));)
        n = MAX(n, json_array_size(v));
    for (i = 0; (v = conj_next(c, "items", &i));)
        n = MAX(n, json_array_size(v)); /* of an object: 0 */
    return n;
}

static struct node *element(struct schema *x, const struct conj *c, size_t i, bool *ret_said)
{
    struct conj value = {0};
    bool said = item_conj(x, c, i, &value);

    if (ret_said)
        *ret_said = said;
    return value_node(x, &value);
}

/* `n` more elements at least and at most, of which the first has a comma before it, or not. */
static struct node *rest_node(struct schema *x, struct node *item, uint32_t min, uint32_t max,
                              bool comma_first)
{
    struct node *more = node_pair(x->b, comma(x), item);

    if (comma_first)
        return node_repeat(x->b, more, min, max);
    if (!max)
        return node_empty(x->b);
    return node_pair(x->b, item,
                     node_repeat(x->b, more, min ? min - 1 : 0, max == MANY ? MANY : max - 1));
}

struct node *array_node(struct schema *x, const struct conj *c)
{
    uint32_t min = conj_count(x, c, "minItems", true, 0),
             max = conj_count(x, c, "maxItems", false, MANY);
    size_t prefix = MIN(longest_prefix(c), max);
    struct graph *g = max < min ? NULL : graph_new(x->b, (uint32_t)prefix + 5);
    bool said;

    if (!g)
        return node_none(x->b);
    /* 2: before ']', white space allowed; 3: before ']'; 4 + i: i elements are written */
    graph_edge(x->b, g, 0, 4, node_pair(x->b, node_text(x->b, "["), x->space));
    graph_edge(x->b, g, 2, 3, x->space);
    graph_edge(x->b, g, 3, 1, node_text(x->b, "]"));
    for (uint32_t i = 0; i < prefix && !x->b->failed; i++) {
        if (i >= min)
            graph_edge(x->b, g, 4 + i, i ? 2 : 3, NULL);
        struct node *item = element(x, c, i, NULL);
        graph_edge(x->b, g, 4 + i, 4 + i + 1, i ? node_pair(x->b, comma(x), item) : item);
    }
    uint32_t at = 4 + (uint32_t)prefix, least = min > prefix ? min - (uint32_t)prefix : 0,
             most = max == MANY ? MANY : max - (uint32_t)prefix;
    if (!least)
        graph_edge(x->b, g, at, prefix ? 2 : 3, NULL);
    struct node *item = element(x, c, prefix, &said);
    if (!said && prefix && !least)
        most = 0; /* as with properties: what nobody asks for is not made */
    if (most)
        graph_edge(x->b, g, at, 2, rest_node(x, item, MAX(least, 1), most, prefix > 0));
    return node_graph(x->b, g);
}
