/* SPDX-License-Identifier: Apache-2.0 */
/* emberctl cache: looks at and manages the artefact cache directly; no daemon is needed. */
#include "cli/commands.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/value.h"
#include "cache/cache.h"
#include "cli/output.h"

/* LOOK changes nothing, CHANGE needs a cache that is there, MAKE begins one where there is none. */
enum purpose { LOOK, CHANGE, MAKE };

static int open_for(const char *dir, enum purpose purpose, struct cache **ret, struct error *err)
{
    struct cache_options look = {.read_only = true};
    int r = 0;

    if (purpose != MAKE && ((r = cache_open(dir, &look, ret, err)) == -ENOENT || purpose == LOOK))
        return r;
    if (purpose != MAKE && r == 0)
        cache_close(*ret);
    return cache_open(dir, NULL, ret, err);
}

static int open_cache(const struct verb_call *call, enum purpose purpose, struct cache **ret,
                      struct error *err)
{
    _cleanup_free_ char *fallback = NULL;
    const char *dir = verb_string(call, "cache-dir");

    int r = dir ? 0 : value_expand("%C/emberd", &fallback, err); /* emberd's own default */
    r = r == 0 ? open_for(dir ? dir : fallback, purpose, ret, err) : r;
    const char *warning;
    if (r == 0 && cache_warnings(*ret, &warning))
        fprintf(stderr, "emberctl: %s\n", warning);
    if (r == -ENOENT && !dir)
        return error_set(err, ENOENT,
                         "%s: no cache there; emberd makes it when it first starts an instance, "
                         "--cache-dir=PATH names another",
                         fallback);
    return r;
}

static json_t *when(uint64_t ns)
{
    time_t seconds = (time_t)(ns / 1000000000);
    struct tm tm;
    char text[32];

    localtime_r(&seconds, &tm);
    strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S", &tm);
    return json_string(text);
}

static json_t *factors_json(const struct cache_entry *entry)
{
    json_t *factors = json_object();
    struct cache_factor factor;
    size_t pos = 0;

    while (entry->factors && cache_factor_next(entry->factors, entry->factors_len, &pos, &factor))
        json_object_set_new(factors, factor.name, json_string(factor.text));
    return factors;
}

static json_t *entry_json(const struct cache_entry *entry)
{
    char hex[DIGEST_HEX_SIZE];
    const char *kind = cache_kind_name(entry->kind);

    return json_pack("{s:s, s:s, s:s, s:I, s:s, s:o, s:o, s:o}", "key",
                     digest_hex(&entry->key, hex), "kind", kind ? kind : "?", "subject",
                     entry->subject, "bytes", (json_int_t)entry->bytes, "state",
                     entry->state == CACHE_STATE_OK        ? "ok"
                     : entry->state == CACHE_STATE_DAMAGED ? "damaged"
                                                           : "quarantined",
                     "created", when(entry->created_ns), "used", when(entry->last_use_ns),
                     "factors", factors_json(entry));
}

static int collect(void *ctx, const struct cache_entry *entry)
{
    json_array_append_new(ctx, entry_json(entry));
    return 0;
}

int run_cache_ls(const struct verb_call *call)
{
    static const struct column columns[] = {{"kind", "KIND", COLUMN_TEXT},
                                            {"subject", "SUBJECT", COLUMN_TEXT},
                                            {"bytes", "SIZE", COLUMN_BYTES},
                                            {"state", "STATE", COLUMN_TEXT},
                                            {"used", "LAST USED", COLUMN_TEXT},
                                            {"key", "KEY", COLUMN_TEXT},
                                            {0}};
    _cleanup_(cache_closep) struct cache *cache = NULL;
    json_t *list = json_array();
    struct error err = {0};

    if (open_cache(call, LOOK, &cache, &err) < 0 || cache_iterate(cache, collect, list, &err) < 0) {
        json_decref(list);
        return cli_fail(call, &err);
    }
    return cli_print_list(call, list, columns, "the cache is empty");
}

struct search {
    const char *prefix;
    json_t *found;
    int matches;
};

static int match(void *ctx, const struct cache_entry *entry)
{
    struct search *search = ctx;
    char hex[DIGEST_HEX_SIZE];

    if (strncmp(digest_hex(&entry->key, hex), search->prefix, strlen(search->prefix)))
        return 0;
    search->matches++;
    json_decref(search->found);
    search->found = entry_json(entry);
    return 0;
}

int run_cache_show(const struct verb_call *call)
{
    _cleanup_(cache_closep) struct cache *cache = NULL;
    struct search search = {.prefix = call->argv[0]};
    struct error err = {0};
    const char *name;
    json_t *value;

    int r = open_cache(call, LOOK, &cache, &err);
    if (r == 0)
        r = cache_iterate(cache, match, &search, &err);
    if (r == 0 && search.matches != 1)
        r = error_set(&err, search.matches ? EINVAL : ENOENT, "%s: %s; see emberctl cache ls",
                      search.prefix, search.matches ? "several keys begin so" : "no such key");
    if (r < 0) {
        json_decref(search.found);
        return cli_fail(call, &err);
    }
    static const struct column columns[] = {
        {"key", "key", 0},         {"kind", "kind", 0},
        {"subject", "subject", 0}, {"bytes", "size", COLUMN_BYTES},
        {"state", "state", 0},     {"created", "created", 0},
        {"used", "last used", 0},  {0}};
    json_t *factors = json_incref(json_object_get(search.found, "factors"));
    cli_print_object(call, search.found, columns);
    if (!cli_json(call)) {
        printf("depends on\n");
        json_object_foreach(factors, name, value)
            printf("  %-14s  %s\n", name, json_string_value(value));
    }
    json_decref(factors);
    return CLI_OK;
}

