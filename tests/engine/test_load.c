/* SPDX-License-Identifier: Apache-2.0 */
/* Loads: checkpoints and packs give the same memory; damage, changed sources, room, early use. */
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/fault.h"
#include "base/fd.h"
#include "cache/filling.h"
#include "engine/load.h"
#include "engine/packs.h"

#define MODEL SOURCE_ROOT "/models/ember-tiny"
#define QUANT SOURCE_ROOT "/tests/goldens/qwen3-awq"

static char dir[] = "/tmp/ember-test-load-XXXXXX";
static char copy[64], pack[96], folder[64];
static struct loaded reference = {.weights = -1, .manifest = -1};

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    return remove(path);
}

static void copy_file(const char *from_dir, const char *name)
{
    char from[256], to[256];
    char *data = NULL;
    size_t len;
    snprintf(from, sizeof from, "%s/%s", from_dir, name);
    snprintf(to, sizeof to, "%s/%s", copy, name);
    assert_int_equal(fd_read_file(from, GIB, &data, &len, NULL), 0);
    int fd = open(to, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_int_equal(fd_write_all(fd, data, len, to, NULL), 0);
    close(fd);
    free(data);
}

static int setup(void **state)
{
    struct load_options options = {0};
    struct error err = {0};

    assert_non_null(mkdtemp(dir));
    snprintf(copy, sizeof copy, "%s/copy", dir);
    snprintf(pack, sizeof pack, "%s/tiny.pack", dir);
    snprintf(folder, sizeof folder, "%s/packs", dir);
    assert_int_equal(mkdir(copy, 0700), 0);
    if (load_checkpoint(MODEL, &options, &reference, &err) < 0)
        fail_msg("%s", err.text);
    return 0;
}

static int teardown(void **state)
{
    loaded_close(&reference);
    nftw(dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    return 0;
}

/* A checkpoint of its own and its pack, for a test to change. */
static int fresh(void **state)
{
    struct load_options options = {0};
    struct loaded loaded;
    struct error err = {0};

    nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    copy_file(MODEL, "config.json");
    copy_file(MODEL, "model.safetensors");
    if (load_checkpoint(copy, &options, &loaded, &err) < 0 ||
        packs_write(copy, &loaded.key, "", loaded.weights, loaded.manifest, pack, NULL, &err) < 0)
        fail_msg("%s", err.text);
    loaded_close(&loaded);
    return 0;
}

static struct loaded load(const char *path, const char *packs)
{
    struct load_options options = {.packs = packs};
    struct loaded loaded = {.weights = -1, .manifest = -1};
    struct error err = {0};

    if (load_model(path, &options, &loaded, &err) < 0)
        fail_msg("%s", err.text);
    return loaded;
}

static void assert_same_weights(const struct loaded *a, const struct loaded *b)
{
    assert_int_equal(a->bytes, b->bytes);
    assert_true(digest_equal(&a->digest, &b->digest));
    void *x = mmap(NULL, a->bytes, PROT_READ, MAP_SHARED, a->weights, 0);
    void *y = mmap(NULL, b->bytes, PROT_READ, MAP_SHARED, b->weights, 0);
    assert_true(x != MAP_FAILED && y != MAP_FAILED);
    assert_memory_equal(x, y, a->bytes);
    munmap(x, a->bytes);
    munmap(y, b->bytes);
    int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL;
    assert_int_equal(fcntl(a->weights, F_GET_SEALS), seals);
    assert_int_equal(fcntl(a->manifest, F_GET_SEALS), seals);
}

static void pack_gives_the_checkpoints_memory(void **state)
{
    struct loaded loaded = load(pack, NULL);

    assert_true(loaded.from_pack);
    assert_int_equal(loaded.repaired, 0);
    assert_string_equal(loaded.notice, "");
    assert_same_weights(&loaded, &reference);
    loaded_close(&loaded);
}

/* A load that finds other bytes than stand there, as the fault says. */
static struct loaded load_damaged(const char *path, const char *fault)
{
    setenv("EMBER_FAULT", fault, 1);
    fault_init();
    struct loaded loaded = load(path, NULL);
    unsetenv("EMBER_FAULT");
    fault_init();
    return loaded;
}

/* The same with codes, scales and zero points; damaged, they are made again from the checkpoint. */
static void quantised_pack_gives_the_checkpoints_memory(void **state)
{
    struct load_options options = {0};
    struct loaded a, b;
    struct error err = {0};
    char path[96];

    snprintf(path, sizeof path, "%s/awq.pack", dir);
    if (load_checkpoint(QUANT, &options, &a, &err) < 0 ||
        packs_write(QUANT, &a.key, "", a.weights, a.manifest, path, NULL, &err) < 0)
        fail_msg("%s", err.text);
    assert_true(a.converted);
    b = load(path, NULL);
    assert_same_weights(&b, &a);
    loaded_close(&b);
    b = load_damaged(path, "pack-read:1");
    assert_int_equal(b.repaired, 1);
    assert_same_weights(&b, &a);
    loaded_close(&a);
    loaded_close(&b);
}

static void poke(uint64_t at)
{
    int fd = open(pack, O_RDWR);
    assert_int_equal(pwrite(fd, "damage", 6, (off_t)at), 6);
    close(fd);
}

static uint64_t segment_place(uint32_t i)
{
    struct pack *p = NULL;
    assert_int_equal(pack_open(pack, &p, NULL), 0);
    uint64_t at = pack_segment_file_at(p, i);
    pack_free(p);
    return at;
}

static void damaged_segments_are_made_again(void **state)
{
    poke(segment_place(1) + 77);
    poke(segment_place(4));
    struct loaded loaded = load(pack, NULL);
    assert_int_equal(loaded.repaired, 2);
    assert_non_null(strstr(loaded.notice, "segment"));
    assert_non_null(strstr(loaded.notice, "made again from"));
    assert_same_weights(&loaded, &reference);
    loaded_close(&loaded);
}

static void expect_failure(const char *word)
{
    struct load_options options = {0};
    struct loaded loaded = {.weights = -1, .manifest = -1};
    struct error err = {0};

    assert_int_equal(load_model(pack, &options, &loaded, &err), -EBADMSG);
    assert_non_null(strstr(err.text, "segment 1 of"));
    assert_non_null(strstr(err.text, word));
    assert_int_equal(loaded.weights, -1);
}

static void damage_without_the_checkpoint_is_an_error(void **state)
{
    char shard[96];
    struct timespec long_ago[2] = {{1, 0}, {1, 0}};

    poke(segment_place(1));
    snprintf(shard, sizeof shard, "%s/model.safetensors", copy);
    assert_int_equal(utimensat(AT_FDCWD, shard, long_ago, 0), 0);
    expect_failure("has changed");
    assert_int_equal(unlink(shard), 0);
    expect_failure("cannot be made again");
}

/* Through the fault point: each segment in turn, whichever way it is read. */
static void every_segment_can_be_made_again(void **state)
{
    for (int n = 1; n <= 7; n++) {
        char fault[32];
        snprintf(fault, sizeof fault, "pack-read:%d", n);
        struct loaded loaded = load_damaged(pack, fault);
        assert_int_equal(loaded.repaired, 1);
        assert_same_weights(&loaded, &reference);
        loaded_close(&loaded);
    }
}

/* ---- the folder of packs ---- */

static int keep(const char *path, const struct loaded *loaded, uint64_t limit, struct error *err)
{
    struct packs_options options = {.folder = folder, .limit = limit};
    return packs_keep(path, &loaded->key, loaded->weights, loaded->manifest, &options, err);
}

static void kept_pack_is_read_instead(void **state)
{
    struct error err = {0};
    struct loaded loaded = load(copy, folder);
    char shard[96];

    assert_false(loaded.from_pack);
    assert_int_equal(keep(copy, &loaded, 0, &err), 0);
    assert_int_equal(keep(copy, &loaded, 0, &err), 1);
    struct loaded again = load(copy, folder);
    assert_true(again.from_pack);
    assert_same_weights(&again, &reference);
    assert_true(digest_equal(&again.key, &loaded.key));
    loaded_close(&again);
    /* Another checkpoint under the same name has no pack, and the old weights are not its. */
    struct timespec later[2] = {{1000, 0}, {1000, 0}};
    snprintf(shard, sizeof shard, "%s/model.safetensors", copy);
    assert_int_equal(utimensat(AT_FDCWD, shard, later, 0), 0);
    again = load(copy, folder);
    assert_false(again.from_pack);
    assert_int_equal(keep(copy, &loaded, 0, &err), -ESTALE);
    assert_non_null(strstr(err.text, "changed"));
    loaded_close(&again);
    loaded_close(&loaded);
}

static char *kept_path(void)
{
    struct checkpoint *checkpoint = NULL;
    assert_int_equal(checkpoint_open(copy, &checkpoint, NULL), 0);
    char *path = packs_path(folder, checkpoint, NULL);
    checkpoint_free(checkpoint);
    return path;
}

/* A pack that is no pack costs a notice, and is removed so that another one is written. */
static void unusable_pack_is_passed_over(void **state)
{
    struct error err = {0};
    struct loaded loaded = load(copy, folder);
    assert_int_equal(keep(copy, &loaded, 0, &err), 0);
    loaded_close(&loaded);
    _cleanup_free_ char *path = kept_path();
    assert_int_equal(truncate(path, 3 * 1024 * 1024), 0);
    loaded = load(copy, folder);
    assert_false(loaded.from_pack);
    assert_non_null(strstr(loaded.notice, "truncated"));
    assert_int_equal(access(path, F_OK), -1);
    assert_same_weights(&loaded, &reference);
    loaded_close(&loaded);
}

/* All of it damaged: all of it is made again, and a new one is wanted. */
static void every_damaged_segment_of_a_kept_pack(void **state)
{
    struct load_options options = {.packs = folder};
    struct error err = {0};
    struct loaded loaded = load(copy, folder);
    assert_int_equal(keep(copy, &loaded, 0, &err), 0);
    loaded_close(&loaded);
    _cleanup_free_ char *path = kept_path();
    setenv("EMBER_FAULT", "pack-read", 1);
    fault_init();
    int r = load_model(copy, &options, &loaded, &err); /* every segment, made again each time */
    unsetenv("EMBER_FAULT");
    fault_init();
    assert_int_equal(r, 0);
    assert_int_equal(loaded.repaired, 7);
    assert_true(loaded.converted);
    assert_int_equal(access(path, F_OK), -1);
    assert_same_weights(&loaded, &reference);
    loaded_close(&loaded);
}

static void folder_is_bounded(void **state)
{
    struct error err = {0};
    char other[96], part[104];
    struct timespec long_ago[2] = {{5, 0}, {5, 0}};
    struct loaded loaded = load(copy, folder);

    assert_int_equal(keep(copy, &loaded, 10 * MIB, &err), -E2BIG);
    assert_non_null(strstr(err.text, "packs_limit"));
    assert_int_equal(mkdir(folder, 0700) < 0 && errno != EEXIST, 0);
    snprintf(other, sizeof other, "%s/other-0000.pack", folder);
    snprintf(part, sizeof part, "%s/left-0001.pack.part", folder);
    const char *const names[] = {other, part};
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        int fd = open(names[i], O_WRONLY | O_CREAT, 0600);
        assert_int_equal(posix_fallocate(fd, 0, 12 * 1024 * 1024), 0);
        close(fd);
    }
    assert_int_equal(utimensat(AT_FDCWD, part, long_ago, 0), 0);
    assert_int_equal(keep(copy, &loaded, 35 * MIB, &err), 0);
    assert_int_equal(access(part, F_OK), -1); /* the oldest left */
    assert_int_equal(access(other, F_OK), 0);
    loaded_close(&loaded);
}

/* ---- early use ---- */

struct early {
    int weights, manifest;
    struct filling *filling;
    uint64_t seen;
    bool before;
};

static void attach(void *ctx, int weights, int manifest, int filling)
{
    struct early *early = ctx;
    struct error err = {0};

    assert_int_equal(fcntl(weights, F_GETFL) & O_ACCMODE, O_RDONLY);
    early->weights = fcntl(weights, F_DUPFD_CLOEXEC, 0);
    early->manifest = fcntl(manifest, F_DUPFD_CLOEXEC, 0);
    assert_int_equal(filling_attach(filling, &early->filling, &err), 0);
    early->before = filling_bytes(early->filling) == 0;
}

static int look(void *ctx, uint64_t done, uint64_t total)
{
    struct early *early = ctx;
    uint64_t bytes = filling_bytes(early->filling);

    assert_true(bytes >= early->seen);
    early->seen = bytes;
    return 0;
}

static void check_early(const char *path)
{
    struct early early = {0};
    struct load_options options = {.attachable = attach, .progress = look, .ctx = &early};
    struct loaded loaded;
    struct error err = {0};

    if (load_model(path, &options, &loaded, &err) < 0)
        fail_msg("%s", err.text);
    assert_true(early.before);
    assert_int_equal(filling_state(early.filling), FILLING_DONE);
    assert_int_equal(early.seen, loaded.bytes);
    struct digest digest = filling_digest(early.filling);
    assert_true(digest_equal(&digest, &loaded.digest));
    struct loaded seen = loaded; /* through the descriptor that was handed out early */
    seen.weights = early.weights;
    assert_same_weights(&seen, &reference);
    close(early.weights);
    close(early.manifest);
    filling_free(early.filling);
    loaded_close(&loaded);
}

static void memory_can_be_used_early(void **state)
{
    check_early(copy);
    check_early(pack);
}

static int stop(void *ctx, uint64_t done, uint64_t total)
{
    return 1;
}

/* Whoever waits for a load that ends is told so. */
static void failed_load_wakes_who_waits(void **state)
{
    struct early early = {0};
    struct load_options options = {
        .attachable = attach, .progress = stop, .ctx = &early, .rate = MIB};
    struct loaded loaded;
    struct error err = {0};

    assert_int_equal(load_model(copy, &options, &loaded, &err), -ECANCELED);
    assert_int_equal(filling_state(early.filling), FILLING_FAILED);
    assert_int_equal(filling_wait(early.filling, UINT64_MAX, NULL, NULL, &err), -EPIPE);
    close(early.weights);
    close(early.manifest);
    filling_free(early.filling);
}

/* Of checkpoints and packs; slower it may be. */
static void rate_is_a_bound(void **state)
{
    const char *paths[] = {copy, pack};

    for (size_t i = 0; i < ARRAY_LEN(paths); i++) {
        struct load_options options = {.rate = 40 * MIB};
        struct loaded loaded;
        struct error err = {0};
        if (load_model(paths[i], &options, &loaded, &err) < 0)
            fail_msg("%s", err.text);
        /* a thread may have taken its next block when it is told to wait */
        assert_true(loaded.ms >= 1e3 * (double)(loaded.bytes - 2 * MIB) / (40 * MIB));
        assert_same_weights(&loaded, &reference);
        loaded_close(&loaded);
    }
}

/* From the disk, past the page cache, where the file system lets go of its pages. */
static void pack_that_is_not_in_the_page_cache(void **state)
{
    int fd = open(pack, O_RDONLY);

    fdatasync(fd);
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
    struct loaded loaded = load(pack, NULL);
    assert_int_equal(loaded.repaired, 0);
    assert_same_weights(&loaded, &reference);
    loaded_close(&loaded);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(pack_gives_the_checkpoints_memory, fresh),
        cmocka_unit_test_setup(pack_that_is_not_in_the_page_cache, fresh),
        cmocka_unit_test_setup(rate_is_a_bound, fresh),
        cmocka_unit_test_setup(quantised_pack_gives_the_checkpoints_memory, fresh),
        cmocka_unit_test_setup(damaged_segments_are_made_again, fresh),
        cmocka_unit_test_setup(damage_without_the_checkpoint_is_an_error, fresh),
        cmocka_unit_test_setup(every_segment_can_be_made_again, fresh),
        cmocka_unit_test_setup(kept_pack_is_read_instead, fresh),
        cmocka_unit_test_setup(unusable_pack_is_passed_over, fresh),
        cmocka_unit_test_setup(every_damaged_segment_of_a_kept_pack, fresh),
        cmocka_unit_test_setup(folder_is_bounded, fresh),
        cmocka_unit_test_setup(memory_can_be_used_early, fresh),
        cmocka_unit_test_setup(failed_load_wakes_who_waits, fresh),
    };
    return cmocka_run_group_tests_name("load", tests, setup, teardown);
}
