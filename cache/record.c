/* SPDX-License-Identifier: Apache-2.0 */
#include "cache/record.h"

#include <errno.h>
#include <stdio.h>

static const struct {
    unsigned number;
    const char *name;
} kinds[] = {
#define X(id, number, name) {number, name},
    CACHE_KINDS(X)
#undef X
};

const char *cache_kind_name(unsigned kind)
{
    for (size_t i = 0; i < ARRAY_LEN(kinds); i++)
        if (kinds[i].number == kind)
            return kinds[i].name;
    return NULL;
}

char *record_label(unsigned kind, const char *subject, size_t subject_len,
                   char buf[RECORD_LABEL_MAX])
{
    const char *name = cache_kind_name(kind);

    snprintf(buf, RECORD_LABEL_MAX, "%s '%.*s'", name ? name : "entry", (int)subject_len, subject);
    for (char *c = buf; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f)
            *c = '?';
    return buf;
}

/* ---- Keys ---- */

static struct digest record_key_digest(unsigned kind, const void *factors, size_t len)
{
    uint8_t prefix[8] = {'E', 'M', 'B', 'K'};
    struct digest_state *state = digest_begin();

    put_le(prefix + 4, 2, RECORD_VERSION);
    put_le(prefix + 6, 2, kind);
    digest_update(state, prefix, sizeof prefix);
    if (len)
        digest_update(state, factors, len);
    return digest_end(state);
}

struct cache_key *cache_key_begin(enum cache_kind kind, const char *subject)
{
    struct cache_key *key = x_alloc(sizeof *key);

    key->kind = kind;
    if (!cache_kind_name(kind))
        key->broken = "unknown kind";
    else if (strlen(subject) > CACHE_SUBJECT_MAX)
        key->broken = "subject too long";
    snprintf(key->subject, sizeof key->subject, "%s", subject);
    key->digest = record_key_digest(kind, NULL, 0);
    return key;
}

void cache_key_add(struct cache_key *key, const char *name, const void *value, size_t len)
{
    uint8_t head[FACTOR_HEAD];
    size_t name_len = strlen(name);
    bool is_digest = len > CACHE_INLINE_MAX;
    struct digest d;

    if (key->broken)
        return;
    if (!name_len || name_len > CACHE_NAME_MAX || key->n_factors == CACHE_FACTORS_MAX) {
        key->broken = name_len && name_len <= CACHE_NAME_MAX
                          ? "too many factors"
                          : "a factor's name is empty or too long";
        return;
    }
    put_le(head, 2, name_len);
    put_le(head + 2, 2, is_digest);
    put_le(head + 4, 8, len);
    if (is_digest)
        d = digest_of(value, len);
    if (buffer_append(&key->factors, head, sizeof head) < 0 ||
        buffer_append(&key->factors, name, name_len) < 0 ||
        buffer_append(&key->factors, is_digest ? d.bytes : value, is_digest ? sizeof d : len) < 0) {
        key->broken = "out of memory";
        return;
    }
    key->n_factors++;
    key->digest = record_key_digest(key->kind, key->factors.data, key->factors.len);
}

void cache_key_add_string(struct cache_key *key, const char *name, const char *value)
{
    cache_key_add(key, name, value, strlen(value));
}

void cache_key_add_u64(struct cache_key *key, const char *name, uint64_t value)
{
    char text[24];

    snprintf(text, sizeof text, "%llu", (unsigned long long)value);
    cache_key_add_string(key, name, text);
}

void cache_key_free(struct cache_key *key)
{
    if (!key)
        return;
    buffer_free(&key->factors);
    free(key);
}

struct digest cache_key_digest(const struct cache_key *key)
{
    return key->digest;
}

/* ---- Factors ---- */

