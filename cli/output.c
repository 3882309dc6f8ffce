/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/output.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <utf8proc.h>

#include "base/clock.h"
#include "base/mem.h"
#include "kernels/bench.h"

volatile int cli_interrupted;

static void on_signal(int number)
{
    if (cli_interrupted)
        _exit(CLI_INTERRUPTED); /* the second time: at once */
    cli_interrupted = 1;
}

void cli_catch_interrupts(void)
{
    struct sigaction action = {.sa_handler = on_signal};

    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

bool cli_json(const struct verb_call *call)
{
    return verb_flag(call, "json");
}

const char *cli_isa(const struct verb_call *call)
{
    static const char *const isas[] = {"baseline", "avx2", "avx512", "avx512-vnni",
                                       "amx"}; /* CLI_ISAS */
    int i = verb_choice(call, "isa");

    return i < 0 ? NULL : isas[i];
}

const char *cli_bytes(uint64_t bytes, char buf[24])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double value = (double)bytes;
    size_t unit = 0;

    while (value >= 1024 && unit + 1 < ARRAY_LEN(units)) {
        value /= 1024;
        unit++;
    }
    snprintf(buf, 24, unit && value < 100 ? "%.1f %s" : "%.0f %s", value, units[unit]);
    return buf;
}

const char *cli_ms(double ms, char buf[24])
{
    snprintf(buf, 24,
             ms >= 10000 ? "%.1f s"
             : ms >= 100 ? "%.0f ms"
             : ms >= 1   ? "%.1f ms"
                         : "%.2f ms",
             ms >= 10000 ? ms / 1000 : ms);
    return buf;
}

static void cell(const json_t *value, enum column_kind kind, char *buf, size_t size)
{
    char scratch[24];

    if (!value || json_is_null(value))
        snprintf(buf, size, "-");
    else if (json_is_string(value))
        snprintf(buf, size, "%s", *json_string_value(value) ? json_string_value(value) : "-");
    else if (json_is_boolean(value))
        snprintf(buf, size, "%s", json_is_true(value) ? "yes" : "no");
    else if (kind == COLUMN_BYTES)
        snprintf(buf, size, "%s", cli_bytes((uint64_t)json_number_value(value), scratch));
    else if (kind == COLUMN_MS)
        snprintf(buf, size, "%s", cli_ms(json_number_value(value), scratch));
    else if (kind == COLUMN_SECONDS)
        snprintf(buf, size, "%.0f s", json_number_value(value));
    else if (kind == COLUMN_ERROR)
        snprintf(buf, size, "%.1e", json_number_value(value));
    else if (kind == COLUMN_CHANGE)
        snprintf(buf, size, "%+.2f %%", 100 * json_number_value(value));
    else if (json_is_integer(value))
        snprintf(buf, size, "%lld", (long long)json_integer_value(value));
    else if (json_is_real(value))
        snprintf(buf, size, "%.6g", json_real_value(value));
    else
        snprintf(buf, size, "...");
    for (char *p = buf; kind == COLUMN_TEXT && *p; p++) /* a row is a line */
        *p = *p == '\n' ? ' ' : *p;
}

static int width(const char *text)
{
    int columns = 0;
    utf8proc_int32_t c;

    for (const char *p = text; *p;) {
        utf8proc_ssize_t n = utf8proc_iterate((const utf8proc_uint8_t *)p, -1, &c);
        columns += n > 0 ? utf8proc_charwidth(c) : 1;
        p += n > 0 ? n : 1;
    }
    return columns;
}

static void pad(const char *text, int to, bool right)
{
    int n = to - width(text);

    printf("%*s%s", right && n > 0 ? n : 0, "", text);
    if (!right && n > 0)
        printf("%*s", n, "");
}

