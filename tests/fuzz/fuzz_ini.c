/* SPDX-License-Identifier: Apache-2.0 */
/* Configuration files; a file that is taken must read back as what it was shown to be. */
#include <assert.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/config.h"
#include "base/fd.h"

#define FUZZ_OPTIONS(X)                                                                            \
    X("a", number, INT, "1", "0..100", RELOAD, "h")                                                \
    X("a", size, BYTES, "1KiB", "", RELOAD, "h")                                                   \
    X("b", span, DURATION, "1s", "..1h", RELOAD, "h")                                              \
    X("b", flag, BOOL, "no", "", RELOAD, "h")                                                      \
    X("b", word, ENUM, "x", "x|yy|zzz", RELOAD, "h")                                               \
    X("c", path, PATH, "", "", RELOAD, "h")                                                        \
    X("c", paths, PATHS, "", "", RELOAD, "h")

struct fuzz {
    FUZZ_OPTIONS(CONFIG_MEMBER)
};
static const struct config_key keys[] = {
#define X(...) CONFIG_ROW(struct fuzz, __VA_ARGS__)
    FUZZ_OPTIONS(X)
#undef X
};
static const struct config_program program = {
    .name = "fuzz", .version = "1", .summary = "s", .keys = keys, .n_keys = ARRAY_LEN(keys)};

static int read_text(const void *data, size_t size, struct fuzz *options)
{
    _cleanup_fd_ int fd = memfd_create("fuzz", MFD_CLOEXEC);
    _cleanup_free_ char *path = x_printf("/proc/self/fd/%d", fd);
    struct error err = {0};

    assert(fd >= 0 && fd_write_all(fd, data, size, "fuzz", NULL) == 0);
    assert(config_defaults(&program, options, NULL) == 0);
    int r = config_read_file(&program, path, options, &err);
    assert((r < 0) == (err.text[0] != 0));
    return r;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz options = {0}, again = {0};
    struct buffer shown = {0};

    if (read_text(data, size, &options) == 0) {
        config_print(&program, CONFIG_SHOW, &options, &shown);
        if (read_text(shown.data, shown.len, &again) == 0) {
            assert(again.number == options.number && again.size == options.size);
            assert(again.span == options.span && again.word == options.word);
        }
    }
    buffer_free(&shown);
    config_free(&program, &options);
    config_free(&program, &again);
    return 0;
}
