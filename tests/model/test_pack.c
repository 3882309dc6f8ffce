/* SPDX-License-Identifier: Apache-2.0 */
/* Packs: what is written is read again; damage, full disks, kills, two writers. */
#include "configs.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fault.h"
#include "base/fd.h"
#include "model/pack/internal.h"

#define MODEL SOURCE_ROOT "/models/ember-tiny"

static char dir[64], path[96], part[104];
static struct checkpoint *checkpoint;
static struct model *model;
static struct weights_layout *layout;
static struct pack_source source;
static uint8_t *arena;

static int setup(void **state)
{
    struct error err = {0};
    make_dir(dir);
    snprintf(path, sizeof path, "%s/tiny.pack", dir);
    snprintf(part, sizeof part, "%s.part", path);
    if (checkpoint_open(MODEL, &checkpoint, &err) < 0)
        fail_msg("%s", err.text);
    source.config = checkpoint_config(checkpoint, &source.config_len);
    if (model_from_config(source.config, source.config_len, MODEL, &model, &err) < 0 ||
        model_layout(model, checkpoint, NULL, &layout, &err) < 0)
        fail_msg("%s", err.text);
    int fd = memfd_create("arena", MFD_CLOEXEC);
    assert_int_equal(ftruncate(fd, (off_t)layout->bytes), 0);
    arena = mmap(NULL, layout->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_true(arena != MAP_FAILED);
    for (uint64_t i = 0; i < layout->bytes; i++)
        arena[i] = (uint8_t)(i * 2654435761u >> 13);
    layout->digest = digest_of(arena, layout->bytes);
    source.dir = MODEL;
    source.layout = layout;
    source.key = checkpoint_key(checkpoint);
    source.recipe = "";
    source.arena = fd;
    signal(SIGXFSZ, SIG_IGN);
    return 0;
}

static int teardown(void **state)
{
    munmap(arena, layout->bytes);
    close(source.arena);
    weights_layout_free(layout);
    model_free(model);
    checkpoint_free(checkpoint);
    remove_dir(dir);
    return 0;
}

static int fresh(void **state)
{
    unlink(path);
    unlink(part);
    return 0;
}

static void write_pack(void)
{
    struct error err = {0};
    if (pack_write(&source, path, NULL, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(access(part, F_OK), -1);
}

static void assert_whole(void)
{
    static uint8_t buffer[PACK_SEGMENT_BYTES];
    struct pack *pack = NULL;
    struct error err = {0};
    if (pack_open(path, &pack, &err) < 0)
        fail_msg("%s", err.text);
    for (uint32_t i = 0; i < pack_info(pack)->segments; i++) {
        if (pack_segment_read(pack, i, buffer, &err) < 0)
            fail_msg("%s", err.text);
        assert_memory_equal(buffer, arena + pack_segment_at(pack, i), pack_segment_bytes(pack, i));
    }
    pack_free(pack);
}

static void reads_what_was_written(void **state)
{
    struct pack *pack = NULL;
    struct error err = {0};
    size_t len;
    write_pack();
    assert_whole();
    assert_true(pack_looks_like(path));
    assert_false(pack_looks_like(MODEL "/config.json"));
    assert_int_equal(pack_open(path, &pack, &err), 0);
    assert_true(pack_info(pack)->segments >= 4);
    assert_int_equal(pack_info(pack)->arena_bytes, layout->bytes);
    assert_string_equal(pack_dir(pack), MODEL);
    assert_string_equal(pack_config(pack, &len), source.config);
    assert_int_equal(len, source.config_len);
    assert_true(digest_equal(&pack_info(pack)->key, &source.key));
    assert_true(digest_equal(&pack_layout(pack)->digest, &layout->digest));
    assert_int_equal(pack_layout(pack)->n_weights, layout->n_weights);
    for (uint32_t i = 0; i < pack_info(pack)->segments; i++)
        assert_int_equal(pack_segment_file_at(pack, i) % (2 * MIB), 0);
    pack_free(pack);
}

/* ---- damage ---- */

static void poke(uint64_t at, uint8_t xor)
{
    uint8_t byte;
    int fd = open(path, O_RDWR);
    assert_int_equal(pread(fd, &byte, 1, (off_t)at), 1);
    byte ^= xor;
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)at), 1);
    close(fd);
}

static int open_code(struct error *err)
{
    struct pack *pack = NULL;
    *err = (struct error){0};
    int r = pack_open(path, &pack, err);
    pack_free(pack);
    return r;
}

