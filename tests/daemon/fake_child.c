/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A child of emberd without an engine, for tests of the manager: it is ember-loader or
 * ember-instance, whichever name it was started under, and speaks proto/ember/v1/internal.proto.
 *
 * $FAKE_CONTROL is a folder; the file "loader" or "instance" in it says how to behave:
 *
 *     fail ERRNO TEXT  ChildFailed, exit 1          die      SIGKILL itself instead of READY/DONE
 *     hang             never goes on                garbage  sends what is no message
 *     slow MS          takes so long                exit     exits with 3, a line on stderr
 *     crash            crashes as long as the cache folder has a store
 *     stay             a loader that is done does not exit
 *     die-after MS     dies so long after READY
 *     once             the first to read this file empties it, so the rest behave
 *
 * A loader's path /fake/w300 stands for a checkpoint of 300 MiB (nothing is allocated for it); any
 * other path is a checkpoint that is read as the real loader does, its weights left zero.
 * An instance takes drivers: a line with the lease's token is answered "ok", anything else "no".
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/mem.h"
#include "cache/resident.h"
#include "ember/v1/internal.pb-c.h"
#include "model/model.h"

#define CHANNEL 3

static struct {
    bool fail, hang, die, garbage, exit, crash, stay;
    int error, slow_ms, die_after_ms;
    char text[256];
} behave;

static void read_control(const char *role)
{
    char path[512], line[300], all[2048] = "";
    const char *dir = getenv("FAKE_CONTROL");
    FILE *f;

    snprintf(path, sizeof path, "%s/%s", dir ? dir : "/nonexistent", role);
    f = fopen(path, "re");
    while (f && fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        if (!strcmp(line, "once")) {
            snprintf(all, sizeof all, "%s.taken", path);
            if (rename(path, all) < 0) { /* somebody else was first */
                memset(&behave, 0, sizeof behave);
                break;
            }
        }
        behave.fail |= sscanf(line, "fail %d %255[^\n]", &behave.error, behave.text) == 2;
        behave.hang |= !strcmp(line, "hang");
        behave.die |= !strcmp(line, "die");
        behave.garbage |= !strcmp(line, "garbage");
        behave.crash |= !strcmp(line, "crash");
        behave.exit |= !strcmp(line, "exit");
        behave.stay |= !strcmp(line, "stay");
        sscanf(line, "die-after %d", &behave.die_after_ms);
        sscanf(line, "slow %d", &behave.slow_ms);
    }
    if (f)
        fclose(f);
}

static void send_message(const ProtobufCMessage *m, const int *fds, size_t n)
{
    uint8_t data[65536];
    size_t len = protobuf_c_message_pack(m, data);

    if (fd_send(CHANNEL, data, len, fds, n) < 0)
        exit(9);
}

static void misbehave(void)
{
    if (behave.slow_ms)
        usleep((useconds_t)behave.slow_ms * 1000);
    if (behave.garbage)
        fd_send(CHANNEL, "\xff\xff\xff\xff", 4, NULL, 0);
    while (behave.hang || behave.garbage)
        pause();
    if (behave.die)
        raise(SIGKILL);
    if (behave.exit) {
        fprintf(stderr, "<3>fake: something broke\n");
        exit(3);
    }
}

/* ---- loader ---- */

static _Noreturn void loader_failed(int error, const char *text)
{
    Ember__V1__ChildFailed failed = EMBER__V1__CHILD_FAILED__INIT;
    Ember__V1__FromLoader m = EMBER__V1__FROM_LOADER__INIT;

    failed.error = error;
    failed.text = (char *)text;
    m.kind_case = EMBER__V1__FROM_LOADER__KIND_FAILED;
    m.failed = &failed;
    send_message(&m.base, NULL, 0);
    exit(1);
}

static void expect(Ember__V1__ToLoader__KindCase kind, Ember__V1__ToLoader **ret)
{
    uint8_t data[65536];
    size_t n_fds = 0;
    ssize_t n = fd_recv(CHANNEL, data, sizeof data, NULL, &n_fds);
    Ember__V1__ToLoader *m = n > 0 ? ember__v1__to_loader__unpack(NULL, (size_t)n, data) : NULL;

    if (n <= 0)
        exit(0);
    if (!m || m->kind_case != kind)
        loader_failed(EPROTO, "fake: unexpected message");
    *ret = m;
}

static int sealed_file(const void *data, size_t len)
{
    int fd = memfd_create("fake", MFD_ALLOW_SEALING | MFD_CLOEXEC);
    if (fd < 0 || fd_write_all(fd, data, len, "fake", NULL) < 0)
        exit(9);
    fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE);
    return fd;
}

