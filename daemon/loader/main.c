/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ember-loader: one per load. Takes the path of a checkpoint or pack over the link, says what it
 * needs, waits to be admitted, loads, hands weights and manifest over as sealed descriptors, looks
 * whether tokenizer and chat template are well, and exits. Or takes such descriptors, writes their
 * pack and exits. It dies with emberd (the link closes).
 */
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/utf8.h"
#include "daemon/link.h"
#include "daemon/loader/text_check.h"
#include "ember/v1/internal.pb-c.h"
#include "engine/load.h"
#include "engine/packs.h"

#define PROGRESS_NS 20000000 /* between two progress messages */

/* ioprio_set(2): <linux/ioprio.h> is not everywhere */
#define IOPRIO_WHO_PROCESS 1
#define IOPRIO_IDLE (3 << 13)

struct loader {
    int link;
    uint64_t last_progress;
};

static int say(const struct loader *loader, Ember__V1__FromLoader *message, const int *fds,
               size_t n_fds)
{
    return link_send(loader->link, &message->base, fds, n_fds);
}

static int admit(void *ctx, const struct model_info *info, uint64_t bytes, struct error *err)
{
    struct loader *loader = ctx;
    Ember__V1__LoaderPlanned planned = EMBER__V1__LOADER_PLANNED__INIT;
    Ember__V1__FromLoader from = EMBER__V1__FROM_LOADER__INIT;
    ProtobufCMessage *answer;
    size_t n_fds = 0;

    planned.weights_bytes = bytes;
    planned.architecture = (char *)info->architecture;
    planned.parameters = info->parameters;
    planned.vocab_size = info->vocab_size;
    planned.max_positions = info->max_positions;
    planned.kv_page_bytes = (uint64_t *)info->kv_page_bytes;
    planned.n_kv_page_bytes = KV_KIND_COUNT;
    from.kind_case = EMBER__V1__FROM_LOADER__KIND_PLANNED;
    from.planned = &planned;
    int r = say(loader, &from, NULL, 0);
    if (r == 0)
        r = link_recv(loader->link, &ember__v1__to_loader__descriptor, &answer, NULL, &n_fds);
    if (r < 0)
        return error_sys(err, -r, "emberd has gone");
    bool admitted =
        ((Ember__V1__ToLoader *)answer)->kind_case == EMBER__V1__TO_LOADER__KIND_ADMITTED;
    protobuf_c_message_free_unpacked(answer, NULL);
    return admitted ? 0 : error_set(err, ECANCELED, "not admitted");
}

static void attachable(void *ctx, int weights, int manifest, int filling)
{
    const struct loader *loader = ctx;
    Ember__V1__LoaderAttachable message = EMBER__V1__LOADER_ATTACHABLE__INIT;
    Ember__V1__FromLoader from = EMBER__V1__FROM_LOADER__INIT;

    from.kind_case = EMBER__V1__FROM_LOADER__KIND_ATTACHABLE;
    from.attachable = &message;
    say(loader, &from, (int[]){weights, manifest, filling}, 3);
}

static int progress(void *ctx, uint64_t done, uint64_t total)
{
    struct loader *loader = ctx;
    Ember__V1__LoaderProgress message = EMBER__V1__LOADER_PROGRESS__INIT;
    Ember__V1__FromLoader from = EMBER__V1__FROM_LOADER__INIT;

    if (done < total && clock_ns() - loader->last_progress < PROGRESS_NS)
        return 0;
    loader->last_progress = clock_ns();
    message.bytes_done = done;
    from.kind_case = EMBER__V1__FROM_LOADER__KIND_PROGRESS;
    from.progress = &message;
    return say(loader, &from, NULL, 0);
}

static int fail(const struct loader *loader, const struct error *err)
{
    Ember__V1__ChildFailed failed = EMBER__V1__CHILD_FAILED__INIT;
    Ember__V1__FromLoader from = EMBER__V1__FROM_LOADER__INIT;

    failed.error = -err->code;
    failed.text = (char *)error_text(err);
    from.kind_case = EMBER__V1__FROM_LOADER__KIND_FAILED;
    from.failed = &failed;
    say(loader, &from, NULL, 0);
    return 1;
}

/* The model is in use already: instances that start have the processors first. */
static int check_text(const struct loader *loader, const char *path)
{
    _cleanup_(buffer_free) struct buffer notice = {0};
    Ember__V1__LoaderText text = EMBER__V1__LOADER_TEXT__INIT;
    Ember__V1__FromLoader from = EMBER__V1__FROM_LOADER__INIT;

    setpriority(PRIO_PROCESS, 0, 10);
    text_check(path, &notice);
    if (!notice.len)
        return 0;
    utf8_tame_line(notice.data);
    text.notice = notice.data;
    from.kind_case = EMBER__V1__FROM_LOADER__KIND_TEXT;
    from.text = &text;
    return say(loader, &from, NULL, 0) < 0;
}

