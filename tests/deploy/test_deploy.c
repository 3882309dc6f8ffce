/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the table of emberd's options generates stays what is in the tree, and the unit agrees with
 * it. EMBER_UPDATE=1 writes the generated files anew (run it from `meson test "deploy files"`).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/fd.h"
#include "daemon/gateway/options.h"
#include "daemon/manager/options.h"

#define LIMIT (1u << 20)

/* Runs a shell command; its exit status. */
static int shell(const char *command)
{
    int status = system(command);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void assert_generated(const struct config_program *program, enum config_action action,
                             const char *path)
{
    _cleanup_(buffer_free) struct buffer want = {0};
    _cleanup_free_ char *have = NULL;
    struct error err;
    size_t len;

    config_print(program, action, NULL, &want);
    if (getenv("EMBER_UPDATE")) {
        _cleanup_fd_ int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
        assert_true(fd >= 0);
        assert_int_equal(fd_write_all(fd, want.data, want.len, path, &err), 0);
        return;
    }
    if (fd_read_file(path, LIMIT, &have, &len, &err) < 0)
        fail_msg("%s", err.text);
    if (strcmp(have, want.data))
        fail_msg("%s is not what the options.h of %s generates: "
                 "EMBER_UPDATE=1 meson test \"deploy files\" writes it anew",
                 path, program->name);
}

static void test_generated_files(void **state)
{
    assert_generated(&emberd_program, CONFIG_MARKDOWN, SOURCE_ROOT "/docs/configuration.md");
    assert_generated(&emberd_program, CONFIG_SAMPLE, SOURCE_ROOT "/deploy/emberd.conf");
    assert_generated(&gateway_program, CONFIG_MARKDOWN,
                     SOURCE_ROOT "/docs/gateway-configuration.md");
    assert_generated(&gateway_program, CONFIG_SAMPLE, SOURCE_ROOT "/deploy/gateway.conf");
}

/* Every key of the sample, uncommented, is taken, and is the default. */
static void test_sample_reads_back(void **state)
{
    struct emberd_options plain = {0}, sample = {0};
    _cleanup_(buffer_free) struct buffer text = {0};
    char path[] = "/tmp/ember-sample-XXXXXX";
    _cleanup_fd_ int fd = mkstemp(path);
    struct error err = {0};

    config_print(&emberd_program, CONFIG_SAMPLE, NULL, &text);
    size_t kept = 0; /* without the # of "\n#key = value" */
    for (size_t i = 0; i < text.len; i++)
        if (!(text.data[i] == '#' && i && text.data[i - 1] == '\n' && text.data[i + 1] != ' '))
            text.data[kept++] = text.data[i];
    text.len = kept;
    assert_int_equal(fd_write_all(fd, text.data, text.len, path, NULL), 0);
    assert_int_equal(config_defaults(&emberd_program, &plain, NULL), 0);
    if (config_read_file(&emberd_program, path, &sample, &err) < 0)
        fail_msg("%s", err.text);
    unlink(path);
    for (size_t k = 0; k < emberd_program.n_keys; k++) {
        const struct config_key *key = &emberd_program.keys[k];
        _cleanup_(buffer_free) struct buffer a = {0}, b = {0};
        union value v = {0};
        memcpy(&v, (char *)&plain + key->offset, value_size(key->type));
        value_print(key->type, key->limits, &v, &a);
        memcpy(&v, (char *)&sample + key->offset, value_size(key->type));
        value_print(key->type, key->limits, &v, &b);
        assert_string_equal(a.data ? a.data : "", b.data ? b.data : "");
    }
    config_free(&emberd_program, &plain);
    config_free(&emberd_program, &sample);
}

/* The words of the example for Kubernetes are options that there are; those for the gateway, too.
 */
static void test_kubernetes(void **state)
{
    static const char gateway[] = "--gateway-options=";
    char program[] = "program", sample[] = "--config=" SOURCE_ROOT "/deploy/emberd.conf";
    char gateway_sample[] = "--config=" SOURCE_ROOT "/deploy/gateway.conf";
    char *words[32] = {program, sample}, *gateway_words[] = {program, gateway_sample, NULL};
    struct gateway_options gateway_options = {0};
    struct emberd_options options = {0};
    _cleanup_free_ char *text = NULL;
    struct error err = {0};
    size_t len;
    int n = 2;

    if (fd_read_file(SOURCE_ROOT "/deploy/kubernetes.yaml", LIMIT, &text, &len, &err) < 0)
        fail_msg("%s", err.text);
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        char *word = strstr(line, "- --");
        if (!word)
            continue;
        words[n] = word + strlen("- ");
        if (!strncmp(words[n], gateway, strlen(gateway)))
            gateway_words[2] = words[n] + strlen(gateway);
        assert_true(++n < (int)ARRAY_LEN(words));
    }
    assert_in_range(n, 6, ARRAY_LEN(words));
    assert_non_null(gateway_words[2]);
    if (config_read(&emberd_program, n, words, &options, &err) < 0)
        fail_msg("%s", err.text);
    if (config_read(&gateway_program, 3, gateway_words, &gateway_options, &err) < 0)
        fail_msg("%s", err.text);
    assert_string_equal(gateway_options.api_keys, "/keys/keys");
    config_free(&emberd_program, &options);
    config_free(&gateway_program, &gateway_options);
}

