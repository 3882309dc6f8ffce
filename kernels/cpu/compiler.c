/* SPDX-License-Identifier: Apache-2.0 */
/* Finding and naming the C compiler: see compile.h. */
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/mem.h"
#include "kernels/cpu/compile.h"

#define NOTES_MAX 4096
#define ID_MAX 32
#define PHDRS_MAX 64

static bool runnable(const char *path)
{
    struct stat st;
    return !stat(path, &st) && S_ISREG(st.st_mode) && !access(path, X_OK);
}

/* A name with a '/' as it is, any other along PATH; false: nowhere. */
static bool look_up(const char *name, char *ret, size_t size)
{
    const char *path = getenv("PATH");
    char *save = NULL;

    if (strchr(name, '/')) {
        snprintf(ret, size, "%s", name);
        return strlen(name) < size && runnable(ret);
    }
    _cleanup_free_ char *dirs = x_strdup(path && *path ? path : "/usr/local/bin:/usr/bin:/bin");
    for (char *dir = strtok_r(dirs, ":", &save); dir; dir = strtok_r(NULL, ":", &save)) {
        int n = snprintf(ret, size, "%s/%s", dir, name);
        if (*dir == '/' && n > 0 && (size_t)n < size && runnable(ret))
            return true;
    }
    return false;
}

/* The build id in one PT_NOTE segment; its length, 0 when it is not there. */
static size_t id_in_notes(const char *notes, size_t len, unsigned char id[ID_MAX])
{
    size_t at = 0;

    while (len - at >= sizeof(Elf64_Nhdr)) {
        Elf64_Nhdr n;
        memcpy(&n, notes + at, sizeof n);
        at += sizeof n;
        uint64_t desc = size_align(n.n_namesz, 4), end = desc + size_align(n.n_descsz, 4);
        if (end > len - at)
            return 0;
        if (n.n_type == NT_GNU_BUILD_ID && n.n_namesz == 4 && !memcmp(notes + at, "GNU", 4)) {
            size_t size = MIN(n.n_descsz, ID_MAX);
            memcpy(id, notes + at + desc, size);
            return size;
        }
        at += end;
    }
    return 0;
}

static size_t build_id(int fd, unsigned char id[ID_MAX])
{
    Elf64_Ehdr h;
    Elf64_Phdr p;
    char notes[NOTES_MAX];

    if (pread(fd, &h, sizeof h, 0) != sizeof h || memcmp(h.e_ident, ELFMAG, SELFMAG) ||
        h.e_ident[EI_CLASS] != ELFCLASS64 || h.e_phentsize != sizeof p)
        return 0;
    for (unsigned i = 0; i < MIN(h.e_phnum, PHDRS_MAX); i++) {
        if (pread(fd, &p, sizeof p, (off_t)(h.e_phoff + i * sizeof p)) != sizeof p)
            return 0;
        if (p.p_type != PT_NOTE || p.p_filesz > sizeof notes ||
            pread(fd, notes, p.p_filesz, (off_t)p.p_offset) != (ssize_t)p.p_filesz)
            continue;
        size_t n = id_in_notes(notes, p.p_filesz, id);
        if (n)
            return n;
    }
    return 0;
}

static int identify(const char *path, char *ret, size_t size, struct error *err)
{
    _cleanup_free_ char *real = realpath(path, NULL);
    _cleanup_fd_ int fd = real ? open(real, O_RDONLY | O_CLOEXEC) : -1;
    unsigned char id[ID_MAX];
    struct stat st;
    const char *base;

    if (fd < 0 || fstat(fd, &st) < 0)
        return error_sys(err, errno, "C compiler %s", path);
    base = strrchr(real, '/') + 1;
    size_t n = build_id(fd, id);
    if (!n) {
        snprintf(ret, size, "%.80s size %lld mtime %lld.%09ld", base, (long long)st.st_size,
                 (long long)st.st_mtim.tv_sec, st.st_mtim.tv_nsec);
        return 0;
    }
    int at = snprintf(ret, size, "%.80s build-id ", base);
    for (size_t i = 0; i < n; i++)
        at += snprintf(ret + at, size - (size_t)at, "%02x", id[i]);
    return 0;
}

int compiler_find(struct compiler *ret, struct error *err)
{
    const char *name = getenv("EMBER_CC");
    struct compiler c;
    int r;

    name = name && *name ? name : "cc";
    if (!strcmp(name, "never"))
        return error_set(err, ENOTSUP, "compiling kernels is switched off (EMBER_CC=never)");
    if (!look_up(name, c.path, sizeof c.path))
        return error_set(err, ENOENT,
                         "no C compiler (%s) found; install gcc or set EMBER_CC to one", name);
    r = identify(c.path, c.identity, sizeof c.identity, err);
    if (r < 0)
        return r;
    *ret = c;
    return 0;
}
