/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What systemd does when it starts a service that has descriptors: hand_over FD,FD,... PROGRAM ARGS
 * makes them 3, 4, ... in that order, sets LISTEN_FDS and LISTEN_PID and becomes the program.
 * (LISTEN_FDNAMES is in the environment already.)
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    int fds[256], n = 0;
    char number[16];

    for (char *p = argc > 2 ? argv[1] : ""; *p && n < 256; p += *p == ',')
        fds[n++] = (int)strtol(p, &p, 10);
    for (int i = 0; i < n; i++) /* out of the way of 3 ... 3 + n first */
        if ((fds[i] = fcntl(fds[i], F_DUPFD_CLOEXEC, 3 + 256)) < 0)
            return 126;
    for (int i = 0; i < n; i++)
        if (dup2(fds[i], 3 + i) < 0)
            return 126;
    snprintf(number, sizeof number, "%d", n);
    setenv("LISTEN_FDS", number, 1);
    snprintf(number, sizeof number, "%d", (int)getpid());
    setenv("LISTEN_PID", number, 1);
    if (n)
        execv(argv[2], argv + 2);
    return 127;
}
