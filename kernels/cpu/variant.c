/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cpu/variant.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "base/fd.h"
#include "cpu_digest.h"

#if defined(__x86_64__)
#define ARCHITECTURE "x86_64"
#elif defined(__aarch64__)
#define ARCHITECTURE "aarch64"
#endif

static int fail(struct ember_backend_error *error, int errnum, const char *format, const char *name)
{
    snprintf(error->text, sizeof error->text, format, name);
    return -errnum;
}

int cpu_variant_choose(const struct ember_device_options *options, enum cpu_isa *ret,
                       struct ember_backend_error *error)
{
    const char *want = options && options->isa ? options->isa : getenv("EMBER_ISA");

    if (!want || !*want) {
        *ret = cpu_isa_best();
        return 0;
    }
    for (int isa = 0; isa < CPU_ISA_COUNT; isa++) {
        if (strcmp(want, cpu_isa_name(isa)))
            continue;
        if (!cpu_isa_supported(isa))
            return fail(error, ENOTSUP, "this processor cannot run the \"%.32s\" kernels", want);
        *ret = isa;
        return 0;
    }
#define X(id, name, number) " " name
    return fail(error, EINVAL, "there are no \"%.32s\" kernels; there are:" CPU_ISAS(X), want);
#undef X
}

/* The processor's marketing name, without the blanks that some put in front. */
static void processor_name(char *ret, size_t size)
{
    char text[49] = "";

#if defined(__x86_64__)
    unsigned regs[12] = {0}, highest = __get_cpuid_max(0x80000000u, NULL);
    for (unsigned i = 0; highest >= 0x80000004u && i < 3; i++)
        __get_cpuid(0x80000002u + i, &regs[4 * i], &regs[4 * i + 1], &regs[4 * i + 2],
                    &regs[4 * i + 3]);
    memcpy(text, regs, sizeof regs);
#endif
    const char *name = text + strspn(text, " ");
    snprintf(ret, size, "%s", *name ? name : ARCHITECTURE);
    for (size_t n = strlen(ret); n && ret[n - 1] == ' '; n--)
        ret[n - 1] = '\0';
}

void cpu_variant_describe(enum cpu_isa isa, const char *kind, struct ember_device_info *info)
{
    processor_name(info->name, sizeof info->name);
    snprintf(info->fingerprint, sizeof info->fingerprint,
             "%s " ARCHITECTURE " %s sources " CPU_SOURCE_DIGEST, kind, cpu_isa_name(isa));
}

/* "MemAvailable:   123 kB" as bytes; 0 when it is not there. */
static uint64_t meminfo(const char *text, const char *field)
{
    const char *at = strstr(text, field);
    return at ? strtoull(at + strlen(field), NULL, 10) * 1024 : 0;
}

void cpu_variant_memory(struct ember_device_info *info)
{
    char text[1024];
    _cleanup_fd_ int fd = open("/proc/meminfo", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);

    if (n <= 0)
        return;
    text[n] = '\0';
    info->memory_total = meminfo(text, "MemTotal:");
    info->memory_free = meminfo(text, "MemAvailable:");
}
