/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/serve_lab.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fd.h"
#include "cli/output.h"

#define OPTIONS_MAX 16
#define LOG_MAX (64u << 20)
#define WAIT_MS 30000

/* ---- a tokenizer for checkpoints that have none ---- */

static void put_utf8(struct buffer *out, unsigned c)
{
    if (c < 0x80)
        buffer_printf(out, "%c", (int)c);
    else
        buffer_printf(out, "%c%c", (int)(0xc0 | c >> 6), (int)(0x80 | (c & 0x3f)));
}

/* The 256 bytes as GPT-2's byte-level alphabet writes them, then words: " 100", " 101", ... */
static int write_tokenizer(const char *path, uint32_t vocab, struct error *err)
{
    _cleanup_(buffer_free) struct buffer out = {0};
    unsigned other = 0;

    buffer_printf(&out, "{\"version\":\"1.0\",\"added_tokens\":[],\"normalizer\":null,"
                        "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,"
                        "\"use_regex\":true},\"post_processor\":null,"
                        "\"decoder\":{\"type\":\"ByteLevel\"},\"model\":{\"type\":\"BPE\","
                        "\"merges\":[],\"vocab\":{");
    for (unsigned b = 0; b < 256; b++) {
        bool itself = (b > 0x20 && b < 0x7f) || (b >= 0xa1 && b != 0xad);
        buffer_printf(&out, "%s\"%s", b ? "," : "", b == '"' || b == '\\' ? "\\" : "");
        put_utf8(&out, itself ? b : 256 + other++);
        buffer_printf(&out, "\":%u", b);
    }
    for (uint32_t i = 256; i < vocab; i++)
        buffer_printf(&out, ",\"\u0120%x\":%u", i, i);
    buffer_printf(&out, "}}}\n");
    _cleanup_fd_ int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    return fd < 0 ? error_sys(err, errno, "%s", path)
                  : fd_write_all(fd, out.data, out.len, path, err);
}

static int have_tokenizer(const char *model, uint32_t vocab, struct error *err)
{
    _cleanup_free_ char *path = x_printf("%s/tokenizer.json", model);

    return !vocab || access(path, R_OK) == 0 ? 0 : write_tokenizer(path, vocab, err);
}

/* ---- the gateway ---- */