void cli_print_json(json_t *value)
{
    json_dumpf(value, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
    putchar('\n');
    json_decref(value);
}

int cli_print_list(const struct verb_call *call, json_t *list, const struct column *columns,
                   const char *empty)
{
    int widths[24] = {0};
    char text[512];
    size_t i;
    json_t *item;

    if (cli_json(call)) {
        cli_print_json(list);
        return CLI_OK;
    }
    if (!json_array_size(list)) {
        printf("%s\n", empty);
        json_decref(list);
        return CLI_OK;
    }
    for (int c = 0; columns[c].key && c < 24; c++) {
        widths[c] = width(columns[c].title);
        json_array_foreach(list, i, item)
        {
            cell(json_object_get(item, columns[c].key), columns[c].kind, text, sizeof text);
            widths[c] = widths[c] > width(text) ? widths[c] : width(text);
        }
    }
    for (int c = 0; columns[c].key && c < 24; c++) {
        pad(columns[c].title, columns[c + 1].key || columns[c].kind ? widths[c] : 0,
            columns[c].kind != COLUMN_TEXT);
        fputs(columns[c + 1].key ? "  " : "\n", stdout);
    }
    json_array_foreach(list, i, item) for (int c = 0; columns[c].key && c < 24; c++)
    {
        cell(json_object_get(item, columns[c].key), columns[c].kind, text, sizeof text);
        pad(text, columns[c + 1].key || columns[c].kind ? widths[c] : 0,
            columns[c].kind != COLUMN_TEXT);
        fputs(columns[c + 1].key ? "  " : "\n", stdout);
    }
    json_decref(list);
    return CLI_OK;
}

/* "a.b" is b of the object a. */
static const json_t *at_key(const json_t *object, const char *key)
{
    const char *dot = strchr(key, '.');
    char first[64];

    if (!dot || (size_t)(dot - key) >= sizeof first)
        return json_object_get(object, key);
    snprintf(first, sizeof first, "%.*s", (int)(dot - key), key);
    return at_key(json_object_get(object, first), dot + 1);
}

int cli_print_object(const struct verb_call *call, json_t *object, const struct column *columns)
{
    char text[512];
    int widest = 0;

    if (cli_json(call)) {
        cli_print_json(object);
        return CLI_OK;
    }
    for (int c = 0; columns[c].key; c++)
        widest = widest > width(columns[c].title) ? widest : width(columns[c].title);
    for (int c = 0; columns[c].key; c++) {
        cell(at_key(object, columns[c].key), columns[c].kind, text, sizeof text);
        pad(columns[c].title, widest, false);
        printf("  %s\n", text);
    }
    json_decref(object);
    return CLI_OK;
}

int cli_exit(const struct error *err)
{
    switch (-err->code) {
    case ECONNREFUSED:
        return CLI_NO_DAEMON;
    case ENOENT:
        return CLI_NOT_FOUND;
    case ENOMEM:
    case ENOSPC:
    case ERANGE: /* OUT_OF_RANGE: more than the budget will ever have */
        return CLI_NO_ROOM;
    case ECANCELED:
        return cli_interrupted ? CLI_INTERRUPTED : CLI_FAILED;
    default:
        return CLI_FAILED;
    }
}

int cli_worse(int a, int b)
{
    return a == CLI_FAILED || b == CLI_OK ? a : b == CLI_FAILED || a == CLI_OK ? b : a;
}

static void say_error(bool as_json, const struct error *err)
{
    /* whoever was interrupted has a word of its own for it ("cancelled", "stopped") */
    const char *text = cli_interrupted && err->code == -ECANCELED ? "interrupted" : error_text(err);

    if (!as_json) {
        fprintf(stderr, "emberctl: %s\n", text);
        return;
    }
    json_t *json = json_pack("{s:{s:i,s:s}}", "error", "errno", -err->code, "text", text);
    json_dumpf(json, stderr, JSON_INDENT(2));
    fputc('\n', stderr);
    json_decref(json);
}

int cli_fail(const struct verb_call *call, const struct error *err)
{
    say_error(cli_json(call), err);
    return cli_exit(err);
}

/* The words have not become a call, so --json is looked for among them. */
int cli_fail_usage(int argc, char **argv, const struct error *err)
{
    bool as_json = false;

    for (int i = 1; i < argc && strcmp(argv[i], "--"); i++)
        as_json |= !strcmp(argv[i], "--json");
    say_error(as_json, err);
    return CLI_USAGE;
}

void progress_begin(struct progress *p, const struct verb_call *call, const char *label)
{
    *p = (struct progress){
        .on = isatty(STDERR_FILENO) && !cli_json(call), .label = label, .started_ns = clock_ns()};
}

void progress_update(struct progress *p, const char *phase, uint64_t done, uint64_t total)
{
    enum { CELLS = 30 };
    char bar[CELLS + 1], a[24], b[24], rate[24];
    uint64_t now = clock_ns();

    if (!p->on || (p->drawn && done < total && now - p->drawn_ns < 50000000))
        return;
    p->drawn = true;
    p->drawn_ns = now;
    if (!total) {
        fprintf(stderr, "\r\033[K%s: %s", p->label, phase);
        return;
    }
    int full = (int)((double)done / (double)total * CELLS);
    for (int i = 0; i < CELLS; i++)
        bar[i] = i < full ? '#' : '.';
    bar[CELLS] = 0;
    double seconds = (double)(now - p->started_ns) / 1e9;
    fprintf(stderr, "\r\033[K%s: %s [%s] %3.0f%%  %s of %s  %s/s", p->label, phase, bar,
            100.0 * (double)done / (double)total, cli_bytes(done, a), cli_bytes(total, b),
            cli_bytes(seconds > 0 ? (uint64_t)((double)done / seconds) : 0, rate));
}

void progress_end(struct progress *p)
{
    if (p->on && p->drawn)
        fprintf(stderr, "\r\033[K");
    p->on = false;
}

void progress_wait(struct progress *p, const struct verb_call *call, const char *model)
{
    progress_begin(p, call, model ? model : "emberd");
    progress_update(p, "waiting for an instance; the first of a model compiles its kernels", 0, 0);
}

void print_machine(const struct kernels_bench_machine *m)
{
    printf("%s, %u threads: read bandwidth %.1f GB/s; in registers, multiply-adds counted twice: "
           "floats %.0f G/s, bf16 %.0f G/s, int8 %.0f G/s\n",
           m->device, m->threads, m->read_bytes_per_s / 1e9, m->flops_per_s / 1e9,
           m->bf16_per_s / 1e9, m->int8_per_s / 1e9);
}