/* What the real loader plans and hands over, but for the weights' contents. */
static void plan_real(const char *path, Ember__V1__LoaderPlanned *planned, int fds[2])
{
    static char architecture[48];
    struct checkpoint *checkpoint;
    struct weights_layout *layout;
    struct resident *resident;
    struct buffer manifest = {0};
    struct error err = {0};
    struct model *model;
    char file[1024], *config;
    size_t len;

    snprintf(file, sizeof file, "%s/config.json", path);
    if (fd_read_file(file, MIB, &config, &len, &err) < 0 ||
        model_from_config(config, len, file, &model, &err) < 0 ||
        checkpoint_open(path, &checkpoint, &err) < 0 ||
        model_layout(model, checkpoint, NULL, &layout, &err) < 0 ||
        manifest_write(config, len, path, layout, &manifest, &err) < 0 ||
        resident_create("fake", layout->bytes, &resident, &err) < 0 ||
        resident_seal(resident, &err) < 0)
        loader_failed(-err.code, err.text);
    snprintf(architecture, sizeof architecture, "%s", model_info(model)->architecture);
    planned->weights_bytes = layout->bytes;
    planned->architecture = architecture;
    planned->parameters = model_info(model)->parameters;
    planned->vocab_size = model_info(model)->vocab_size;
    planned->max_positions = model_info(model)->max_positions;
    static uint64_t pages[KV_KIND_COUNT];
    memcpy(pages, model_info(model)->kv_page_bytes, sizeof pages);
    planned->kv_page_bytes = pages;
    planned->n_kv_page_bytes = KV_KIND_COUNT;
    fds[0] = resident_fd(resident);
    fds[1] = sealed_file(manifest.data, manifest.len);
}

static void progress(uint64_t bytes)
{
    Ember__V1__LoaderProgress p = EMBER__V1__LOADER_PROGRESS__INIT;
    Ember__V1__FromLoader m = EMBER__V1__FROM_LOADER__INIT;

    p.bytes_done = bytes;
    m.kind_case = EMBER__V1__FROM_LOADER__KIND_PROGRESS;
    m.progress = &p;
    send_message(&m.base, NULL, 0);
}

static int loader(void)
{
    Ember__V1__LoaderPlanned planned = EMBER__V1__LOADER_PLANNED__INIT;
    Ember__V1__LoaderDone done = EMBER__V1__LOADER_DONE__INIT;
    Ember__V1__FromLoader m = EMBER__V1__FROM_LOADER__INIT;
    Ember__V1__ToLoader *in;
    unsigned long long mib;
    int fds[2];

    expect(EMBER__V1__TO_LOADER__KIND_START, &in);
    if (behave.fail)
        loader_failed(behave.error, behave.text);
    if (sscanf(in->start->path, "/fake/w%llu", &mib) == 1) {
        planned.weights_bytes = mib * MIB;
        planned.architecture = "fake";
        static uint64_t pages[] = {1024, 1024, 512, 512, 256};
        planned.kv_page_bytes = pages;
        planned.n_kv_page_bytes = ARRAY_LEN(pages);
        fds[0] = sealed_file("w", 1);
        fds[1] = sealed_file("m", 1);
    } else {
        plan_real(in->start->path, &planned, fds);
    }
    m.kind_case = EMBER__V1__FROM_LOADER__KIND_PLANNED;
    m.planned = &planned;
    send_message(&m.base, NULL, 0);
    expect(EMBER__V1__TO_LOADER__KIND_ADMITTED, &in);
    for (int i = 1; i < 10 && behave.slow_ms; i++) {
        usleep((useconds_t)behave.slow_ms * 100);
        progress(planned.weights_bytes / 10 * (uint64_t)i);
    }
    behave.slow_ms = 0;
    misbehave();
    done.digest = "00112233445566778899aabbccddeeff";
    done.ms = 1;
    m.kind_case = EMBER__V1__FROM_LOADER__KIND_DONE;
    m.done = &done;
    send_message(&m.base, fds, 2);
    while (behave.stay)
        pause();
    return 0;
}

/* ---- instance ---- */

static char token[64];
static int driver = -1;
static bool driver_known;

static void driver_state(bool connected)
{
    Ember__V1__DriverState state = EMBER__V1__DRIVER_STATE__INIT;
    Ember__V1__FromInstance m = EMBER__V1__FROM_INSTANCE__INIT;

    state.connected = connected;
    state.token = token;
    m.kind_case = EMBER__V1__FROM_INSTANCE__KIND_DRIVER;
    m.driver = &state;
    send_message(&m.base, NULL, 0);
}