static void exec_gateway(const struct serve_lab *lab, const char *program,
                         const char *const *options)
{
    char *args[OPTIONS_MAX + 8];
    int n = 0, log = open(lab->log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(log, STDERR_FILENO);
    unsetenv("NOTIFY_SOCKET");
    args[n++] = (char *)program;
    args[n++] = x_printf("--emberd=%s", lab->lab.socket);
    args[n++] = "--listen=127.0.0.1:0";
    args[n++] = "--state-file=";
    for (int i = 0; i < OPTIONS_MAX && options[i]; i++)
        args[n++] = (char *)options[i];
    args[n] = NULL;
    execv(program, args);
    perror(program);
    _exit(127);
}

/* The last line of the log, for an error's text. */
static char *last_line(const char *log)
{
    char *text = NULL, *at;
    size_t len;

    if (fd_read_file(log, LOG_MAX, &text, &len, NULL) < 0 || !len)
        return text;
    if (text[len - 1] == '\n')
        text[len - 1] = 0;
    at = strrchr(text, '\n');
    if (at)
        memmove(text, at + 1, strlen(at));
    return text;
}

static bool read_port(struct serve_lab *lab)
{
    _cleanup_free_ char *text = NULL;
    size_t len;

    if (fd_read_file(lab->log, LOG_MAX, &text, &len, NULL) < 0)
        return false;
    const char *at = strstr(text, " ready listen=");
    at = at ? strstr(at, " port=") : NULL;
    if (at && strchr(at, '\n'))
        lab->port = (unsigned)strtoul(at + 6, NULL, 10);
    return lab->port;
}

static void rest(void)
{
    struct timespec pause = {0, 2000000};

    nanosleep(&pause, NULL);
}

/* Healthy: it has reached emberd. */
static int wait_healthy(struct serve_lab *lab, struct error *err)
{
    uint64_t start = clock_ns();
    int status, r = 0;

    while (r == 0 && clock_ms_since(start) < WAIT_MS) {
        struct load_stream health = {.path = "/health"};
        struct load_run run = {.port = lab->port, .connections = 1, .until = SIZE_MAX};
        if (cli_interrupted)
            return error_set(err, ECANCELED, "interrupted");
        if (waitpid(lab->gateway, &status, WNOHANG) == lab->gateway) {
            _cleanup_free_ char *line = last_line(lab->log);
            lab->gateway = 0;
            return error_set(err, EPIPE, "ember-gateway ended at its start: %s", line ? line : "");
        }
        if (lab->port || read_port(lab)) {
            run.port = lab->port;
            r = load_run(&run, &health, 1, err);
        }
        if (health.status == 200)
            return 0;
        rest();
    }
    return r < 0 ? r : error_set(err, ETIMEDOUT, "ember-gateway is not healthy in time");
}

int serve_lab_start(struct serve_lab *lab, const struct lab_options *emberd,
                    const char *const *options, uint32_t vocab, struct error *err)
{
    _cleanup_free_ char *program = lab_program("ember-gateway");
    int r = lab_new(&lab->lab, err);

    if (r == 0 && !program)
        r = error_set(err, ENOENT, "ember-gateway is not beside emberctl; build it first");
    if (r == 0)
        r = have_tokenizer(emberd->model, vocab, err);
    if (r == 0)
        r = lab_start(&lab->lab, emberd, false, err);
    if (r < 0)
        return r;
    lab->log = x_printf("%s/gateway.log", lab->lab.dir);
    lab->gateway = fork();
    if (lab->gateway < 0)
        return error_sys(err, errno, "fork");
    if (!lab->gateway)
        exec_gateway(lab, program, options);
    r = wait_healthy(lab, err);
    if (r == 0 && clock_getcpuclockid(lab->gateway, &lab->cpu))
        r = error_set(err, ESRCH, "ember-gateway has no CPU clock");
    return r;
}

void serve_lab_free(struct serve_lab *lab)
{
    int status;

    if (lab->gateway > 0) {
        kill(lab->gateway, SIGKILL); /* nothing of it is to be kept */
        waitpid(lab->gateway, &status, 0);
    }
    lab_free(&lab->lab);
    free(lab->log);
    *lab = (struct serve_lab){.lab.notify = -1};
}

uint64_t serve_lab_cpu_ns(const struct serve_lab *lab)
{
    struct timespec ts = {0};

    clock_gettime(lab->cpu, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* ---- instances ---- */

static int list(struct control *control, Ember__V1__ListInstancesResponse **ret, struct error *err)
{
    Ember__V1__ListInstancesRequest request = EMBER__V1__LIST_INSTANCES_REQUEST__INIT;

    return control_call(control, "ListInstances", &request.base,
                        &ember__v1__list_instances_response__descriptor, 5000, ret, err);
}

int serve_lab_instances(struct serve_lab *lab, int32_t *ret_pids, size_t room, size_t *ret_n,
                        struct error *err)
{
    _cleanup_(control_freep) struct control *control = NULL;
    Ember__V1__ListInstancesResponse *all = NULL;

    int r = lab_control(&lab->lab, &control, err);
    if (r == 0)
        r = list(control, &all, err);
    if (r < 0)
        return r;
    *ret_n = 0;
    for (size_t i = 0; i < all->n_instances && *ret_n < room; i++)
        if (all->instances[i]->warmth == EMBER__V1__WARMTH__HOT)
            ret_pids[(*ret_n)++] = all->instances[i]->pid;
    protobuf_c_message_free_unpacked(&all->base, NULL);
    return 0;
}

int serve_lab_clear(struct serve_lab *lab, struct error *err)
{
    _cleanup_(control_freep) struct control *control = NULL;
    uint64_t start = clock_ns();
    size_t left = 1;

    int r = lab_control(&lab->lab, &control, err);
    while (r == 0 && left && clock_ms_since(start) < WAIT_MS) {
        Ember__V1__ListInstancesResponse *all = NULL;
        r = list(control, &all, err);
        if (r < 0)
            break;
        left = all->n_instances;
        for (size_t i = 0; i < left; i++)
            control_release(control, all->instances[i]->id, false);
        protobuf_c_message_free_unpacked(&all->base, NULL);
        rest();
    }
    return r < 0 || !left ? r : error_set(err, ETIMEDOUT, "instances do not end");
}

/* ---- requests ---- */

static uint64_t next(uint64_t *state)
{
    uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));

    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

char *serve_body(const struct serve_ask *ask)
{
    struct buffer out = {0};
    uint64_t own = ask->seed, shared = ask->shared;

    buffer_printf(&out, "{\"prompt\":[");
    for (uint32_t i = 0; i < ask->n_prompt; i++) {
        uint64_t word = next(i < ask->n_shared ? &shared : &own);
        buffer_printf(&out, "%s%u", i ? "," : "", 256 + (uint32_t)(word % (ask->vocab - 256)));
    }
    buffer_printf(&out,
                  "],\"max_tokens\":%u,\"temperature\":0,\"ignore_eos\":true,\"user\":\"%u\","
                  "\"stream\":true,\"stream_options\":{\"include_usage\":true}}",
                  ask->n_output, ask->user);
    return out.data;
}
