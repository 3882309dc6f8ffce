/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cpu/amx.h"

#if defined(__x86_64__)

#include <cpuid.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

static bool announced(void)
{
    unsigned a, b, c, d;
    const unsigned bf16 = 1u << 22, tile = 1u << 24, int8 = 1u << 25;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return false;
    return (d & (bf16 | tile | int8)) == (bf16 | tile | int8);
}

/* What LDTILECFG reads. The compiler's own function for it says that it reads 8 bytes, so stores to
 * the others can be lost; the operand here is the whole of it. */
struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

static void multiply(const void *a, const void *b, void *ret, bool bf16)
{
    struct tile_config config = {.palette = 1};
    for (int i = 0; i < 3; i++) {
        config.row_bytes[i] = 64;
        config.rows[i] = 16;
    }
    uint8_t(*to)[1024] = ret;
    const uint8_t(*x)[1024] = a, (*w)[1024] = b;
    __asm__ volatile("ldtilecfg %0\n\ttilezero %%tmm0" ::"m"(config));
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm1" ::"r"(x), "r"(64L), "m"(*x));
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm2" ::"r"(w), "r"(64L), "m"(*w));
    if (bf16)
        __asm__ volatile("tdpbf16ps %tmm2, %tmm1, %tmm0");
    else
        __asm__ volatile("tdpbssd %tmm2, %tmm1, %tmm0");
    __asm__ volatile("tilestored %%tmm0, (%1,%2,1)\n\ttilerelease"
                     : "=m"(*to)
                     : "r"(to), "r"(64L)
                     : "memory");
}

/* x [16, 64] times w in lines of four k for 16 columns. */
static bool int8_right(void)
{
    _Alignas(64) int8_t x[1024], w[1024];
    _Alignas(64) int32_t sum[256];
    for (int i = 0; i < 1024; i++) {
        x[i] = (int8_t)(i * 37 + 11);
        w[i] = (int8_t)(i * 101 + 5);
    }
    multiply(x, w, sum, false);
    for (int r = 0; r < 16; r++)
        for (int n = 0; n < 16; n++) {
            int32_t want = 0;
            for (int k = 0; k < 64; k++)
                want += x[64 * r + k] * w[64 * (k / 4) + 4 * n + k % 4];
            if (sum[16 * r + n] != want)
                return false;
        }
    return true;
}

/* Small integers, whose sums are exact. */
static bool bf16_right(void)
{
    _Alignas(64) uint16_t x[512], w[512];
    _Alignas(64) float sum[256];
    for (int i = 0; i < 512; i++) {
        float a = (float)(i * 37 % 15 - 7), b = (float)(i * 11 % 13 - 6);
        uint32_t bits;
        memcpy(&bits, &a, 4);
        x[i] = (uint16_t)(bits >> 16);
        memcpy(&bits, &b, 4);
        w[i] = (uint16_t)(bits >> 16);
    }
    multiply(x, w, sum, true);
    for (int r = 0; r < 16; r++)
        for (int n = 0; n < 16; n++) {
            int want = 0;
            for (int k = 0; k < 32; k++)
                want +=
                    ((32 * r + k) * 37 % 15 - 7) * ((32 * (k / 2) + 2 * n + k % 2) * 11 % 13 - 6);
            if (sum[16 * r + n] != (float)want)
                return false;
        }
    return true;
}

static sigjmp_buf escape;

static void on_signal(int number)
{
    siglongjmp(escape, number);
}

/* The handler is the process's for the time of the trial, which comes before its threads. */
static bool survives(void)
{
    struct sigaction action = {.sa_handler = on_signal}, ill, segv;
    volatile bool right = false;
    sigaction(SIGILL, &action, &ill);
    sigaction(SIGSEGV, &action, &segv);
    if (!sigsetjmp(escape, 1))
        right = int8_right() && bf16_right();
    sigaction(SIGILL, &ill, NULL);
    sigaction(SIGSEGV, &segv, NULL);
    return right;
}

static bool works;

static void find_out(void)
{
    works = announced() && !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) &&
            survives();
}

bool cpu_amx_works(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, find_out);
    return works;
}

#else

bool cpu_amx_works(void)
{
    return false;
}

#endif
