/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a product of integers is on a variant: the codes of a line of panels, four of k for each of
 * their rows, with four of x. Sums are exact, so all of these give the same ones.
 *
 *   QUADS  VPDPBUSD adds four products to a sum of 32 bits, of unsigned bytes with signed ones:
 *          codes of 8 bits are made unsigned by adding 128. Of x in two terms the lower one is
 *          unsigned itself, and has a sum of its own
 *   BYTES  codes of 4 bits with x of one term without VPDPBUSD: VPMADDUBSW has sums of 16 bits, two
 *          for four products, of which those of 32 of k do not overflow: 8 times 2 * 15 * 128
 *   PAIRS  everything else: PMADDWD has sums of 32 bits of two products of 16-bit integers, which x
 *          of two terms is as it is. A line's even bytes and odd ones make two vectors, so x is in
 *          pairs (0, 2) and (1, 3)
 *
 * The first two leave codes of 4 bits with their zero points: what that adds to a sum, the zero
 * point * (sum of x), is taken off where the sum begins.
 */
#ifndef EMBER_KERNELS_CPU_INT_DOT_H
#define EMBER_KERNELS_CPU_INT_DOT_H

#include "kernels/cpu/simd.h"

enum int_by { INT_BY_QUADS, INT_BY_BYTES, INT_BY_PAIRS };

/* four: codes of 4 bits. */
INLINE enum int_by int_by(const int four, const int terms)
{
    if (EMBER_ISA >= 3)
        return INT_BY_QUADS;
    return EMBER_ISA >= 1 && four && terms == 1 ? INT_BY_BYTES : INT_BY_PAIRS;
}

/* Bytes of one row of x for four of k; of QUADS and two terms, of each. */
INLINE size_t int_word(const enum int_by by)
{
    return by == INT_BY_PAIRS ? 8 : 4;
}

/* sum + a . b of QUADS: gcc 12 keeps two registers for each sum of the intrinsic, and has too few
 * then. */
#if EMBER_ISA >= 3
INLINE vi int_quads(vi sum, vi a_unsigned, vi b_signed)
{
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a_unsigned), "v"(b_signed));
    return sum;
}
#endif

/* Even bytes to where the odd ones are. */
INLINE vi vi_even_up(vi line)
{
#if EMBER_ISA >= 2 /* a shift of 512 bits has one port, as has this: another one */
    const __m128i order = _mm_setr_epi8(-1, 0, -1, 2, -1, 4, -1, 6, -1, 8, -1, 10, -1, 12, -1, 14);
    return _mm512_shuffle_epi8(line, _mm512_broadcast_i32x4(order));
#else
    return vi_sll16(line, 8);
#endif
}

/* A vector of codes as factors: one, or of PAIRS even ones and odd ones; of QUADS and two terms
 * unsigned ones for the upper and what lower terms are multiplied with. */
struct int_codes {
    vi a, b;
};

/* Those of a line; four: the lower or (high) the upper halves of its bytes. zero: of PAIRS, zero
 * points in 16-bit lanes. */
INLINE struct int_codes int_codes(const enum int_by by, const int four, const int high, vi line,
                                  vi zero)
{
    const vi nibble = vi_set16(0x0f0f), low = vi_set16(15);
    struct int_codes c;
    if (by == INT_BY_PAIRS && four) {
        c.a = vi_sub16(vi_and(high ? vi_srl16(line, 4) : line, low), zero);
        c.b = vi_sub16(high ? vi_srl16(line, 12) : vi_and(vi_srl16(line, 8), low), zero);
    } else if (by == INT_BY_PAIRS) {
        c.a = vi_sra16(vi_even_up(line), 8);
        c.b = vi_sra16(line, 8);
    } else if (four)
        c.a = c.b = vi_and(high ? vi_srl16(line, 4) : line, nibble);
    else {
        c.a = vi_xor(line, vi_set16((int16_t)0x8080));
        c.b = line;
    }
    return c;
}

/*
 * V vectors of codes with a row of x, of which `lower` bytes on are the lower terms: added to sum,
 * of QUADS and two terms to lows as well, of BYTES to lows alone, which begins with it (first).
 */
INLINE void int_dot(const enum int_by by, const int V, const int terms, const int first,
                    const struct int_codes *codes, const char *x, size_t lower, vi *sum, vi *lows)
{
    const vi word = vi_set_at(x);
    (void)lower, (void)first, (void)lows, (void)terms;
    if (by == INT_BY_PAIRS) {
        const vi odd = vi_set_at(x + 4);
        UNROLL
        for (int j = 0; j < V; j++) {
            sum[j] = vi_add(sum[j], vi_madd16(codes[j].a, word));
            v_keep(sum[j]); /* gcc 12 keeps two registers for a sum of more than that */
            sum[j] = vi_add(sum[j], vi_madd16(codes[j].b, odd));
            v_keep(sum[j]);
        }
    }
#if EMBER_ISA >= 1
    if (by == INT_BY_BYTES) {
        UNROLL
        for (int j = 0; j < V; j++) {
            const vi two = vi_madd8(codes[j].a, word);
            lows[j] = first ? two : vi_add16(lows[j], two);
            v_keep(lows[j]);
        }
    }
#endif
#if EMBER_ISA >= 3
    if (by == INT_BY_QUADS) {
        UNROLL
        for (int j = 0; j < V; j++)
            sum[j] = int_quads(sum[j], codes[j].a, word);
        if (terms == 2) {
            const vi l = vi_set_at(x + lower);
            UNROLL
            for (int j = 0; j < V; j++)
                lows[j] = int_quads(lows[j], l, codes[j].b);
        }
    }
#endif
}

#endif