static void drop_driver(void)
{
    if (driver_known)
        driver_state(false);
    driver_known = false;
    driver = fd_close(driver);
}

static void serve_driver(void)
{
    char line[128];
    ssize_t n = read(driver, line, sizeof line - 1);

    if (n <= 0) {
        drop_driver();
        return;
    }
    line[n] = 0;
    line[strcspn(line, "\n")] = 0;
    bool good = *token && !strcmp(line, token);
    if (good && !driver_known)
        driver_state(true);
    driver_known |= good;
    if (write(driver, good ? "ok\n" : "no\n", 3) != 3)
        drop_driver();
}

static void take_orders(void)
{
    uint8_t data[65536];
    size_t n_fds = 0;
    ssize_t n = fd_recv(CHANNEL, data, sizeof data, NULL, &n_fds);

    if (n <= 0)
        exit(0);
    Ember__V1__ToInstance *m = ember__v1__to_instance__unpack(NULL, (size_t)n, data);
    if (m && m->kind_case == EMBER__V1__TO_INSTANCE__KIND_GRANT) {
        snprintf(token, sizeof token, "%s", m->grant->token);
    } else if (m && m->kind_case == EMBER__V1__TO_INSTANCE__KIND_END) {
        drop_driver();
        *token = 0;
    } else {
        exit(8);
    }
    ember__v1__to_instance__free_unpacked(m, NULL);
}

static void ready(uint64_t kv_bytes)
{
    Ember__V1__PhaseTime phase = EMBER__V1__PHASE_TIME__INIT, *phases[] = {&phase};
    Ember__V1__InstanceReady r = EMBER__V1__INSTANCE_READY__INIT;
    Ember__V1__FromInstance m = EMBER__V1__FROM_INSTANCE__INIT;

    phase.name = "exec";
    phase.ms = 0.5;
    r.phases = phases;
    r.n_phases = 1;
    r.bytes = kv_bytes + MIB;
    m.kind_case = EMBER__V1__FROM_INSTANCE__KIND_READY;
    m.ready = &r;
    send_message(&m.base, NULL, 0);
}

static int instance(void)
{
    uint8_t data[65536];
    char store[512];
    int fds[3];
    size_t n_fds = 3;

    ssize_t n = fd_recv(CHANNEL, data, sizeof data, fds, &n_fds);
    if (n <= 0)
        return 0;
    Ember__V1__ToInstance *in = ember__v1__to_instance__unpack(NULL, (size_t)n, data);
    if (!in || in->kind_case != EMBER__V1__TO_INSTANCE__KIND_START || n_fds != 3)
        return 7;
    if (behave.fail) {
        Ember__V1__ChildFailed failed = EMBER__V1__CHILD_FAILED__INIT;
        Ember__V1__FromInstance m = EMBER__V1__FROM_INSTANCE__INIT;
        failed.error = behave.error;
        failed.text = behave.text;
        m.kind_case = EMBER__V1__FROM_INSTANCE__KIND_FAILED;
        m.failed = &failed;
        send_message(&m.base, NULL, 0);
        return 1;
    }
    if (behave.crash) { /* as a damaged artefact would make it */
        snprintf(store, sizeof store, "%s/store.mdb", in->start->cache_dir);
        if (access(store, F_OK) == 0)
            raise(SIGSEGV);
    }
    misbehave();
    ready(in->start->kv_bytes);
    for (;;) {
        struct pollfd p[] = {
            {CHANNEL, POLLIN, 0}, {driver < 0 ? fds[2] : -1, POLLIN, 0}, {driver, POLLIN, 0}};
        int n_ready = poll(p, 3, behave.die_after_ms ? behave.die_after_ms : -1);
        if (n_ready < 0)
            return 6;
        if (n_ready == 0)
            raise(SIGKILL);
        if (p[0].revents)
            take_orders();
        else if (p[1].revents)
            driver = accept4(fds[2], NULL, NULL, SOCK_CLOEXEC);
        else if (p[2].revents)
            serve_driver();
    }
}

/* Under the address sanitizer: it exits without tidying up, as it may. */
const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
    return "detect_leaks=0:handle_segv=0:handle_sigbus=0:handle_sigfpe=0";
}

int main(int argc, char **argv)
{
    bool is_loader = strstr(argv[0], "loader") != NULL;

    read_control(is_loader ? "loader" : "instance");
    return is_loader ? loader() : instance();
}
