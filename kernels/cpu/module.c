/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cpu/module.h"

#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/fault.h"
#include "base/fd.h"
#include "base/mem.h"

#ifndef MFD_EXEC
#define MFD_EXEC 0x10u /* Linux 6.3: without it a host may make memfds non-executable */
#endif

#if defined(__x86_64__)
#define MACHINE EM_X86_64
#elif defined(__aarch64__)
#define MACHINE EM_AARCH64
#endif

/*
 * The descriptor stays open as long as the module: the loader knows an object by its path, and
 * /proc/self/fd/N of a descriptor that was closed and used again would find the old object.
 */
struct module {
    void *handle;
    int fd;
};

static int bad(struct error *err, const char *what)
{
    return error_set(err, EBADMSG, "compiled kernel: %s", what);
}

static bool within(uint64_t offset, uint64_t size, uint64_t len)
{
    return offset <= len && size <= len - offset;
}

static int check_segment(const Elf64_Phdr *p, size_t len, struct error *err)
{
    uint64_t end;

    if (!within(p->p_offset, p->p_filesz, len))
        return bad(err, "a segment lies behind the end of the file");
    if (p->p_filesz > p->p_memsz || !size_add(p->p_vaddr, p->p_memsz, &end) || end > GIB)
        return bad(err, "a segment of absurd size");
    if (p->p_type == PT_LOAD && (p->p_vaddr - p->p_offset) % 4096)
        return bad(err, "a segment that is not aligned");
    return 0;
}

static int check_object(const void *blob, size_t len, struct error *err)
{
    Elf64_Ehdr h;
    Elf64_Phdr p;
    int dynamic = 0, load = 0;

    if (len < sizeof h)
        return bad(err, "shorter than an ELF header");
    memcpy(&h, blob, sizeof h);
    if (memcmp(h.e_ident, ELFMAG, SELFMAG) || h.e_ident[EI_CLASS] != ELFCLASS64 ||
        h.e_ident[EI_DATA] != ELFDATA2LSB || h.e_type != ET_DYN)
        return bad(err, "not a 64-bit shared object");
    if (h.e_machine != MACHINE)
        return bad(err, "built for another kind of processor");
    if (h.e_phentsize != sizeof p || !within(h.e_phoff, (uint64_t)h.e_phnum * sizeof p, len) ||
        h.e_phoff % 8)
        return bad(err, "its program headers lie behind the end of the file");
    if (!within(h.e_shoff, (uint64_t)h.e_shnum * h.e_shentsize, len))
        return bad(err, "truncated: its section headers lie behind the end of the file");
    for (unsigned i = 0; i < h.e_phnum; i++) {
        memcpy(&p, (const char *)blob + h.e_phoff + i * sizeof p, sizeof p);
        int r = check_segment(&p, len, err);
        if (r < 0)
            return r;
        dynamic += p.p_type == PT_DYNAMIC;
        load += p.p_type == PT_LOAD;
        if (p.p_type == PT_INTERP)
            return bad(err, "a program, not a shared object");
    }
    return dynamic == 1 && load ? 0 : bad(err, "a shared object without its dynamic section");
}

static int blob_fd(const void *blob, size_t len, struct error *err)
{
    _cleanup_fd_ int fd = -1;
    int r;

    if (fault_hit(FAULT_FD))
        return error_sys(err, EMFILE, "memory for a compiled kernel");
    fd = memfd_create("ember-kernel", MFD_CLOEXEC | MFD_EXEC);
    if (fd < 0 && errno == EINVAL) /* an older kernel */
        fd = memfd_create("ember-kernel", MFD_CLOEXEC);
    if (fd < 0)
        return error_sys(err, errno, "memory for a compiled kernel");
    r = fd_write_all(fd, blob, len, "compiled kernel", err);
    return r < 0 ? r : TAKE_FD(fd);
}

int module_open(const void *blob, size_t len, struct module **ret, struct error *err)
{
    char path[64];
    struct module *module;
    void *handle;
    int r = check_object(blob, len, err);

    if (r < 0)
        return r;
    _cleanup_fd_ int fd = blob_fd(blob, len, err);
    if (fd < 0)
        return fd;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        const char *text = dlerror();
        return error_set(err, EBADMSG, "compiled kernel: %s", text ? text : "cannot be loaded");
    }
    module = x_alloc(sizeof *module);
    module->handle = handle;
    module->fd = TAKE_FD(fd);
    *ret = module;
    return 0;
}

void module_close(struct module *module)
{
    if (!module)
        return;
    dlclose(module->handle);
    fd_close(module->fd);
    free(module);
}

/* "linear.f32" is "linear_f32" in the object. */
static bool same_kernel(const char *in_object, const char *kernel)
{
    for (; *kernel; in_object++, kernel++)
        if (*in_object != (*kernel == '.' ? '_' : *kernel))
            return false;
    return !*in_object;
}

int module_entry(struct module *module, const char *kernel, cpu_kernel_fn *ret, struct error *err)
{
    const char *name = dlsym(module->handle, CPU_SPEC_NAME);
    void *entry = dlsym(module->handle, CPU_SPEC_ENTRY);

    if (!name || !entry)
        return bad(err, "it has no entry");
    if (!same_kernel(name, kernel))
        return error_set(err, ENOENT, "compiled kernel: it is %.64s, not %s", name, kernel);
    *(void **)ret = entry;
    return 0;
}
