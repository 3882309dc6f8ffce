/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The backend ABI: what a kind of accelerator ("XPU") must offer.
 *
 * A backend is a table of functions. The CPU backend is built in; any other comes as a shared
 * object that exports `const struct ember_backend *ember_backend_entry(void)`. Nothing above this
 * table may assume that device memory can be read or written by the host: bytes go in and out by
 * copies.
 *
 * Optional slots may be NULL; the caller then does without (a launch list for a native graph, no
 * specialised kernels, no timing). A slot that returns int returns 0 or a negative errno value and,
 * on failure, writes one line of text to `error` (never NULL).
 *
 * Threads: a device and what belongs to it are used by one thread at a time. Work on a queue is
 * asynchronous and in order; queue_sync is the only wait. Host memory given to a copy must stay
 * valid until the next queue_sync.
 */
#ifndef EMBER_BACKEND_H
#define EMBER_BACKEND_H

#include <stddef.h>
#include <stdint.h>

#include <ember/op.h>

#define EMBER_BACKEND_ABI_VERSION 2
#define EMBER_BACKEND_ENTRY "ember_backend_entry"

struct ember_backend_error {
    char text[256];
};

struct ember_device; /* opaque, each backend's own */
struct ember_memory;
struct ember_queue;
struct ember_module;
struct ember_kernel;
struct ember_native_graph;

/* Whether CPU-like backends bind their threads: auto where that takes nothing from others. */
enum ember_pin { EMBER_PIN_NEVER, EMBER_PIN_AUTO, EMBER_PIN_ALWAYS };

struct ember_device_options {
    uint32_t index; /* which device of this kind */
    /* CPU-like backends: worker threads, 0 = what affinity and cgroup quota allow. */
    uint32_t threads;
    /* CPU-like backends: force a variant ("baseline", "avx2", "avx512"), NULL = best. */
    const char *isa;
    uint32_t pin;   /* enum ember_pin */
    uint32_t place; /* with pin: numbers the instances that run at the same time, from 0 */
};

struct ember_device_info {
    char name[64];
    /* Names what captured graphs and compiled kernels depend on: exact architecture or processor
     * features in use, and the version of the backend's lowering. Part of every cache key. */
    char fingerprint[192];
    uint64_t memory_total, memory_free; /* bytes; 0 = not known */
    uint32_t threads;
    uint32_t shares_host_memory; /* 1: resident weights in a memfd are imported without a copy */
};

/*
 * How memory is shared between processes: as a descriptor, as an opaque handle, or as the
 * descriptor of memory that its owner still fills (sealed against shrinking alone; what has not
 * arrived yet reads as zeros). A backend may refuse the last by -ENOTSUP: it is then imported when
 * it is whole.
 */
enum ember_share_kind { EMBER_SHARE_FD, EMBER_SHARE_HANDLE, EMBER_SHARE_FD_FILLING };
struct ember_share {
    uint32_t kind;
    int fd; /* borrowed by import, owned by the caller after export */
    uint8_t handle[64];
    uint64_t bytes;
};

/* A launch argument: a constant, or an address in an arena that is known only at restore. */
struct ember_launch_arg {
    uint64_t value; /* constant bits, or offset in bytes */
    int32_t arena;  /* enum ember_arena, or -1 for a constant */
    uint32_t reserved;
};

/*
 * One launch as lowering emits it. `kernel` names an ahead-of-time kernel ("linear.f32"). `spec`
 * is empty, or what a specialised build of the same kernel fixes at compile time ("K=1024,N=3072"):
 * same arguments, same result to the bit.
 */
struct ember_launch {
    char kernel[32];
    char spec[96];
    uint32_t grid[3];
    uint32_t n_args;
    const struct ember_launch_arg *args;
};
typedef int (*ember_emit_fn)(void *sink, const struct ember_launch *launch);

/* What the kernel cache needs to know about a specialised kernel before it is built. */
struct ember_kernel_source {
    /* The whole translation unit, owned by the backend, valid while the device is. */
    const char *text;
    size_t text_len;
    char options[256];  /* compiler options, spec included */
    char compiler[256]; /* identity and version of the compiler that would build it */
};

struct ember_backend {
    uint32_t abi_version; /* EMBER_BACKEND_ABI_VERSION */
    uint32_t struct_size; /* sizeof(struct ember_backend) when the backend was built */
    const char *name;     /* "cpu", "cuda", ... */