/* Every byte of the header that is in use, and a sample of what follows it. */
static void damage_before_the_data_is_found(void **state)
{
    struct error err;
    struct pack *pack = NULL;
    write_pack();
    assert_int_equal(pack_open(path, &pack, &err), 0);
    uint64_t first = pack_segment_file_at(pack, 0);
    pack_free(pack);
    struct pack_section s;
    int fd = open(path, O_RDONLY);
    assert_int_equal(pread(fd, &s, sizeof s, offsetof(struct pack_header, sections)), sizeof s);
    close(fd);
    uint64_t end = s.table_at + s.n_segments * sizeof(struct digest);
    assert_true(end <= first);
    for (uint64_t at = 0; at < end; at += at < 300 ? 1 : 97) {
        bool gap = at >= PACK_HEADER_BYTES &&
                   (at < s.manifest_at || at >= s.table_at + 16 * s.n_segments ||
                    (at >= s.manifest_at + s.manifest_bytes && at < s.index_at) ||
                    (at >= s.index_at + s.index_bytes && at < s.table_at));
        if (gap)
            continue;
        poke(at, 0x10);
        int r = open_code(&err);
        if (r != -EBADMSG && r != -ESTALE)
            fail_msg("byte %llu: %d", (unsigned long long)at, r);
        assert_non_null(strstr(err.text, path));
        poke(at, 0x10);
    }
    assert_whole();
}

static void damaged_segment_is_named(void **state)
{
    static uint8_t buffer[PACK_SEGMENT_BYTES];
    struct pack *pack = NULL;
    struct error err = {0};
    write_pack();
    assert_int_equal(pack_open(path, &pack, &err), 0);
    poke(pack_segment_file_at(pack, 2) + 12345, 1);
    assert_int_equal(pack_segment_read(pack, 1, buffer, &err), 0);
    assert_int_equal(pack_segment_read(pack, 2, buffer, &err), -EBADMSG);
    assert_non_null(strstr(err.text, "segment 2 of"));
    assert_non_null(strstr(err.text, "layers."));
    pack_free(pack);
}

static void truncated_packs_are_refused(void **state)
{
    struct stat st;
    struct error err;
    write_pack();
    assert_int_equal(stat(path, &st), 0);
    const off_t sizes[] = {st.st_size - 1, st.st_size / 2, 4 * 1024 * 1024, 4096, 4095, 100, 1, 0};
    for (size_t i = 0; i < ARRAY_LEN(sizes); i++) {
        assert_int_equal(truncate(path, sizes[i]), 0);
        assert_int_equal(open_code(&err), -EBADMSG);
    }
}

static void packs_of_a_wrong_length_say_which_way(void **state)
{
    struct stat st;
    struct error err;
    write_pack();
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(truncate(path, st.st_size + 1), 0);
    assert_int_equal(open_code(&err), -EBADMSG);
    assert_non_null(strstr(err.text, "something stands behind it"));
    assert_int_equal(truncate(path, st.st_size - 1), 0);
    assert_int_equal(open_code(&err), -EBADMSG);
    assert_non_null(strstr(err.text, "truncated?"));
}

/* A header changed by somebody who can compute its checksum. */
static void edit_header(void (*edit)(struct pack_header *h))
{
    uint8_t block[PACK_HEADER_BYTES];
    struct pack_header h;
    int fd = open(path, O_RDWR);
    assert_int_equal(pread(fd, block, sizeof block, 0), sizeof block);
    memcpy(&h, block, sizeof h);
    edit(&h);
    memcpy(block, &h, sizeof h);
    h.checksum = pack_header_checksum(block);
    memcpy(block, &h, sizeof h);
    assert_int_equal(pwrite(fd, block, sizeof block, 0), sizeof block);
    close(fd);
}
static void other_version(struct pack_header *h)
{
    h->version = 2;
}
static void other_family(struct pack_header *h)
{
    strcpy(h->sections[0].family, "tiles.7");
}
static void overlapping(struct pack_header *h)
{
    h->sections[0].index_at = h->sections[0].manifest_at;
}
static void outside(struct pack_header *h)
{
    h->sections[0].data_at = (h->file_bytes + 2 * MIB) & ~(2 * MIB - 1);
}
static void wrapping(struct pack_header *h)
{
    h->sections[0].manifest_bytes = UINT64_MAX - 100;
}
static void tiny_segments(struct pack_header *h)
{
    h->sections[0].segment_bytes = 1;
}
static void many_segments(struct pack_header *h)
{
    h->sections[0].n_segments = UINT32_MAX;
}
static void many_sections(struct pack_header *h)
{
    h->n_sections = 9;
}
static void unfinished(struct pack_header *h)
{
    h->state = PACK_WRITING;
}

