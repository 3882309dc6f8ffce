/* SPDX-License-Identifier: Apache-2.0 */
/* A safetensors file, whole: whatever is accepted has all its tensors inside the file. */
#include <assert.h>
#include <string.h>

#include "model/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct tensor_list list = {0};
    struct error err = {0};
    uint64_t len = 0;
    int r;
    if (size < 8)
        return 0;
    memcpy(&len, data, 8);
    len = MIN(len, size - 8);
    r = safetensors_parse((const char *)data + 8, (size_t)len, size, 0, "fuzz", &list, &err);
    assert(r == 0 || err.text[0]);
    for (size_t i = 0; r == 0 && i < list.count; i++)
        assert(list.tensors[i].offset >= 8 + len &&
               list.tensors[i].bytes <= size - list.tensors[i].offset);
    tensor_list_free(&list);
    return 0;
}
