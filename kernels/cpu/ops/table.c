/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cpu/kernel.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "kernels/cpu/amx.h"
#include "kernels/cpu/ops/list.h"

#define DECLARE(isa, symbol) void cpu_kernel_##isa##_##symbol(const uint64_t *, uint32_t, uint32_t);
#define DECLARE_BASE(symbol) DECLARE(0, symbol) DECLARE(1, symbol) DECLARE(2, symbol)
#define DECLARE_ALL(symbol) DECLARE_BASE(symbol) DECLARE(3, symbol) DECLARE(4, symbol)
#define DECLARE_AMX(symbol) DECLARE(4, symbol)
#define X(symbol, name, source, variants) DECLARE_##variants(symbol)
CPU_KERNELS(X)
#undef X

struct entry {
    const char *name, *symbol;
    cpu_kernel_fn body[CPU_ISA_COUNT];
    const struct cpu_source_text *source;
};

#define BODY(isa, symbol) cpu_kernel_##isa##_##symbol
#define BODIES_BASE(symbol)                                                                        \
    BODY(0, symbol), BODY(1, symbol), BODY(2, symbol), BODY(2, symbol), BODY(2, symbol)
#define BODIES_ALL(symbol)                                                                         \
    BODY(0, symbol), BODY(1, symbol), BODY(2, symbol), BODY(3, symbol), BODY(4, symbol)
#define BODIES_AMX(symbol) NULL, NULL, NULL, NULL, BODY(4, symbol)
static const struct entry entries[] = {
#define X(symbol, name, source, variants)                                                          \
    {name, #symbol, {BODIES_##variants(symbol)}, &cpu_source_##source},
    CPU_KERNELS(X)
#undef X
};

/* The levels' other extensions came with these in every processor; they change no bit of a result.
 */
static const char *const isa_flags[CPU_ISA_COUNT] = {
    [CPU_ISA_BASELINE] = "-msse2",
    [CPU_ISA_AVX2] = "-march=x86-64-v3",
    [CPU_ISA_AVX512] = "-march=x86-64-v4",
    [CPU_ISA_VNNI] = "-march=x86-64-v4 -mavx512vnni -mavx512bf16",
    [CPU_ISA_AMX] = "-march=x86-64-v4 -mavx512vnni -mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16",
};
#define COMMON_FLAGS                                                                               \
    "-std=gnu17 -O3 -fPIC -fno-strict-aliasing -ffp-contract=off -fno-math-errno "                 \
    "-fno-trapping-math"

const char *cpu_isa_name(enum cpu_isa isa)
{
    static const char *const names[CPU_ISA_COUNT] = {
#define X(id, name, number) name,
        CPU_ISAS(X)
#undef X
    };
    return (unsigned)isa < CPU_ISA_COUNT ? names[isa] : "?";
}

#if defined(__x86_64__)

/* The compilers do not agree on a name for this one. */
static bool cpu_has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
}

bool cpu_isa_supported(enum cpu_isa isa)
{
    __builtin_cpu_init();
    switch (isa) {
    case CPU_ISA_BASELINE:
        return true;
    case CPU_ISA_AVX2:
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
               __builtin_cpu_supports("bmi2") && cpu_has_f16c();
    case CPU_ISA_AVX512:
        return cpu_isa_supported(CPU_ISA_AVX2) && __builtin_cpu_supports("avx512f") &&
               __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    case CPU_ISA_VNNI:
        return cpu_isa_supported(CPU_ISA_AVX512) && __builtin_cpu_supports("avx512vnni") &&
               __builtin_cpu_supports("avx512bf16");
    case CPU_ISA_AMX:
        return cpu_isa_supported(CPU_ISA_VNNI) && cpu_amx_works();
    default:
        return false;
    }
}

#else

bool cpu_isa_supported(enum cpu_isa isa)
{
    return isa == CPU_ISA_BASELINE; /* NEON, on AArch64 */
}

#endif

enum cpu_isa cpu_isa_best(void)
{
    enum cpu_isa isa = CPU_ISA_COUNT - 1;
    while (isa > CPU_ISA_BASELINE && !cpu_isa_supported(isa))
        isa--;
    return isa;
}

static const struct entry *entry_find(const char *name)
{
    for (size_t i = 0; i < ARRAY_LEN(entries); i++)
        if (!strcmp(entries[i].name, name))
            return &entries[i];
    return NULL;
}

uint32_t cpu_kernel_count(void)
{
    return ARRAY_LEN(entries);
}

const char *cpu_kernel_name(uint32_t index)
{
    return index < ARRAY_LEN(entries) ? entries[index].name : NULL;
}

cpu_kernel_fn cpu_kernel_lookup(const char *name, enum cpu_isa isa)
{
    const struct entry *entry = entry_find(name);
    return entry && (unsigned)isa < CPU_ISA_COUNT ? entry->body[isa] : NULL;
}

int cpu_kernel_source_text(const char *name, const char **ret_text, size_t *ret_len)
{
    const struct entry *entry = entry_find(name);
    if (!entry)
        return -ENOENT;
    *ret_text = entry->source->text;
    *ret_len = entry->source->len;
    return 0;
}

/* Appends to ret at *len; false when it does not fit. */
static bool append(char *ret, size_t cap, size_t *len, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
static bool append(char *ret, size_t cap, size_t *len, const char *format, ...)
{
    va_list ap;
    va_start(ap, format);
    int n = vsnprintf(ret + *len, cap - *len, format, ap);
    va_end(ap);
    if (n < 0 || (size_t)n >= cap - *len)
        return false;
    *len += (size_t)n;
    return true;
}

/* One "NAME=NUMBER" at *spec, moved behind it and its comma; 0 when it is not that. */
static size_t spec_item(const char *spec)
{
    const char *p = spec;
    while (isupper((unsigned char)*p) || *p == '_')
        p++;
    if (p == spec || *p++ != '=' || !isdigit((unsigned char)*p))
        return 0;
    while (isdigit((unsigned char)*p))
        p++;
    return *p == ',' || *p == '\0' ? (size_t)(p - spec) : 0;
}

int cpu_kernel_options(const char *name, enum cpu_isa isa, const char *spec, char *ret, size_t cap)
{
    const struct entry *entry = entry_find(name);
    size_t len = 0;
    if (!entry || (unsigned)isa >= CPU_ISA_COUNT)
        return -ENOENT;
    if (!cap)
        return -ENOSPC;
    if (isa > CPU_ISA_AVX512 && entry->body[isa] == entry->body[CPU_ISA_AVX512])
        isa = CPU_ISA_AVX512; /* the same bits as ahead of time */
    if (!append(ret, cap, &len, "%s %s -DEMBER_ISA=%d -DSPEC_ENTRY=%s", COMMON_FLAGS,
                isa_flags[isa], (int)isa, entry->symbol))
        return -ENOSPC;
    while (*spec) {
        size_t n = spec_item(spec);
        if (!n)
            return -EINVAL;
        if (!append(ret, cap, &len, " -DSPEC_%.*s", (int)n, spec))
            return -ENOSPC;
        spec += n;
        if (*spec == ',' && !*++spec)
            return -EINVAL;
    }
    return 0;
}