static void hostile_headers_are_refused(void **state)
{
    static const struct {
        void (*edit)(struct pack_header *h);
        int code;
        const char *word;
    } cases[] = {
        {other_version, -ESTALE, "version 2"}, {other_family, -ESTALE, "tiles.7"},
        {overlapping, -EBADMSG, "overlap"},    {outside, -EBADMSG, "outside"},
        {wrapping, -EBADMSG, "sense"},         {tiny_segments, -EBADMSG, "sense"},
        {many_segments, -EBADMSG, "segments"}, {many_sections, -EBADMSG, "sections"},
        {unfinished, -EBADMSG, "finished"},
    };
    struct error err;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        unlink(path);
        write_pack();
        edit_header(cases[i].edit);
        assert_int_equal(open_code(&err), cases[i].code);
        assert_non_null(strstr(err.text, cases[i].word));
    }
}

/* As a pack for several processors would be: this one's section is the second. */
static void two_families(struct pack_header *h)
{
    h->n_sections = 2;
    h->sections[1] = h->sections[0];
    strcpy(h->sections[0].family, "rows.1");
}

static void its_own_section_is_read(void **state)
{
    write_pack();
    edit_header(two_families);
    assert_whole();
    edit_header(other_family); /* of the first, now; the second is still this one's */
    assert_whole();
}

/* ---- writing ---- */

static void faults(const char *text)
{
    setenv("EMBER_FAULT", text, 1);
    fault_init();
}

/* Runs pack_write in a child; its status as of wait(2). */
static int write_in_child(const char *fault, uint64_t file_limit)
{
    pid_t pid = fork();
    if (pid == 0) {
        struct error err = {0};
        if (fault)
            faults(fault);
        if (file_limit)
            setrlimit(RLIMIT_FSIZE, &(struct rlimit){file_limit, file_limit});
        int r = pack_write(&source, path, NULL, &err);
        _exit(r == -ENOSPC && *err.text ? 28 : r < 0 ? 1 : 0);
    }
    int status = 0;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return status;
}