static void test_defaults_hang_together(void **state)
{
    struct emberd_options o = {0};
    _cleanup_free_ char *config = NULL;

    setenv("RUNTIME_DIRECTORY", "/run/emberd", 1);
    setenv("CACHE_DIRECTORY", "/var/cache/emberd", 1);
    assert_int_equal(config_defaults(&emberd_program, &o, NULL), 0);
    assert_string_equal(o.socket, "/run/emberd/emberd.sock");
    assert_string_equal(o.runtime_dir, "/run/emberd");
    assert_string_equal(o.cache_dir, "/var/cache/emberd");
    config = x_printf("%s/config.json", o.default_model);
    assert_int_equal(access(config, R_OK), 0);
    assert_true(o.standby <= o.standby_max);
    assert_int_equal(o.compile, EMBERD_COMPILE_AUTO);
    config_free(&emberd_program, &o);
}

/* Names are the options of the command line as well: one of a kind, and none of the engine's own.
 */
static void test_names(void **state)
{
    static const char *const taken[] = {"config",   "help",        "version",      "man",
                                        "markdown", "show_config", "sample_config"};

    static const struct config_program *const programs[] = {&emberd_program, &gateway_program};

    for (size_t p = 0; p < ARRAY_LEN(programs); p++) {
        for (size_t k = 0; k < programs[p]->n_keys; k++) {
            const struct config_key *key = &programs[p]->keys[k];
            for (size_t i = 0; i < k; i++)
                assert_string_not_equal(key->name, programs[p]->keys[i].name);
            for (size_t i = 0; i < ARRAY_LEN(taken); i++)
                assert_string_not_equal(key->name, taken[i]);
            assert_true(strlen(key->help) > 10 && key->help[strlen(key->help) - 1] != '.');
        }
    }
}

static void test_man_page(void **state)
{
    char path[] = "/tmp/ember-man-XXXXXX";
    _cleanup_fd_ int fd = mkstemp(path);
    _cleanup_(buffer_free) struct buffer man = {0};

    if (shell("command -v mandoc >/dev/null"))
        skip();
    config_print(&emberd_program, CONFIG_MAN, NULL, &man);
    assert_int_equal(fd_write_all(fd, man.data, man.len, path, NULL), 0);
    /* The page has no date: the same source makes the same page. */
    _cleanup_free_ char *lint =
        x_printf("mandoc -Tlint -Wwarning %s | (! grep -v 'missing date' >&2)", path);
    int status = shell(lint);
    unlink(path);
    assert_int_equal(status, 0);
}

/* systemd's own opinion of the units, with a program that exists in the place of ours. */
static void test_units(void **state)
{
    static const char *const names[] = {"emberd", "ember-gateway"};

    if (shell("command -v systemd-analyze >/dev/null"))
        skip();
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        _cleanup_free_ char *command = x_printf(
            "d=$(mktemp -d) && trap 'rm -r $d' EXIT && "
            "sed 's|/usr/bin/ember[a-z-]*|/bin/true|; /^Documentation=/d; /^User=/d; /^Group=/d' "
            "'" SOURCE_ROOT "/deploy/%s.service' >$d/%s.service && "
            "systemd-analyze verify --man=no $d/%s.service 2>$d/said; "
            "if grep ember $d/said >&2; then exit 1; fi",
            names[i], names[i], names[i]);
        assert_int_equal(shell(command), 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_generated_files), cmocka_unit_test(test_sample_reads_back),
        cmocka_unit_test(test_kubernetes),      cmocka_unit_test(test_defaults_hang_together),
        cmocka_unit_test(test_names),           cmocka_unit_test(test_man_page),
        cmocka_unit_test(test_units),
    };
    return cmocka_run_group_tests_name("deploy", tests, NULL, NULL);
}