    /* ---- mandatory ---- */

    int (*device_open)(const struct ember_device_options *options, struct ember_device **ret,
                       struct ember_backend_error *error);
    void (*device_close)(struct ember_device *device); /* after everything made from it is freed */
    void (*device_info)(struct ember_device *device, struct ember_device_info *ret);

    /* Zeroed device memory, or import of another process's, read-only. Alignment: at least 4096. */
    int (*memory_alloc)(struct ember_device *device, uint64_t bytes, struct ember_memory **ret,
                        struct ember_backend_error *error);
    int (*memory_import)(struct ember_device *device, const struct ember_share *share,
                         struct ember_memory **ret, struct ember_backend_error *error);
    void (*memory_free)(struct ember_memory *memory);
    /* The device address of byte 0: what a relocated argument holds. Not to be dereferenced by the
     * host. */
    uint64_t (*memory_address)(struct ember_memory *memory);

    int (*queue_create)(struct ember_device *device, struct ember_queue **ret,
                        struct ember_backend_error *error);
    void (*queue_free)(struct ember_queue *queue);
    int (*queue_sync)(struct ember_queue *queue, struct ember_backend_error *error);

    int (*copy_in)(struct ember_queue *queue, struct ember_memory *to, uint64_t to_offset,
                   const void *from, uint64_t bytes, struct ember_backend_error *error);
    int (*copy_out)(struct ember_queue *queue, void *to, struct ember_memory *from,
                    uint64_t from_offset, uint64_t bytes, struct ember_backend_error *error);

    /* Lowers one op to launches, in order, by calling emit for each; a non-zero return of emit is
     * passed back. -ENOTSUP: this op with these attributes is beyond the backend; the text says
     * why. */
    int (*lower)(struct ember_device *device, const struct ember_op *op, ember_emit_fn emit,
                 void *sink, struct ember_backend_error *error);

    /* An ahead-of-time kernel; the pointer lives as long as the device. -ENOENT: no such kernel. */
    int (*kernel_find)(struct ember_device *device, const char *name, struct ember_kernel **ret,
                       struct ember_backend_error *error);
    int (*launch)(struct ember_queue *queue, struct ember_kernel *kernel, const uint32_t grid[3],
                  const uint64_t *args, uint32_t n_args, struct ember_backend_error *error);

    /* ---- optional ---- */

    /* Makes memory of this process importable by others. */
    int (*memory_export)(struct ember_memory *memory, struct ember_share *ret,
                         struct ember_backend_error *error);

    /* Specialised kernels: describe, build to a blob (malloc'd, caller frees), load, look up by
     * kernel name. */
    int (*kernel_source)(struct ember_device *device, const char *kernel, const char *spec,
                         struct ember_kernel_source *ret, struct ember_backend_error *error);
    int (*kernel_compile)(struct ember_device *device, const struct ember_kernel_source *source,
                          void **ret_blob, size_t *ret_len, struct ember_backend_error *error);
    int (*module_load)(struct ember_device *device, const void *blob, size_t len,
                       struct ember_module **ret, struct ember_backend_error *error);
    int (*module_find)(struct ember_module *module, const char *kernel, struct ember_kernel **ret,
                       struct ember_backend_error *error);
    void (*module_free)(struct ember_module *module);

    /* Native graphs over relocated launches; runs launches [first, first + count). Falls back to
     * `launch`. */
    int (*graph_instantiate)(struct ember_device *device, struct ember_kernel *const *kernels,
                             const uint32_t (*grids)[3], const uint64_t *const *args,
                             const uint32_t *n_args, uint32_t n_launches,
                             struct ember_native_graph **ret, struct ember_backend_error *error);
    int (*graph_launch)(struct ember_queue *queue, struct ember_native_graph *graph, uint32_t first,
                        uint32_t count, struct ember_backend_error *error);
    void (*graph_free)(struct ember_native_graph *graph);

    /* Makes the first use of a range quick (page tables, migration) without changing it. A hint:
     * may fail or do nothing. The one slot that any thread may call, also while the device is in
     * use. */
    int (*memory_prefetch)(struct ember_memory *memory, uint64_t offset, uint64_t bytes);

    /* Timing: from now on every run of launch i of the graph adds the nanoseconds from the start of
     * its first block to the end of its last to ns[i] (the caller's, until NULL is given). */
    int (*graph_profile)(struct ember_native_graph *graph, uint64_t *ns);
};

#endif
