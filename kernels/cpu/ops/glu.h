/* SPDX-License-Identifier: Apache-2.0 */
/* What joins gate and up (ember/op.h, glu). */
#ifndef EMBER_KERNELS_CPU_GLU_H
#define EMBER_KERNELS_CPU_GLU_H

#include "kernels/cpu/simd.h"

INLINE vf glu_value(vf gate, vf up, const enum ember_act act, float limit, float alpha)
{
    if (limit > 0) {
        vf most = v_set(limit);
        gate = v_min(most, gate);
        up = v_min(most, v_max(v_set(-limit), up));
        gate = v_mul(gate, v_sigmoid(v_mul(v_set(alpha), gate)));
        return v_mul(gate, v_add(up, v_set(1.0f)));
    }
    return v_mul(v_act(gate, act), up);
}

#endif
