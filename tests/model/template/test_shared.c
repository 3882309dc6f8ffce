/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The templates that others wrote, with what the reference renders from them: every folder of
 * shared/chat-templates. Skips (77) where that is not there.
 */
#include <dirent.h>
#include <stdio.h>

#include "model/template/template.h"
#include "tests/model/shared_dir.h"

/* Mismatches of one folder, or 1 when it cannot be read. */
static size_t check(const char *root, const char *name, size_t *total)
{
    _cleanup_free_ char *file = x_printf("%s/%s/template.jinja", root, name);
    _cleanup_free_ char *expected = x_printf("%s/%s/expected.json", root, name);
    _cleanup_(buffer_free) struct buffer report = {0};
    struct error err = {0};
    size_t cases = 0, mismatches = 0;
    if (template_verify_file(file, expected, &report, &cases, &mismatches, &err) < 0) {
        fprintf(stderr, "%s\n", error_text(&err));
        return 1;
    }
    if (report.len)
        fprintf(stderr, "%s", report.data);
    *total += cases;
    return mismatches;
}

int main(void)
{
    _cleanup_free_ char *root = shared_path("chat-templates");
    size_t folders = 0, cases = 0, bad = 0;
    DIR *d = root ? opendir(root) : NULL;
    if (!d) {
        fprintf(stderr, "skipped: no shared/chat-templates (set EMBER_SHARED)\n");
        return 77;
    }
    for (struct dirent *e; (e = readdir(d));) {
        if (e->d_name[0] == '.')
            continue;
        bad += check(root, e->d_name, &cases);
        folders++;
    }
    closedir(d);
    printf("%zu templates, %zu cases, %zu mismatches\n", folders, cases, bad);
    return bad || !cases;
}
