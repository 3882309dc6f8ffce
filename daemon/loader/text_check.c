/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/loader/text_check.h"

#include <errno.h>

#include "model/pack/pack.h"
#include "model/template/template.h"
#include "model/tokenizer/tokenizer.h"

static char *folder_of(const char *path)
{
    _cleanup_(pack_freep) struct pack *pack = NULL;

    if (pack_looks_like(path) && pack_open(path, &pack, NULL) == 0)
        return pack_tokenizer_dir(pack, path);
    return x_strdup(path);
}

static void say(struct buffer *out, const struct error *err, const char *lost)
{
    buffer_printf(out, "%s%s; %s", out->len ? "; " : "", error_text(err), lost);
}

void text_check(const char *path, struct buffer *out)
{
    _cleanup_free_ char *dir = folder_of(path);
    struct tokenizer *tokenizer = NULL;
    struct chat_template *chat = NULL;
    struct error err = {0};

    int r = tokenizer_load(dir, &tokenizer, &err);
    if (r < 0 && r != -ENOENT)
        say(out, &err, "text will not work, in emberctl generate and the gateway; token ids do");
    tokenizer_free(tokenizer);
    err = (struct error){0};
    r = template_from_checkpoint(dir, &chat, &err);
    if (r < 0 && r != -ENOENT)
        say(out, &err, "chats will not work, in generate --chat and /v1/chat/completions");
    chat_template_free(chat);
}