static int load(struct loader *loader, const Ember__V1__LoaderStart *start)
{
    struct load_options options = {.threads = start->threads,
                                   .quant = start->quant,
                                   .rate = start->rate,
                                   .packs = *start->packs_dir ? start->packs_dir : NULL,
                                   .admit = admit,
                                   .attachable = start->early ? attachable : NULL,
                                   .progress = progress,
                                   .ctx = loader};
    struct loaded loaded = {.weights = -1, .manifest = -1};
    struct error err = {0};
    char hex[DIGEST_HEX_SIZE];

    if (load_model(start->path, &options, &loaded, &err) < 0)
        return fail(loader, &err);
    if (*loaded.notice)
        log_warn("a pack was not used as it is", "path=%s reason=\"%s\"", start->path,
                 loaded.notice);
    Ember__V1__LoaderDone done = EMBER__V1__LOADER_DONE__INIT;
    Ember__V1__FromLoader from = EMBER__V1__FROM_LOADER__INIT;
    done.digest = digest_hex(&loaded.digest, hex);
    done.ms = loaded.ms;
    done.from_pack = loaded.from_pack;
    done.recipe = utf8_valid(loaded.recipe) ? loaded.recipe : "";
    done.pack_wanted = loaded.converted;
    done.key.data = loaded.key.bytes;
    done.key.len = sizeof loaded.key.bytes;
    from.kind_case = EMBER__V1__FROM_LOADER__KIND_DONE;
    from.done = &done;
    int r = say(loader, &from, (int[]){loaded.weights, loaded.manifest}, 2);
    loaded_close(&loaded);
    return r < 0 ? 1 : check_text(loader, start->path);
}

/* Nobody waits for this: it takes what processor and disk have left. */
static void step_back(void)
{
    struct sched_param none = {0};

    sched_setscheduler(0, SCHED_IDLE, &none);
    syscall(SYS_ioprio_set, IOPRIO_WHO_PROCESS, 0, IOPRIO_IDLE);
}

static int pack(struct loader *loader, const Ember__V1__LoaderPack *order, const int *fds)
{
    struct packs_options options = {.folder = order->packs_dir,
                                    .limit = order->limit,
                                    .rate = order->rate,
                                    .quant = order->quant};
    Ember__V1__LoaderPacked packed = EMBER__V1__LOADER_PACKED__INIT;
    Ember__V1__FromLoader from = EMBER__V1__FROM_LOADER__INIT;
    uint64_t start = clock_ns();
    struct error err = {0};
    struct digest key;

    if (order->key.len != sizeof key.bytes) {
        error_set(&err, EPROTO, "a key of %zu bytes", order->key.len);
        return fail(loader, &err);
    }
    memcpy(key.bytes, order->key.data, sizeof key.bytes);
    step_back();
    int r = packs_keep(order->path, &key, fds[0], fds[1], &options, &err);
    if (r < 0)
        return fail(loader, &err);
    packed.written = r == 0;
    packed.ms = clock_ms_since(start);
    from.kind_case = EMBER__V1__FROM_LOADER__KIND_PACKED;
    from.packed = &packed;
    return say(loader, &from, NULL, 0) < 0;
}

int main(int argc, char **argv)
{
    struct loader loader = {.link = LINK_FD};
    ProtobufCMessage *message;
    int fds[2] = {-1, -1}, status = 2;
    size_t n_fds = ARRAY_LEN(fds);

    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a file that may not grow is an error of the write */
    log_init("ember-loader", LOG_LEVEL_INFO);
    int r = link_recv(LINK_FD, &ember__v1__to_loader__descriptor, &message, fds, &n_fds);
    if (r < 0) {
        fprintf(stderr, "ember-loader is started by emberd; to load a model: emberctl load DIR\n");
        return 2;
    }
    const Ember__V1__ToLoader *to = (const Ember__V1__ToLoader *)message;
    if (to->kind_case == EMBER__V1__TO_LOADER__KIND_START)
        status = load(&loader, to->start);
    else if (to->kind_case == EMBER__V1__TO_LOADER__KIND_PACK && n_fds == ARRAY_LEN(fds))
        status = pack(&loader, to->pack, fds);
    protobuf_c_message_free_unpacked(message, NULL);
    return status;
}