static void factor_text(struct cache_factor *f)
{
    const uint8_t *v = f->value;
    bool printable = true;
    size_t used = 0;

    for (size_t i = 0; i < f->value_len; i++)
        printable &= v[i] >= 0x20 && v[i] < 0x7f;
    if (!f->is_digest && printable) {
        snprintf(f->text, sizeof f->text, "%.*s", (int)f->value_len, (const char *)v);
        return;
    }
    for (size_t i = 0; i < f->value_len; i++)
        used += (size_t)snprintf(f->text + used, sizeof f->text - used, "%02x", v[i]);
    if (f->is_digest)
        snprintf(f->text + used, sizeof f->text - used, " (%llu bytes)",
                 (unsigned long long)f->full_len);
}

/* Steps without making texts. 1: one factor; 0: at the end; -1: malformed. */
static int factor_step(const void *factors, size_t len, size_t *pos, struct cache_factor *ret)
{
    const uint8_t *p = (const uint8_t *)factors + *pos;
    size_t left = len - *pos;

    if (!left)
        return 0;
    if (left < FACTOR_HEAD)
        return -1;
    size_t name_len = get_le(p, 2), form = get_le(p + 2, 2);
    uint64_t full = get_le(p + 4, 8);
    if (!name_len || name_len > CACHE_NAME_MAX || form > 1 ||
        (form ? full <= CACHE_INLINE_MAX : full > CACHE_INLINE_MAX))
        return -1;
    size_t value_len = form ? sizeof(struct digest) : (size_t)full;
    if (left - FACTOR_HEAD < name_len + value_len || memchr(p + FACTOR_HEAD, 0, name_len))
        return -1;
    memcpy(ret->name, p + FACTOR_HEAD, name_len);
    ret->name[name_len] = 0;
    ret->value = p + FACTOR_HEAD + name_len;
    ret->value_len = value_len;
    ret->full_len = full;
    ret->is_digest = form == 1;
    *pos += FACTOR_HEAD + name_len + value_len;
    return 1;
}

bool cache_factor_next(const void *factors, size_t len, size_t *pos, struct cache_factor *ret)
{
    if (!factors || *pos > len || factor_step(factors, len, pos, ret) != 1)
        return false;
    factor_text(ret);
    return true;
}

/* ---- Records ---- */

static int check_factors(const struct record *record)
{
    struct cache_factor factor;
    size_t pos = 0;
    unsigned n = 0;
    int r;

    while ((r = factor_step(record->factors, record->factors_len, &pos, &factor)) == 1)
        n++;
    return r == 0 && n == record->n_factors ? 0 : -EBADMSG;
}

static uint64_t head_checksum(const uint8_t *bytes, const void *subject, size_t subject_len,
                              const void *factors, size_t factors_len)
{
    uint8_t run[RECORD_HEAD - 8 + CACHE_SUBJECT_MAX + FACTORS_BYTES_MAX];
    size_t n = RECORD_HEAD - 8;

    memcpy(run, bytes, n);
    memcpy(run + n, subject, subject_len);
    n += subject_len;
    if (factors_len)
        memcpy(run + n, factors, factors_len);
    return checksum_of(run, n + factors_len);
}

/* The fixed part: fills *r with lengths that are known to lie within len bytes. */
static int parse_fixed(const uint8_t *p, size_t len, struct record *r, struct error *err)
{
    if (len < RECORD_HEAD)
        return error_set(err, EBADMSG, "%zu bytes, shorter than a record's header", len);
    if (memcmp(p, "EMBC", 4))
        return error_set(err, EBADMSG, "bad magic %02x%02x%02x%02x", p[0], p[1], p[2], p[3]);
    if (get_le(p + 4, 2) != RECORD_VERSION)
        return error_set(err, EBADMSG, "record version %u, this build reads %d",
                         (unsigned)get_le(p + 4, 2), RECORD_VERSION);
    uint64_t offset = get_le(p + 8, 4), payload_len = get_le(p + 16, 8), end;
    r->kind = (unsigned)get_le(p + 6, 2);
    r->factors_len = get_le(p + 12, 4);
    r->checksum = get_le(p + 24, 8);
    r->created_ns = get_le(p + 32, 8);
    memcpy(&r->key, p + 40, sizeof r->key);
    r->subject_len = get_le(p + 56, 2);
    r->n_factors = (unsigned)get_le(p + 58, 2);
    if (r->subject_len > CACHE_SUBJECT_MAX || r->factors_len > FACTORS_BYTES_MAX ||
        r->n_factors > CACHE_FACTORS_MAX ||
        offset != size_align(RECORD_HEAD + r->subject_len + r->factors_len, RECORD_ALIGN))
        return error_set(err, EBADMSG, "header lengths contradict each other");
    if (!size_add(offset, payload_len, &end) || end != len)
        return error_set(err, EBADMSG, "%zu bytes stored, the header says %llu + %llu", len,
                         (unsigned long long)offset, (unsigned long long)payload_len);
    r->subject = (const char *)p + RECORD_HEAD;
    r->factors = p + RECORD_HEAD + r->subject_len;
    r->payload = p + offset;
    r->payload_len = (size_t)payload_len;
    return 0;
}