int run_cache_verify(const struct verb_call *call)
{
    static const struct column columns[] = {{"checked", "values checked", COLUMN_NUMBER},
                                            {"bytes", "bytes", COLUMN_BYTES},
                                            {"damaged", "damaged, quarantined", COLUMN_NUMBER},
                                            {0}};
    _cleanup_(cache_closep) struct cache *cache = NULL;
    struct cache_verify_result result;
    struct error err = {0};

    if (open_cache(call, CHANGE, &cache, &err) < 0 || cache_verify(cache, &result, &err) < 0)
        return cli_fail(call, &err);
    cli_print_object(call,
                     json_pack("{s:I, s:I, s:I}", "checked", (json_int_t)result.checked, "bytes",
                               (json_int_t)result.bytes, "damaged", (json_int_t)result.damaged),
                     columns);
    return result.damaged ? CLI_FAILED : CLI_OK;
}

int run_cache_gc(const struct verb_call *call)
{
    static const struct column columns[] = {{"removed", "entries removed", COLUMN_NUMBER},
                                            {"removed_bytes", "bytes removed", COLUMN_BYTES},
                                            {"kept", "entries kept", COLUMN_NUMBER},
                                            {"kept_bytes", "bytes kept", COLUMN_BYTES},
                                            {0}};
    _cleanup_(cache_closep) struct cache *cache = NULL;
    uint64_t bytes = verb_given(call, "max-bytes") ? verb_bytes(call, "max-bytes") : UINT64_MAX;
    uint64_t age = verb_given(call, "max-age") ? verb_duration(call, "max-age") / 1000000000 : 0;
    struct cache_gc_result result;
    struct error err = {0};

    if (open_cache(call, CHANGE, &cache, &err) < 0 ||
        cache_gc(cache, bytes, age, &result, &err) < 0)
        return cli_fail(call, &err);
    return cli_print_object(call,
                            json_pack("{s:I, s:I, s:I, s:I}", "removed", (json_int_t)result.removed,
                                      "removed_bytes", (json_int_t)result.removed_bytes, "kept",
                                      (json_int_t)result.kept, "kept_bytes",
                                      (json_int_t)result.kept_bytes),
                            columns);
}

static bool of_kind(void *ctx, const struct cache_entry *entry)
{
    return entry->kind == *(const unsigned *)ctx;
}

/* Written beside its name and renamed: a bundle that is there is whole. */
static int export_to(struct cache *cache, const char *path, unsigned kind, uint64_t *ret_count,
                     struct error *err)
{
    bool to_stdout = !strcmp(path, "-");
    _cleanup_free_ char *part = x_printf("%s.part", path);
    _cleanup_fd_ int fd = to_stdout ? fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3)
                                    : open(part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

    if (fd < 0)
        return error_sys(err, errno, "%s", to_stdout ? "standard output" : part);
    int r = cache_export(cache, fd, kind ? of_kind : NULL, &kind, ret_count, err);
    if (to_stdout)
        return r;
    if (r == 0 && (fsync(fd) < 0 || rename(part, path) < 0))
        r = error_sys(err, errno, "%s", path);
    if (r < 0)
        unlink(part);
    return r;
}

int run_cache_export(const struct verb_call *call)
{
    static const struct column columns[] = {
        {"exported", "entries written", COLUMN_NUMBER}, {"file", "to", COLUMN_TEXT}, {0}};
    _cleanup_(cache_closep) struct cache *cache = NULL;
    /* main.c lists them in the order of their numbers, which begin at 1; 0 is all. */
    unsigned kind = (unsigned)(verb_choice(call, "kind") + 1);
    struct error err = {0};
    uint64_t count = 0;

    int r = open_cache(call, LOOK, &cache, &err);
    if (r == 0)
        r = export_to(cache, call->argv[0], kind, &count, &err);
    if (r < 0)
        return cli_fail(call, &err);
    if (!strcmp(call->argv[0], "-"))
        return CLI_OK; /* standard output is the bundle */
    return cli_print_object(
        call, json_pack("{s:I, s:s}", "exported", (json_int_t)count, "file", call->argv[0]),
        columns);
}

int run_cache_import(const struct verb_call *call)
{
    static const struct column columns[] = {{"imported", "entries imported", COLUMN_NUMBER},
                                            {"present", "already there", COLUMN_NUMBER},
                                            {"bytes", "bytes", COLUMN_BYTES},
                                            {0}};
    _cleanup_(cache_closep) struct cache *cache = NULL;
    bool from_stdin = !strcmp(call->argv[0], "-");
    struct cache_import_result result = {0};
    struct error err = {0};

    _cleanup_fd_ int fd = from_stdin ? fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 3)
                                     : open(call->argv[0], O_RDONLY | O_CLOEXEC);
    int r = fd < 0 ? error_sys(&err, errno, "%s", call->argv[0]) : 0;
    if (r == 0)
        r = open_cache(call, MAKE, &cache, &err);
    if (r == 0)
        r = cache_import(cache, fd, &result, &err);
    if (r < 0 && cache && !from_stdin)
        error_prefix(&err, "%s", call->argv[0]);
    if (r < 0)
        return cli_fail(call, &err);
    return cli_print_object(call,
                            json_pack("{s:I, s:I, s:I}", "imported", (json_int_t)result.imported,
                                      "present", (json_int_t)result.present, "bytes",
                                      (json_int_t)result.bytes),
                            columns);
}
