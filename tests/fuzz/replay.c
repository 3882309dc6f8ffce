/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs a fuzz target over the files of a directory, and over mutations of each: the same ones in
 * every run, so that a failure repeats. `replay_X FILE` runs one file as it is.
 *
 * An input is handed over in an allocation of exactly its size, so that sanitizers see an overread.
 * The name of the file and the mutation's number are printed only when a run crashes.
 */
#include <dirent.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/mem.h"

#define MUTATIONS 200
#define INPUT_MAX (1u << 20)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static char running[512]; /* for the crash handler */

#ifndef __SANITIZE_ADDRESS__ /* its own report says more */
static void on_crash(int signum)
{
    ssize_t n = write(STDERR_FILENO, running, strlen(running));
    (void)n;
    signal(signum, SIG_DFL);
    raise(signum);
}
#endif

/* xorshift64*: quick, and the same everywhere. */
static uint64_t next(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * UINT64_C(0x2545f4914f6cdd1d);
}

static void run(const char *data, size_t size)
{
    _cleanup_free_ uint8_t *copy = x_alloc(size);
    memcpy(copy, data, size);
    LLVMFuzzerTestOneInput(copy, size);
}

/* A length or count in the middle of things, at its extremes. */
static void put_extreme(char *data, size_t size, uint64_t *seed)
{
    static const uint64_t values[] = {0,      1,         0x7f,       0xff,      0x7fff,
                                      0xffff, INT32_MAX, UINT32_MAX, INT64_MAX, UINT64_MAX};
    uint64_t value = values[next(seed) % ARRAY_LEN(values)];
    size_t width = (size_t)1 << next(seed) % 4;

    if (size >= width)
        memcpy(data + next(seed) % (size - width + 1), &value, width);
}

/* One to four edits; returns the new size, at most the old one. */
static size_t mutate(char *data, size_t size, uint64_t *seed)
{
    for (uint64_t edits = 1 + next(seed) % 4; edits && size; edits--) {
        size_t at = next(seed) % size, n = 1 + next(seed) % MIN(size - at, 32);
        switch (next(seed) % 6) {
        case 0:
            data[at] ^= (char)(1u << next(seed) % 8);
            break;
        case 1:
            data[at] = (char)next(seed);
            break;
        case 2:
            size = at; /* cut off */
            break;
        case 3:
            memmove(data + at, data + at + n, size - at - n);
            size -= n;
            break;
        case 4:
            memmove(data + next(seed) % (size - n + 1), data + at, n);
            break;
        case 5:
            put_extreme(data, size, seed);
            break;
        }
    }
    return size;
}

static int replay(const char *path, unsigned mutations)
{
    _cleanup_free_ char *data = NULL;
    struct error err;
    size_t size;

    if (fd_read_file(path, INPUT_MAX, &data, &size, &err) < 0) {
        fprintf(stderr, "%s\n", err.text);
        return -1;
    }
    snprintf(running, sizeof running, "crashed on %s\n", path);
    run(data, size);
    uint64_t seed = size * 2 + 1;
    for (unsigned i = 0; i < mutations; i++) {
        _cleanup_free_ char *copy = x_alloc(size + 1);
        memcpy(copy, data, size);
        snprintf(running, sizeof running, "crashed on %s, mutation %u\n", path, i);
        run(copy, mutate(copy, size, &seed));
    }
    return 0;
}

static int replay_directory(const char *path)
{
    struct dirent **entries;
    int n = scandir(path, &entries, NULL, alphasort), files = 0, failed = 0;

    for (int i = 0; i < n; i++) {
        _cleanup_free_ char *file = x_printf("%s/%s", path, entries[i]->d_name);
        struct stat st;
        if (entries[i]->d_name[0] != '.' && !stat(file, &st) && S_ISREG(st.st_mode)) {
            failed += replay(file, MUTATIONS) < 0;
            files++;
        }
        free(entries[i]);
    }
    if (n >= 0)
        free(entries);
    if (!files)
        fprintf(stderr, "%s: no inputs\n", path);
    printf("%d inputs, %d mutations of each\n", files, MUTATIONS);
    return failed || !files;
}

int main(int argc, char **argv)
{
    struct stat st;

    if (argc != 2 || stat(argv[1], &st) < 0) {
        fprintf(stderr, "usage: %s DIRECTORY|FILE\n", argv[0]);
        return 2;
    }
#ifndef __SANITIZE_ADDRESS__ /* its own report says more */
    static const int signals[] = {SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL};
    for (size_t i = 0; i < ARRAY_LEN(signals); i++)
        signal(signals[i], on_crash);
#endif
    run("", 0);
    return S_ISDIR(st.st_mode) ? replay_directory(argv[1]) : replay(argv[1], 0) < 0;
}