int record_parse(const void *bytes, size_t len, struct record *ret, struct error *err)
{
    const uint8_t *p = bytes;
    struct record rec = {0};
    int r = parse_fixed(p, len, &rec, err);

    if (r < 0)
        return r;
    uint64_t sum = head_checksum(p, rec.subject, rec.subject_len, rec.factors, rec.factors_len);
    if (sum != get_le(p + RECORD_HEAD - 8, 8))
        return error_set(err, EBADMSG, "header checksum %016llx, stored %016llx",
                         (unsigned long long)sum,
                         (unsigned long long)get_le(p + RECORD_HEAD - 8, 8));
    if (check_factors(&rec) < 0 || memchr(rec.subject, 0, rec.subject_len))
        return error_set(err, EBADMSG, "malformed factor list or subject");
    struct digest key = record_key_digest(rec.kind, rec.factors, rec.factors_len);
    if (!digest_equal(&key, &rec.key))
        return error_set(err, EBADMSG, "the key is not the digest of the factors");
    *ret = rec;
    return 0;
}

int record_check_payload(const struct record *record, struct error *err)
{
    uint64_t sum = checksum_of(record->payload, record->payload_len);

    if (sum != record->checksum)
        return error_set(err, EBADMSG, "checksum of %zu bytes is %016llx, stored %016llx",
                         record->payload_len, (unsigned long long)sum,
                         (unsigned long long)record->checksum);
    return 0;
}

int record_head(const struct cache_key *key, const void *payload, size_t len, uint64_t created_ns,
                struct buffer *out, struct error *err)
{
    uint8_t head[RECORD_HEAD] = {'E', 'M', 'B', 'C'};
    static const uint8_t zeros[RECORD_ALIGN];
    size_t subject_len = strlen(key->subject);
    size_t used = RECORD_HEAD + subject_len + key->factors.len;
    size_t offset = (size_t)size_align(used, RECORD_ALIGN);

    if (key->broken)
        return error_set(err, EINVAL, "cache key of '%s': %s", key->subject, key->broken);
    put_le(head + 4, 2, RECORD_VERSION);
    put_le(head + 6, 2, key->kind);
    put_le(head + 8, 4, offset);
    put_le(head + 12, 4, key->factors.len);
    put_le(head + 16, 8, len);
    put_le(head + 24, 8, checksum_of(payload, len));
    put_le(head + 32, 8, created_ns);
    memcpy(head + 40, &key->digest, sizeof key->digest);
    put_le(head + 56, 2, subject_len);
    put_le(head + 58, 2, key->n_factors);
    put_le(head + 64, 8,
           head_checksum(head, key->subject, subject_len, key->factors.data, key->factors.len));
    if (buffer_append(out, head, sizeof head) < 0 ||
        buffer_append(out, key->subject, subject_len) < 0 ||
        buffer_append(out, key->factors.data, key->factors.len) < 0 ||
        buffer_append(out, zeros, offset - used) < 0)
        return error_set(err, ENOMEM, "no memory for a cache record's header");
    return 0;
}
