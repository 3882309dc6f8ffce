/* SPDX-License-Identifier: Apache-2.0 */
/* What follows a dot product: out = cap(scale * (dot + b)). */
#ifndef EMBER_KERNELS_CPU_POST_H
#define EMBER_KERNELS_CPU_POST_H

#include "kernels/cpu/simd.h"

struct post {
    const void *b; /* NULL: none */
    enum ember_dtype b_dtype;
    float scale, softcap;
};

/* Elements n .. n + left - 1 of a row, left <= VL. */
INLINE vf post_value(vf v, size_t n, size_t left, const struct post *post)
{
    if (post->b)
        v = v_add(v, v_get_w(post->b, n, post->b_dtype, left));
    if (post->scale != 1)
        v = v_mul(v_set(post->scale), v);
    return post->softcap > 0 ? v_softcap(v, post->softcap) : v;
}

#endif