/* Killed at each write in turn, each time going on where the one before was. */
static void killed_anywhere_it_goes_on(void **state)
{
    int kills = 0;
    for (int n = 1; n < 60; n++) {
        char fault[40];
        snprintf(fault, sizeof fault, "pack-write:%d=kill", n);
        int status = write_in_child(fault, 0);
        assert_true(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
        if (!WIFSIGNALED(status))
            break;
        kills++;
        struct error err;
        assert_true(open_code(&err) < 0); /* nothing half-written has the name */
    }
    assert_true(kills >= 5);
    write_pack();
    assert_whole();
}

static int count_bytes(void *ctx, uint64_t done, uint64_t total)
{
    return 0;
}

/* What is there is kept: the second writer needs fewer writes. */
static void segments_that_are_there_are_kept(void **state)
{
    assert_true(WIFSIGNALED(write_in_child("pack-write:10=kill", 0)));
    struct stat before, after;
    assert_int_equal(stat(part, &before), 0);
    uint8_t *kept = malloc(2 * MIB);
    int fd = open(part, O_RDONLY);
    assert_true(pread(fd, kept, 2 * MIB, 2 * MIB) == (ssize_t)(2 * MIB));
    assert_memory_equal(kept, arena, 2 * MIB); /* segment 0, behind one block of metadata */
    free(kept);
    close(fd);
    /* 3 segments were there (writes 4 to 9): the 4 left and the header are 9 writes at most. */
    faults("pack-write:16");
    struct error err = {0};
    struct pack_write_options options = {.progress = count_bytes};
    int r = pack_write(&source, path, &options, &err);
    unsetenv("EMBER_FAULT");
    fault_init();
    if (r < 0)
        fail_msg("%s", err.text);
    assert_int_equal(stat(path, &after), 0);
    assert_int_equal(before.st_ino, after.st_ino);
    assert_whole();
}

/* A segment that was damaged between the two is written again. */
static void kept_segments_are_compared(void **state)
{
    assert_true(WIFSIGNALED(write_in_child("pack-write:10=kill", 0)));
    int fd = open(part, O_RDWR);
    assert_int_equal(pwrite(fd, "damage", 6, 2 * MIB + 1000), 6);
    close(fd);
    write_pack();
    assert_whole();
}

static void part_of_another_source_is_begun_anew(void **state)
{
    assert_true(WIFSIGNALED(write_in_child("pack-write:10=kill", 0)));
    struct pack_source before = source;
    source.key.bytes[0] ^= 1;
    write_pack();
    assert_whole();
    source = before;
}

static void full_disk_leaves_nothing(void **state)
{
    for (int n = 1; n < 60; n++) {
        char fault[40];
        snprintf(fault, sizeof fault, "pack-write:%d", n);
        int status = write_in_child(fault, 0);
        assert_true(WIFEXITED(status));
        if (WEXITSTATUS(status) == 0)
            break;
        assert_int_equal(WEXITSTATUS(status), 28);
        assert_int_equal(access(path, F_OK), -1);
        assert_int_equal(access(part, F_OK), -1);
    }
    assert_whole();
    fresh(NULL);
    assert_int_equal(WEXITSTATUS(write_in_child(NULL, 5 * MIB)), 28);
    assert_int_equal(access(part, F_OK), -1);
}

static void one_writer_at_a_time(void **state)
{
    struct error err = {0};
    int fd = open(part, O_RDWR | O_CREAT, 0600);
    assert_int_equal(flock(fd, LOCK_EX), 0);
    assert_int_equal(pack_write(&source, path, NULL, &err), -EBUSY);
    assert_non_null(strstr(err.text, "another process"));
    close(fd);
    write_pack();
    assert_whole();
}

static int stop_at_once(void *ctx, uint64_t done, uint64_t total)
{
    return 1;
}

static void cancelled_keeps_its_part(void **state)
{
    struct pack_write_options options = {.progress = stop_at_once};
    struct error err = {0};
    assert_int_equal(pack_write(&source, path, &options, &err), -ECANCELED);
    assert_int_equal(access(part, F_OK), 0);
    assert_int_equal(access(path, F_OK), -1);
    write_pack();
    assert_whole();
}

/* Slower it may be. */
static void rate_is_a_bound(void **state)
{
    struct pack_write_options options = {.rate = 40 * MIB};
    struct error err = {0};
    uint64_t start = clock_ns();
    if (pack_write(&source, path, &options, &err) < 0)
        fail_msg("%s", err.text);
    assert_true(clock_ms_since(start) >= 1e3 * (double)layout->bytes / (40 * MIB));
    assert_whole();
}

static void key_follows_the_files(void **state)
{
    char copy[96], file[128];
    struct checkpoint *a = NULL;
    struct error err = {0};
    snprintf(copy, sizeof copy, "%s/copy", dir);
    assert_int_equal(mkdir(copy, 0700), 0);
    static const char *const names[] = {"config.json", "model.safetensors"};
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        char from[256];
        char *data = NULL;
        size_t len;
        snprintf(from, sizeof from, MODEL "/%s", names[i]);
        assert_int_equal(fd_read_file(from, GIB, &data, &len, &err), 0);
        write_file(copy, names[i], data, len);
        free(data);
    }
    assert_int_equal(checkpoint_open(copy, &a, &err), 0);
    struct digest first = checkpoint_key(a), again = checkpoint_key(a);
    assert_true(digest_equal(&first, &again));
    checkpoint_free(a);
    snprintf(file, sizeof file, "%s/model.safetensors", copy);
    struct timespec times[2] = {{1, 0}, {1, 0}};
    assert_int_equal(utimensat(AT_FDCWD, file, times, 0), 0);
    assert_int_equal(checkpoint_open(copy, &a, &err), 0);
    again = checkpoint_key(a);
    assert_false(digest_equal(&first, &again));
    checkpoint_free(a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(reads_what_was_written, fresh),
        cmocka_unit_test_setup(damage_before_the_data_is_found, fresh),
        cmocka_unit_test_setup(damaged_segment_is_named, fresh),
        cmocka_unit_test_setup(truncated_packs_are_refused, fresh),
        cmocka_unit_test_setup(packs_of_a_wrong_length_say_which_way, fresh),
        cmocka_unit_test_setup(hostile_headers_are_refused, fresh),
        cmocka_unit_test_setup(its_own_section_is_read, fresh),
        cmocka_unit_test_setup(killed_anywhere_it_goes_on, fresh),
        cmocka_unit_test_setup(segments_that_are_there_are_kept, fresh),
        cmocka_unit_test_setup(kept_segments_are_compared, fresh),
        cmocka_unit_test_setup(part_of_another_source_is_begun_anew, fresh),
        cmocka_unit_test_setup(full_disk_leaves_nothing, fresh),
        cmocka_unit_test_setup(one_writer_at_a_time, fresh),
        cmocka_unit_test_setup(cancelled_keeps_its_part, fresh),
        cmocka_unit_test_setup(rate_is_a_bound, fresh),
        cmocka_unit_test_setup(key_follows_the_files, fresh),
    };
    return cmocka_run_group_tests_name("pack", tests, setup, teardown);
}
