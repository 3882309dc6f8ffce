/* SPDX-License-Identifier: Apache-2.0 */
/*
 * CPU kernels: calling convention, table of bodies, lowering, source text of specialised builds.
 *
 * A kernel is a function of an array of 64-bit words, a block number and the number of blocks. The
 * words are addresses (already relocated), integers, or floats as bits; kernels/cpu/ops/args.h
 * names the slots of each kernel. A kernel cuts its work into n_blocks parts over a dimension that
 * it chooses itself and does part `block`: parts may run in any order and on any thread, never
 * twice; all are done before the next launch begins. Dynamic row counts are read from the step
 * header in the IO arena when the kernel runs, so a block may find nothing to do.
 *
 * What a kernel writes is the same to the bit for any n_blocks, any number of rows in the batch and
 * for the ahead-of-time and the specialised build of one ISA. Between ISAs the last bits differ.
 *
 * Every body is compiled once for each ISA from one source text (kernels/cpu/ops/NAME.c over
 * kernels/cpu/simd.h); the same text with its headers inlined is embedded for builds at run time.
 */
#ifndef EMBER_KERNELS_CPU_KERNEL_H
#define EMBER_KERNELS_CPU_KERNEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <ember/backend.h>

typedef void (*cpu_kernel_fn)(const uint64_t *args, uint32_t block, uint32_t n_blocks);

/* X(id, name, number for -DEMBER_ISA) ascending */
#define CPU_ISAS(X)                                                                                \
    X(CPU_ISA_BASELINE, "baseline", 0)                                                             \
    X(CPU_ISA_AVX2, "avx2", 1)                                                                     \
    X(CPU_ISA_AVX512, "avx512", 2)                                                                 \
    X(CPU_ISA_VNNI, "avx512-vnni", 3)                                                              \
    X(CPU_ISA_AMX, "amx", 4)

enum cpu_isa {
#define X(id, name, number) id = number,
    CPU_ISAS(X)
#undef X
        CPU_ISA_COUNT
};

const char *cpu_isa_name(enum cpu_isa isa);
/*
 * Whether this processor and its operating system can run the variant. AMX: asks the kernel for the
 * tile registers, which threads that are started later inherit, and multiplies two tiles to see
 * that they work, since virtual machines can announce what then fails.
 */
bool cpu_isa_supported(enum cpu_isa isa);
/* The best one supported. */
enum cpu_isa cpu_isa_best(void);

/* Ahead-of-time kernels, 0..cpu_kernel_count() - 1, by index and by name. */
uint32_t cpu_kernel_count(void);
const char *cpu_kernel_name(uint32_t index);
/* NULL: no such kernel. The caller has checked that the ISA is supported. */
cpu_kernel_fn cpu_kernel_lookup(const char *name, enum cpu_isa isa);

/*
 * Lowers one op for a variant: emits the launches in order, grid = {n_blocks, 1, 1}. Variants
 * differ in launches that bring x into the form that a matrix unit reads, and in K and V (below).
 * `spec` is set only for kernels that were measured to gain from it. -ENOTSUP with a text when the
 * op is beyond these kernels.
 */
int cpu_lower(enum cpu_isa isa, const struct ember_op *op, ember_emit_fn emit, void *sink,
              struct ember_backend_error *error);

/*
 * Whether K and V of a split_norm_rope or attention stand in tiles in their pages
 * (kernels/cpu/ops/kv.h), as a matrix unit reads them. Otherwise K stands transposed, V in rows.
 */
bool cpu_kv_tiles(enum cpu_isa isa, const struct ember_op *op);

/*
 * Specialised builds. The text is a whole translation unit, static, that needs a C compiler with
 * its own headers (immintrin.h, stdint.h, stddef.h) and nothing else; linked with -shared and no
 * library. The object exports void CPU_SPEC_ENTRY(const uint64_t *args, uint32_t block, uint32_t
 * n_blocks); const char CPU_SPEC_NAME[];      the kernel's name with '.' as '_', to be checked
 * after loading
 */
#define CPU_SPEC_ENTRY "ember_kernel"
#define CPU_SPEC_NAME "ember_kernel_name"

/* -ENOENT: no such kernel. */
int cpu_kernel_source_text(const char *name, const char **ret_text, size_t *ret_len);

/*
 * Writes the compiler options (space-separated, no quoting needed, NUL-terminated) for kernel
 * `name` with specialisation `spec` ("K=1024,N=3072" or ""): code generation, ISA, -DSPEC_K=1024
 * ... The caller adds input, output, -shared -fPIC -nostdlib. -ENOENT: no such kernel; -EINVAL:
 * spec is malformed; -ENOSPC: cap is too small.
 */
int cpu_kernel_options(const char *name, enum cpu_isa isa, const char *spec, char *ret, size_t cap);

#endif
