/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ahead-of-time kernels: X(symbol, name, source file without .c, for which variants there is a
 * body of its own: BASE baseline, AVX2 and AVX-512, the last of which serves those beyond it, ALL,
 * or AMX alone).
 */
#ifndef EMBER_KERNELS_CPU_LIST_H
#define EMBER_KERNELS_CPU_LIST_H

#define CPU_KERNELS(X)                                                                             \
    X(embed_f32, "embed.f32", rows, BASE)                                                          \
    X(embed_f16, "embed.f16", rows, BASE)                                                          \
    X(embed_bf16, "embed.bf16", rows, BASE)                                                        \
    X(embed_tiles, "embed.tiles", rows, BASE)                                                      \
    X(norm, "norm", norm, ALL)                                                                     \
    X(norm_int, "norm_int", norm, ALL)                                                             \
    X(add, "add", norm, ALL)                                                                       \
    X(linear_f32, "linear.f32", linear, BASE)                                                      \
    X(linear_f16, "linear.f16", linear, BASE)                                                      \
    X(linear_tiles, "linear.tiles", tiles, ALL)                                                    \
    X(linear_int, "linear.int", tiles, ALL)                                                        \
    X(linear_fp, "linear.fp", tiles, ALL)                                                          \
    X(x_tiles, "x_tiles", tiles, ALL)                                                              \
    X(x_fp, "x_fp", tiles, ALL)                                                                    \
    X(permute, "permute", rows, BASE)                                                              \
    X(quantize, "quantize", quantize, ALL)                                                         \
    X(rope_table, "rope_table", rope, BASE)                                                        \
    X(split_norm_rope, "split_norm_rope", rope, BASE)                                              \
    X(split_latent, "split_latent", rope, BASE)                                                    \
    X(attention, "attention", attention, BASE)                                                     \
    X(attention_parts, "attention_parts", attention, BASE)                                         \
    X(attention_join, "attention_join", attention, BASE)                                           \
    X(attention_tiles, "attention.tiles", attention_tiles, AMX)                                    \
    X(attention_parts_tiles, "attention_parts.tiles", attention_tiles, AMX)                        \
    X(glu, "glu", rows, BASE)                                                                      \
    X(act, "act", rows, BASE)                                                                      \
    X(moe_route, "moe_route", moe, BASE)                                                           \
    X(moe_linear_f32, "moe_linear.f32", moe_linear, BASE)                                          \
    X(moe_linear_f16, "moe_linear.f16", moe_linear, BASE)                                          \
    X(moe_linear_tiles, "moe_linear.tiles", tiles, ALL)                                            \
    X(moe_linear_int, "moe_linear.int", tiles, ALL)                                                \
    X(moe_linear_fp, "moe_linear.fp", tiles, ALL)                                                  \
    X(moe_x_tiles, "moe_x_tiles", tiles, ALL)                                                      \
    X(moe_x_fp, "moe_x_fp", tiles, ALL)                                                            \
    X(moe_combine, "moe_combine", moe, BASE)                                                       \
    X(copy, "copy", rows, BASE)                                                                    \
    X(argmax, "argmax", rows, BASE)                                                                \
    X(argmax_parts, "argmax_parts", rows, BASE)                                                    \
    X(argmax_join, "argmax_join", rows, BASE)                                                      \
    X(measure_read, "measure_read", measure, BASE)                                                 \
    X(measure_fma, "measure_fma", measure, BASE)                                                   \
    X(measure_bf16, "measure_bf16", measure_tiles, ALL)                                            \
    X(measure_int8, "measure_int8", measure_tiles, ALL)

/* X(source file without .c) */
#define CPU_SOURCES(X)                                                                             \
    X(attention)                                                                                   \
    X(attention_tiles)                                                                             \
    X(linear)                                                                                      \
    X(measure)                                                                                     \
    X(measure_tiles)                                                                               \
    X(moe) X(moe_linear) X(norm) X(quantize) X(rope) X(rows) X(tiles)

/* Written by embed.py. */
struct cpu_source_text {
    const char *text;
    unsigned long len;
};
#define X(source) extern const struct cpu_source_text cpu_source_##source;
CPU_SOURCES(X)
#undef X

#endif
