/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fault points: named places where a test makes the world fail.
 *
 * EMBER_FAULT="name:N[,name:N...]" in the environment of a process makes the N-th passage (from 1)
 * of the named point fail, or every passage when N is 0; "name:N=kill" raises SIGKILL there
 * instead. Without the variable a point costs one predictable branch. Points are named after what
 * breaks.
 */
#ifndef EMBER_BASE_FAULT_H
#define EMBER_BASE_FAULT_H

#include <stdatomic.h>
#include <stdbool.h>

#define FAULT_POINTS(X)                                                                            \
    X(FAULT_ALLOC, "alloc")                   /* an allocation sized from outside */               \
    X(FAULT_READ, "read")                     /* a file read: EIO */                               \
    X(FAULT_WRITE, "write")                   /* a file write: ENOSPC */                           \
    X(FAULT_MMAP, "mmap")                     /* a mapping: ENOMEM */                              \
    X(FAULT_FORK, "fork")                     /* starting a child: EAGAIN */                       \
    X(FAULT_EXEC, "exec")                     /* the child's exec: ENOENT */                       \
    X(FAULT_FD, "fd")                         /* a new descriptor: EMFILE */                       \
    X(FAULT_CACHE_PUT, "cache-put")           /* an LMDB write transaction: MDB_MAP_FULL */        \
    X(FAULT_CACHE_FULL, "cache-full")         /* the file system below LMDB: ENOSPC */             \
    X(FAULT_COMPILE, "compile")               /* the compiler fails */                             \
    X(FAULT_COMPILE_SWEPT, "compile-swept")   /* another builder removes the compiler's folder */  \
    X(FAULT_COMPILE_MID, "compile-mid")       /* a builder dies while it holds the key */          \
    X(FAULT_LOAD_MID, "load-mid")             /* a loader dies between two tensors */              \
    X(FAULT_INSTANCE_READY, "instance-ready") /* an instance dies just before READY */             \
    X(FAULT_INSTANCE_STEP, "instance-step")   /* an instance dies in a step */                     \
    X(FAULT_PACK_WRITE, "pack-write")         /* a write to a pack: ENOSPC */                      \
    X(FAULT_PACK_READ, "pack-read")           /* a read of a pack's segment: its bytes differ */   \
    X(FAULT_CANARY, "canary")                 /* the canary's output is wrong */

enum fault_point {
#define X(id, name) id,
    FAULT_POINTS(X)
#undef X
        FAULT_COUNT
};

extern atomic_bool fault_armed;
bool fault_hit_slow(enum fault_point point);

/* True when this passage is to fail. May not return (kill). Thread-safe. */
static inline bool fault_hit(enum fault_point point)
{
    return __builtin_expect(atomic_load_explicit(&fault_armed, memory_order_relaxed), 0) &&
           fault_hit_slow(point);
}

/* Reads EMBER_FAULT (called by a constructor); tests call it again after setenv, also while other
 * threads pass points. Resets counts. */
void fault_init(void);

#endif
