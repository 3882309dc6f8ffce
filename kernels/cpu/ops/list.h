/* SPDX-License-Identifier: Apache-2.0 */
/* The ahead-of-time kernels: X(symbol, name, source file without .c). */
#ifndef EMBER_KERNELS_CPU_LIST_H
#define EMBER_KERNELS_CPU_LIST_H

#define CPU_KERNELS(X)                                                                             \
    X(embed_f32, "embed.f32", rows)                                                                \
    X(embed_f16, "embed.f16", rows)                                                                \
    X(embed_bf16, "embed.bf16", rows)                                                              \
    X(embed_int4, "embed.int4", linear_quant)                                                      \
    X(embed_int8, "embed.int8", linear_quant)                                                      \
    X(norm, "norm", norm)                                                                          \
    X(add, "add", norm)                                                                            \
    X(linear_f32, "linear.f32", linear)                                                            \
    X(linear_f16, "linear.f16", linear)                                                            \
    X(linear_bf16, "linear.bf16", linear)                                                          \
    X(linear_int4, "linear.int4", linear_quant)                                                    \
    X(linear_fp4, "linear.fp4", linear_quant)                                                      \
    X(linear_int8, "linear.int8", linear_quant)                                                    \
    X(linear_fp8, "linear.fp8", linear_quant)                                                      \
    X(linear_int8x8, "linear.int8x8", linear_quant)                                                \
    X(permute, "permute", rows)                                                                    \
    X(quantize, "quantize", rows)                                                                  \
    X(rope_table, "rope_table", rope)                                                              \
    X(split_norm_rope, "split_norm_rope", rope)                                                    \
    X(attention, "attention", attention)                                                           \
    X(attention_parts, "attention_parts", attention)                                               \
    X(attention_join, "attention_join", attention)                                                 \
    X(glu, "glu", rows)                                                                            \
    X(act, "act", rows)                                                                            \
    X(moe_route, "moe_route", moe)                                                                 \
    X(moe_linear_f32, "moe_linear.f32", moe_linear)                                                \
    X(moe_linear_f16, "moe_linear.f16", moe_linear)                                                \
    X(moe_linear_bf16, "moe_linear.bf16", moe_linear)                                              \
    X(moe_linear_int4, "moe_linear.int4", moe_linear_quant)                                        \
    X(moe_linear_fp4, "moe_linear.fp4", moe_linear_quant)                                          \
    X(moe_linear_int8, "moe_linear.int8", moe_linear_quant)                                        \
    X(moe_linear_fp8, "moe_linear.fp8", moe_linear_quant)                                          \
    X(moe_linear_int8x8, "moe_linear.int8x8", moe_linear_quant)                                    \
    X(moe_combine, "moe_combine", moe)                                                             \
    X(copy, "copy", rows)                                                                          \
    X(argmax, "argmax", rows)                                                                      \
    X(argmax_parts, "argmax_parts", rows)                                                          \
    X(argmax_join, "argmax_join", rows)                                                            \
    X(measure_read, "measure_read", measure)                                                       \
    X(measure_fma, "measure_fma", measure)

/* X(source file without .c) */
#define CPU_SOURCES(X)                                                                             \
    X(attention)                                                                                   \
    X(linear)                                                                                      \
    X(linear_quant) X(measure) X(moe) X(moe_linear) X(moe_linear_quant) X(norm) X(rope) X(rows)

/* Written by embed.py. */
struct cpu_source_text {
    const char *text;
    unsigned long len;
};
#define X(source) extern const struct cpu_source_text cpu_source_##source;
CPU_SOURCES(X)
#undef X

#endif
