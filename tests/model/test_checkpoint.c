/* SPDX-License-Identifier: Apache-2.0 */
/* Safetensors files and checkpoint folders: what is right is read, each kind of damage is named. */
#include "configs.h"

#include <errno.h>

#include "base/clock.h"
#include "model/safetensors.h"

static char dir[64];

static int setup(void **state)
{
    make_dir(dir);
    write_file(dir, "config.json", "{}", 2);
    return 0;
}

static int teardown(void **state)
{
    remove_dir(dir);
    return 0;
}

/* A file of this header and `data` zero bytes behind it; `claim` >= 0 is written as the header's
 * length. */
static void write_shard(const char *name, const char *header, size_t data, int64_t claim)
{
    size_t len = strlen(header);
    char *bytes = calloc(1, 8 + len + data);
    uint64_t said = claim >= 0 ? (uint64_t)claim : len;
    memcpy(bytes, &said, 8);
    memcpy(bytes + 8, header, len);
    write_file(dir, name, bytes, 8 + len + data);
    free(bytes);
}

static void refused(int code, const char *words)
{
    struct checkpoint *c = NULL;
    struct error err = {0};
    int r = checkpoint_open(dir, &c, &err);
    if (r != code || !strstr(err.text, words) || c)
        fail_msg("%d \"%s\", not %d \"%s\"", r, err.text, code, words);
}

static void header_refused(const char *header, size_t data, const char *words)
{
    write_shard("model.safetensors", header, data, -1);
    refused(-EBADMSG, words);
    if (!strstr(words, "JSON")) { /* the text names the file as well */
        struct error err = {0};
        struct checkpoint *c = NULL;
        assert_int_equal(checkpoint_open(dir, &c, &err), -EBADMSG);
        assert_non_null(strstr(err.text, "model.safetensors"));
    }
}

#define TENSOR(name, dtype, shape, begin, end)                                                     \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" #begin "," #end \
    "]}"

static void test_reads(void **state)
{
    struct checkpoint *c = NULL;
    struct error err = {0};
    uint8_t bytes[8];
    write_shard(
        "model.safetensors",
        "{\"__metadata__\":{\"format\":\"pt\"}," TENSOR("b", "F32", "[2,3]", 8, 32) "," TENSOR(
            "a", "BF16", "[4]", 0, 8) "," TENSOR("odd", "F8_E5M2", "[1,1,1,1,2]", 32, 34) "}   ",
        34, -1);
    if (checkpoint_open(dir, &c, &err) < 0)
        fail_msg("%s", err.text);
    assert_true(checkpoint_find(c, "a") && checkpoint_find(c, "odd"));
    const struct checkpoint_tensor *t = checkpoint_find(c, "b");
    assert_non_null(t);
    assert_int_equal(t->dtype, EMBER_F32);
    assert_int_equal(t->rank, 2);
    assert_int_equal(t->dim[1], 3);
    assert_int_equal(t->bytes, 24);
    assert_int_equal(checkpoint_find(c, "odd")->dtype, DTYPE_UNKNOWN);
    assert_int_equal(checkpoint_find(c, "odd")->rank, 5);
    assert_string_equal(checkpoint_find(c, "odd")->dtype_name, "F8_E5M2");
    assert_null(checkpoint_find(c, "c"));
    assert_int_equal(checkpoint_read(c, t, 16, bytes, 8, &err), 0);
    assert_int_equal(checkpoint_read(c, t, 17, bytes, 8, &err), -ERANGE);
    assert_int_equal(checkpoint_read(c, t, UINT64_MAX - 3, bytes, 8, &err), -ERANGE);
    checkpoint_free(c);
}

static void test_damage(void **state)
{
    write_file(dir, "model.safetensors", "abc", 3);
    refused(-EBADMSG, "too short");
    write_shard("model.safetensors", "{}", 0, INT64_MAX);
    refused(-EBADMSG, "header has 9223372036854775807");
    write_shard("model.safetensors", "{}", 0, 3);
    refused(-EBADMSG, "header has 3");
    write_shard("model.safetensors", "{}", 0, 200 * 1000 * 1000);
    refused(-EBADMSG, "limit");
    header_refused("[]", 0, "not a JSON object");
    header_refused("{\"a\":", 0, "not a JSON object");
    header_refused("{" TENSOR("a", "F32", "[2]", 0, 8) "," TENSOR("a", "F32", "[2]", 0, 8) "}", 8,
                   "not a JSON object");
    header_refused("{" TENSOR("a", "F32", "[2]", 0, 8) "}", 4, "truncated");
    header_refused("{" TENSOR("a", "F32", "[2]", 0, 8) "}", 12, "4 bytes behind");
    header_refused("{" TENSOR("a", "F32", "[3]", 0, 8) "}", 8, "do not take 8 bytes");
    header_refused("{" TENSOR("a", "F32", "[2]", 8, 0) "}", 8, "no valid data_offsets");
    header_refused("{" TENSOR("a", "F32", "[2]", -8, 0) "}", 8, "no valid data_offsets");
    header_refused("{" TENSOR("a", "F32", "[-2]", 0, 8) "}", 8, "dimension 0 is absurd");
    header_refused("{" TENSOR("a", "F32", "[4294967296,4294967296,16]", 0, 8) "}", 8,
                   "dimension 1 is absurd");
    header_refused("{" TENSOR("a", "F32", "[4611686018427387905]", 0, 4) "}", 4, "do not take");
    header_refused("{" TENSOR("a", "F32", "[2]", 0, 9223372036854775807) "}", 8, "truncated");
    header_refused("{" TENSOR("a", "F32", "[2]", 0, 8) "," TENSOR("b", "F32", "[2]", 4, 12) "}", 12,
                   "overlaps");
    header_refused("{" TENSOR("a", "F32", "[2]", 0, 8) "," TENSOR("b", "F32", "[1]", 12, 16) "}",
                   16, "belong to none");
    header_refused("{\"a\":{\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "no dtype");
    header_refused("{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,8]}}", 8, "no shape");
    header_refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8, "no valid data_offsets");
    header_refused("{\"a\":7}", 8, "no dtype");
}

