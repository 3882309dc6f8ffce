/* SPDX-License-Identifier: Apache-2.0 */
/* A bundle as it comes from another host. */
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cache/bundle.h"

static int take(void *ctx, const struct record *record, const void *bytes, size_t len,
                struct error *err)
{
    /* Only whole records arrive here. */
    if (record_check_payload(record, err) < 0 || !cache_kind_name(record->kind) ||
        (const char *)record->payload + record->payload_len != (const char *)bytes + len)
        abort();
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    int fd = memfd_create("bundle", MFD_CLOEXEC);

    if (fd < 0 || write(fd, data, size) != (ssize_t)size || lseek(fd, 0, SEEK_SET) != 0)
        abort();
    bundle_read(fd, MIB, take, NULL, NULL);
    close(fd);
    return 0;
}
