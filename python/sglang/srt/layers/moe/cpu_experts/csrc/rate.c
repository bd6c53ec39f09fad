/* How fast the CPUs read main memory: a thread on each of some CPUs reads memory of its own. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { WAIT, GO, STOP };

struct reader {
    pthread_t thread;
    _Atomic int *ready, *order;
    int cpu;
    size_t bytes;
    double seconds;
    uint64_t read, sum;
    int failed;
};

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static uint64_t sum_of(const uint64_t *words, size_t count) {
    uint64_t sum[8] = {0};
    for (size_t i = 0; i + 8 <= count; i += 8)
        for (int k = 0; k < 8; k++) sum[k] += words[i + (size_t)k];
    return sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
}

static void *read_on(void *argument) {
    struct reader *r = argument;
    if (r->cpu >= 0) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(r->cpu, &set);
        pthread_setaffinity_np(pthread_self(), sizeof set, &set);
    }
    uint8_t *memory = mmap(NULL, r->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    r->failed = memory == MAP_FAILED;
    if (!r->failed) {
        madvise(memory, r->bytes, MADV_HUGEPAGE);
        memset(memory, 1, r->bytes); /* on the node of this CPU */
    }
    atomic_fetch_add(r->ready, 1);
    while (atomic_load(r->order) == WAIT) sched_yield();
    int reads = !r->failed && atomic_load(r->order) == GO;
    double end = now() + r->seconds;
    size_t piece = 4 << 20;
    while (reads && now() < end)
        for (size_t at = 0; at < r->bytes; at += piece) {
            size_t size = at + piece > r->bytes ? r->bytes - at : piece;
            r->sum += sum_of((const uint64_t *)(memory + at), size / 8);
            r->read += size;
            if (now() >= end) break;
        }
    if (!r->failed) munmap(memory, r->bytes);
    return NULL;
}

/* Returns the bytes a second that threads on these CPUs (-1: any) read together for so many seconds, each `bytes` of its
 * own over and over; 0 if the system gives no memory, or starts no thread. */
double cpu_experts_read_rate(int threads, const int *cpus, uint64_t bytes, double seconds) {
    struct reader *readers = calloc((size_t)threads, sizeof *readers);
    if (!readers) return 0.0;
    _Atomic int ready = 0, order = WAIT;
    int started = 0, failed = 0;
    for (; started < threads; started++) {
        struct reader *r = &readers[started];
        *r = (struct reader){.ready = &ready, .order = &order, .cpu = cpus[started], .bytes = bytes, .seconds = seconds};
        if (pthread_create(&r->thread, NULL, read_on, r)) break;
    }
    while (atomic_load(&ready) < started) sched_yield();
    failed = started < threads;
    atomic_store(&order, failed ? STOP : GO);
    double total = 0.0;
    for (int i = 0; i < started; i++) {
        pthread_join(readers[i].thread, NULL);
        total += (double)readers[i].read, failed |= readers[i].failed;
    }
    free(readers);
    return failed ? 0.0 : total / seconds;
}