static void write_index(const char *map)
{
    char text[512];
    snprintf(text, sizeof text, "{\"weight_map\":{%s}}", map);
    write_file(dir, "model.safetensors.index.json", text, strlen(text));
}

static void test_shards(void **state)
{
    struct checkpoint *c = NULL;
    struct error err = {0};
    refused(-ENOENT, "neither");
    write_shard("m1.safetensors", "{" TENSOR("a", "F32", "[2]", 0, 8) "}", 8, -1);
    write_shard("m2.safetensors", "{" TENSOR("b", "F32", "[2]", 0, 8) "}", 8, -1);
    write_index("\"a\":\"m1.safetensors\",\"b\":\"m2.safetensors\"");
    assert_int_equal(checkpoint_open(dir, &c, &err), 0);
    assert_int_not_equal(checkpoint_find(c, "a")->shard, checkpoint_find(c, "b")->shard);
    checkpoint_free(c);
    write_index("\"a\":\"m1.safetensors\",\"b\":\"m3.safetensors\"");
    refused(-ENOENT, "m3.safetensors of tensor b is missing");
    write_index("\"a\":\"m1.safetensors\",\"z\":\"m2.safetensors\"");
    refused(-EBADMSG, "tensor z is not in shard m2.safetensors");
    write_index("\"a\":\"m2.safetensors\",\"b\":\"m1.safetensors\"");
    refused(-EBADMSG, "is not in shard");
    write_index("\"a\":\"../m1.safetensors\"");
    refused(-EBADMSG, "not the name of a shard");
    write_index("\"a\":7");
    refused(-EBADMSG, "not the name of a shard");
    write_shard("m2.safetensors", "{" TENSOR("a", "F32", "[2]", 0, 8) "}", 8, -1);
    write_index("\"a\":\"m1.safetensors\",\"x\":\"m2.safetensors\"");
    refused(-EBADMSG, "both hold tensor a");
    write_file(dir, "model.safetensors.index.json", "{}", 2);
    refused(-EBADMSG, "weight_map");
    write_shard("m2.safetensors", "{" TENSOR("b", "F32", "[2]", 0, 8) "}", 5, -1);
    write_index("\"a\":\"m1.safetensors\",\"b\":\"m2.safetensors\"");
    refused(-EBADMSG, "m2.safetensors: tensor b ends at byte 8");
}

/* A header of 10^5 tensors, as a large MoE has it. */
static void test_many(void **state)
{
    struct buffer b = {0};
    struct checkpoint *c = NULL;
    struct error err = {0};
    uint64_t len, start;
    const uint32_t n = 100000;
    assert_int_equal(buffer_append(&b, "\0\0\0\0\0\0\0\0{", 9), 0);
    for (uint32_t i = 0; i < n; i++)
        buffer_printf(&b,
                      "%s\"model.layers.%u.mlp.experts.%u.gate_proj.weight\":{\"dtype\":\"BF16\","
                      "\"shape\":[1,2],\"data_offsets\":[%u,%u]}",
                      i ? "," : "", i / 500, i % 500, i * 4, i * 4 + 4);
    buffer_append(&b, "}", 1);
    len = b.len - 8;
    memcpy(b.data, &len, 8);
    assert_int_equal(buffer_reserve(&b, n * 4), 0);
    memset(b.data + b.len, 0, n * 4);
    write_file(dir, "model.safetensors", b.data, b.len + n * 4);
    start = clock_ns();
    if (checkpoint_open(dir, &c, &err) < 0)
        fail_msg("%s", err.text);
    print_message("opened %u tensors in %.0f ms\n", n, clock_ms_since(start));
    assert_int_equal(
        checkpoint_find(c, "model.layers.199.mlp.experts.499.gate_proj.weight")->offset,
        b.len + (n - 1) * 4);
    checkpoint_free(c);
    buffer_free(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_reads, setup, teardown),
        cmocka_unit_test_setup_teardown(test_damage, setup, teardown),
        cmocka_unit_test_setup_teardown(test_shards, setup, teardown),
        cmocka_unit_test_setup_teardown(test_many, setup, teardown),
    };
    return cmocka_run_group_tests_name("checkpoint", tests, NULL, NULL);
}
