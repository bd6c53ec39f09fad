/* A pool of threads that computes the experts of a step, called directly or by a doorbell in main memory. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "experts.h"

#define MAX_THREADS 256
#define MAX_LAYERS 1024
#define MAX_NODES 16
/* Rows of a part, but for the last one of a matrix. */
#define ROWS 16
/* Polls for which a thread keeps its CPU: about a millisecond, longer than the rest of a layer takes a GPU. */
#define POLLS 20000
/* Nanoseconds without a ring after which the doorbell is looked at every 50 microseconds only. */
#define IDLE_NS 100000000
#define PAUSE_NS 50000

struct layer {
    struct matrix up, down;
    struct activation activation;
};

/* A step's request in main memory. Both sides know where its parts begin (`struct mailbox` has their addresses). */
struct header {
    _Atomic uint64_t bell;    /* layer + 1; the CPU takes it away */
    uint64_t pad0[7];
    _Atomic uint64_t done;    /* layer + 1 when the results are there; the GPU takes it away */
    uint64_t pad1[7];
    int32_t tokens, top_k;    /* of the step; no tokens: nothing to compute */
    uint64_t pad2[7];
    _Atomic int32_t fetched;  /* share of the missing experts that the GPU shall copy, of 4,096 */
    uint32_t pad3[15];
};

struct mailbox {
    struct header *header;
    const int32_t *ids;      /* [tokens, top_k], -1: not for the CPU */
    const float *weights;    /* [tokens, top_k] */
    const uint16_t *x;       /* [tokens, hidden] bfloat16 */
    float *out;              /* [tokens, hidden] */
};

struct request {
    const struct layer *layer;
    int tokens, top_k;
    const int32_t *ids;
    const float *weights;
    const uint16_t *x;
    float *out;
};

struct pool {
    const struct kernels *kernels;
    int threads, max_tokens, max_pairs, num_layers;
    struct layer *layers;
    pthread_t workers[MAX_THREADS];
    int cpus[MAX_THREADS];
    int num_nodes, node_of[MAX_THREADS]; /* rows of each matrix are divided among so many nodes; of a thread */
    uint8_t *prepared[MAX_THREADS]; /* rows of x or of the activations, for the thread alone */
    size_t prepared_bytes;
    float *scratch[MAX_THREADS];
    uint16_t *inter;
    size_t inter_bytes;

    /* The request at work: pairs by expert. */
    struct request request;
    int num_pairs, num_experts, chunk[2], units[2][MAX_NODES];
    int *pair, *expert, *first; /* pair [max_pairs]; expert, first of its pairs [max_pairs + 1] */
    struct { _Alignas(64) _Atomic int next; } taken[2][MAX_NODES];
    _Alignas(64) _Atomic int finished[2];
    _Alignas(64) _Atomic uint64_t generation;
    _Alignas(64) _Atomic int working, sleepers, stopping;
    pthread_mutex_t lock;
    pthread_cond_t wake;

    struct mailbox mailbox;
    pthread_t coordinator, watchdog;
    int rung; /* a doorbell has been connected */
    double deadline, bus_rate;
    _Atomic uint64_t busy_since;

    _Atomic uint64_t steps, experts_done, bytes_read, busy_ns;
};

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* --- one request -------------------------------------------------------------------------------------------------- */

static int inter_size(const struct layer *l) { return l->down.cols; }

/* The first row of a matrix with `rows` rows that lies on a node; cpu_experts_first_row for Python. */
static int first_row(int rows, int nodes, int node) {
    return node == nodes ? rows : (int)((int64_t)rows * node / nodes / ROWS * ROWS);
}

static int parts_of(const struct pool *p, int rows, int node, int chunk) {
    return (first_row(rows, p->num_nodes, node + 1) - first_row(rows, p->num_nodes, node) + chunk - 1) / chunk;
}

/* Sorts the pairs by expert, and divides the rows of both products into units that threads take: those of each node. */
static void divide(struct pool *p) {
    const struct request *q = &p->request;
    int all = q->tokens * q->top_k, count = 0;
    p->num_pairs = p->num_experts = 0;
    for (int i = 0; i < all; i++) {
        int e = q->ids[i], known = 0;
        for (int k = 0; e >= 0 && k < count && !known; k++) known = p->expert[k] == e;
        if (e >= 0 && !known) p->expert[count++] = e;
    }
    for (int k = 0; k < count; k++) {
        p->first[k] = p->num_pairs;
        for (int i = 0; i < all; i++)
            if (q->ids[i] == p->expert[k]) p->pair[p->num_pairs++] = i;
    }
    p->first[count] = p->num_pairs;
    p->num_experts = count;
    int rows[2] = {inter_size(q->layer), q->layer->down.rows}, parts[2] = {count, 1};
    for (int phase = 0; phase < 2; phase++) {
        int chunk = rows[phase] * parts[phase] / (8 * p->threads) / 16 * 16;
        p->chunk[phase] = chunk < 16 ? 16 : chunk > 64 ? 64 : chunk;
        for (int n = 0; n < p->num_nodes; n++) {
            p->units[phase][n] = count ? parts_of(p, rows[phase], n, p->chunk[phase]) * parts[phase] : 0;
            atomic_store_explicit(&p->taken[phase][n].next, 0, memory_order_relaxed);
        }
        atomic_store_explicit(&p->finished[phase], 0, memory_order_relaxed);
    }
}

/* Prepares rows of 16 bits for a product: row i is what `pair[i]` says, or row i of `rows`. */
static void prepare_rows(struct pool *p, int thread, const struct matrix *w, const uint16_t *rows, int num) {
    size_t bytes = (p->kernels->row_bytes(w) + 63) / 64 * 64;
    for (int i = 0; i < num; i++)
        p->kernels->prepare(w, rows + (size_t)i * (size_t)w->cols, p->prepared[thread] + (size_t)i * bytes);
}

static const void *prepared_row(struct pool *p, int thread, const struct matrix *w, int row) {
    return p->prepared[thread] + (size_t)row * ((p->kernels->row_bytes(w) + 63) / 64 * 64);
}

/* Gate, up and activation of `count` intermediate columns of one expert. */
static void first_unit(struct pool *p, int thread, int node, int unit) {
    const struct layer *l = p->request.layer;
    int size = inter_size(l), parts = parts_of(p, size, node, p->chunk[0]);
    int which = unit / parts, begin = first_row(size, p->num_nodes, node) + unit % parts * p->chunk[0];
    int end = first_row(size, p->num_nodes, node + 1);
    int count = begin + p->chunk[0] > end ? end - begin : p->chunk[0];
    float *gate = p->scratch[thread], *up = gate + PASS * 64;
    for (int i = p->first[which]; i < p->first[which + 1]; i += PASS) {
        int num = p->first[which + 1] - i < PASS ? p->first[which + 1] - i : PASS;
        const void *x[PASS];
        for (int m = 0; m < num; m++) x[m] = prepared_row(p, thread, &l->up, p->pair[i + m] / p->request.top_k);
        p->kernels->rows(&l->up, p->expert[which], begin, count, x, num, gate, 64);
        if (l->activation.gated) p->kernels->rows(&l->up, p->expert[which], size + begin, count, x, num, up, 64);
        for (int m = 0; m < num; m++)
            p->kernels->activate(&l->activation, gate + 64 * m, up + 64 * m, p->inter + (size_t)(i + m) * size + begin,
                                 count);
    }
}

/* Some columns of the output, of all experts. */
static void second_unit(struct pool *p, int thread, int node, int unit) {
    const struct request *q = &p->request;
    const struct layer *l = q->layer;
    int hidden = l->down.rows, begin = first_row(hidden, p->num_nodes, node) + unit * p->chunk[1];
    int end = first_row(hidden, p->num_nodes, node + 1);
    int count = begin + p->chunk[1] > end ? end - begin : p->chunk[1];
    float *part = p->scratch[thread];
    for (int t = 0; t < q->tokens; t++) memset(q->out + (size_t)t * hidden + begin, 0, (size_t)count * 4);
    for (int which = 0; which < p->num_experts; which++)
        for (int i = p->first[which]; i < p->first[which + 1]; i += PASS) {
            int num = p->first[which + 1] - i < PASS ? p->first[which + 1] - i : PASS;
            const void *x[PASS];
            for (int m = 0; m < num; m++) x[m] = prepared_row(p, thread, &l->down, i + m);
            p->kernels->rows(&l->down, p->expert[which], begin, count, x, num, part, 64);
            for (int m = 0; m < num; m++) {
                float weight = q->weights[p->pair[i + m]];
                float *out = q->out + (size_t)(p->pair[i + m] / q->top_k) * hidden + begin;
                for (int r = 0; r < count; r++) out[r] += weight * part[64 * m + r];
            }
        }
}

static void relax(long polls) {
    if (polls % 1024 == 1023) sched_yield();
    else __builtin_ia32_pause();
}

/* A thread's part of the request: units of its own node, then what others have left. */
static void work(struct pool *p, int thread) {
    const struct layer *l = p->request.layer;
    const struct matrix *of[2] = {&l->up, &l->down};
    for (int phase = 0; phase < 2; phase++) {
        int unit, some = 0, all = 0;
        for (int step = 0; step < p->num_nodes; step++) {
            int node = (p->node_of[thread] + step) % p->num_nodes;
            all += p->units[phase][node];
            while ((unit = atomic_fetch_add(&p->taken[phase][node].next, 1)) < p->units[phase][node]) {
                if (!some++) {
                    if (phase) prepare_rows(p, thread, of[1], p->inter, p->num_pairs);
                    else prepare_rows(p, thread, of[0], p->request.x, p->request.tokens);
                }
                if (phase) second_unit(p, thread, node, unit);
                else first_unit(p, thread, node, unit);
                atomic_fetch_add(&p->finished[phase], 1);
            }
        }
        for (long polls = 0; atomic_load(&p->finished[phase]) < all; polls++) relax(polls);
    }
}

static void run_request(struct pool *p) {
    uint64_t begin = now_ns();
    const struct layer *l = p->request.layer;
    divide(p);
    if (!p->num_experts) {
        memset(p->request.out, 0, (size_t)p->request.tokens * (size_t)l->down.rows * 4);
        return;
    }
    atomic_store(&p->working, p->threads - 1);
    atomic_fetch_add(&p->generation, 1);
    if (atomic_load(&p->sleepers)) {
        pthread_mutex_lock(&p->lock);
        pthread_cond_broadcast(&p->wake);
        pthread_mutex_unlock(&p->lock);
    }
    work(p, 0);
    for (long polls = 0; atomic_load(&p->working); polls++) relax(polls);
    uint64_t bytes = (uint64_t)p->num_experts * (uint64_t)(l->up.data_expert + l->down.data_expert +
                                                           l->up.scale_expert + l->down.scale_expert);
    uint64_t ns = now_ns() - begin;
    atomic_fetch_add(&p->steps, 1);
    atomic_fetch_add(&p->experts_done, (uint64_t)p->num_experts);
    atomic_fetch_add(&p->bytes_read, bytes);
    atomic_fetch_add(&p->busy_ns, ns);
}

/* --- threads ------------------------------------------------------------------------------------------------------ */

static void stay_on(int cpu) {
    if (cpu < 0) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

struct start {
    struct pool *pool;
    int thread;
};

static void *worker(void *argument) {
    struct start at = *(struct start *)argument;
    free(argument);
    struct pool *p = at.pool;
    stay_on(p->cpus[at.thread]);
    uint64_t seen = 0;
    for (;;) {
        long polls = 0;
        while (atomic_load(&p->generation) == seen && !atomic_load(&p->stopping)) {
            if (polls++ < POLLS) {
                relax(polls);
                continue;
            }
            pthread_mutex_lock(&p->lock);
            atomic_fetch_add(&p->sleepers, 1);
            while (atomic_load(&p->generation) == seen && !atomic_load(&p->stopping))
                pthread_cond_wait(&p->wake, &p->lock);
            atomic_fetch_sub(&p->sleepers, 1);
            pthread_mutex_unlock(&p->lock);
        }
        if (atomic_load(&p->stopping)) return NULL;
        seen++;
        work(p, at.thread);
        atomic_fetch_sub(&p->working, 1);
    }
}

/* Shares the missing experts so that copies of the GPU and products of the CPU take equally long. */
static void share(struct pool *p) {
    double ns = (double)atomic_load(&p->busy_ns), bytes = (double)atomic_load(&p->bytes_read);
    if (p->bus_rate <= 0 || ns <= 0) return;
    double cpu = bytes / ns * 1e9;
    atomic_store(&p->mailbox.header->fetched, (int32_t)(4096 * p->bus_rate / (p->bus_rate + cpu)));
    if (ns > 2e9) { /* the last seconds count */
        atomic_store(&p->busy_ns, (uint64_t)(ns / 2));
        atomic_store(&p->bytes_read, (uint64_t)(bytes / 2));
    }
}

static void *coordinate(void *argument) {
    struct pool *p = argument;
    struct header *h = p->mailbox.header;
    stay_on(p->cpus[0]);
    uint64_t last = now_ns();
    for (long polls = 0; !atomic_load(&p->stopping); polls++) {
        uint64_t number = atomic_load_explicit(&h->bell, memory_order_acquire);
        if (!number) {
            relax(polls);
            if (polls % 4096 == 4095 && now_ns() - last > IDLE_NS) {
                struct timespec pause = {0, PAUSE_NS};
                nanosleep(&pause, NULL);
                polls--; /* a sleep after every look, until it rings */
            }
            continue;
        }
        atomic_store(&h->bell, 0);
        last = now_ns();
        atomic_store(&p->busy_since, last);
        if (number > (uint64_t)p->num_layers || h->tokens > p->max_tokens || h->tokens * h->top_k > p->max_pairs) {
            fprintf(stderr, "CPU experts: a request of layer %lld with %d tokens cannot be\n", (long long)number - 1,
                    h->tokens);
            _exit(70);
        }
        if (h->tokens > 0) {
            struct mailbox *m = &p->mailbox;
            p->request = (struct request){&p->layers[number - 1], h->tokens, h->top_k, m->ids, m->weights, m->x, m->out};
            run_request(p);
            share(p);
        }
        atomic_store(&p->busy_since, 0);
        atomic_store_explicit(&h->done, number, memory_order_release);
        polls = 0;
    }
    return NULL;
}

static void *watch(void *argument) {
    struct pool *p = argument;
    struct timespec pause = {0, (long)(p->deadline * 1e9 / 8 > 1e8 ? 1e8 : p->deadline * 1e9 / 8)};
    uint64_t waiting_since = 0;
    while (!atomic_load(&p->stopping)) {
        nanosleep(&pause, NULL);
        uint64_t since = atomic_load(&p->busy_since), now = now_ns();
        if (!since && atomic_load(&p->mailbox.header->bell)) since = waiting_since ? waiting_since : now;
        waiting_since = atomic_load(&p->busy_since) ? 0 : since;
        if (since && (double)(now - since) > p->deadline * 1e9) {
            fprintf(stderr, "CPU experts: a step has waited for CPUs longer than %g s; the process ends\n", p->deadline);
            _exit(70);
        }
    }
    return NULL;
}

/* --- interface ---------------------------------------------------------------------------------------------------- */

static int has_avx512(void) {
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

static int has_avx2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

/* Returns the name of the kernels that this CPU runs, NULL if none. avx2: whether newer ones are left out. */
const char *cpu_experts_kernels(int avx2) {
    __builtin_cpu_init();
    return !avx2 && has_avx512() ? kernels_avx512.name : has_avx2() ? kernels_avx2.name : NULL;
}

static void *aligned(size_t bytes) {
    void *memory = NULL;
    if (posix_memalign(&memory, 64, (bytes + 4095) / 4096 * 4096)) abort();
    return memory;
}

/* Ends the threads and frees the pool. */
void cpu_experts_destroy(struct pool *p) {
    atomic_store(&p->stopping, 1);
    pthread_mutex_lock(&p->lock);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->lock);
    if (p->rung) pthread_join(p->coordinator, NULL), pthread_join(p->watchdog, NULL);
    for (int t = 1; t < p->threads; t++) pthread_join(p->workers[t], NULL);
    for (int t = 0; t < MAX_THREADS; t++) free(p->prepared[t]), free(p->scratch[t]);
    free(p->inter), free(p->pair), free(p->layers);
    pthread_mutex_destroy(&p->lock);
    pthread_cond_destroy(&p->wake);
    free(p);
}

/* Returns a pool of `threads`, the caller's among them; `cpus` of each, -1: any. Rows of all matrices lie on `nodes`
 * nodes, and each thread is on one (`node_of`). NULL if the CPU runs no kernels, or the system starts no more threads. */
struct pool *cpu_experts_create(int threads, const int *cpus, int nodes, const int *node_of, int max_tokens,
                                int max_pairs, int avx2) {
    if (threads < 1 || threads > MAX_THREADS || nodes < 1 || nodes > MAX_NODES || !cpu_experts_kernels(avx2)) return NULL;
    struct pool *p = aligned(sizeof *p);
    memset(p, 0, sizeof *p);
    p->kernels = !avx2 && has_avx512() ? &kernels_avx512 : &kernels_avx2;
    p->kernels->start();
    p->threads = threads, p->max_tokens = max_tokens, p->max_pairs = max_pairs;
    memcpy(p->cpus, cpus, (size_t)threads * sizeof *cpus);
    p->num_nodes = nodes;
    memcpy(p->node_of, node_of, (size_t)threads * sizeof *node_of);
    p->layers = aligned(MAX_LAYERS * sizeof *p->layers);
    p->pair = aligned((size_t)(max_pairs + 1) * 12);
    p->expert = p->pair + max_pairs + 1, p->first = p->expert + max_pairs + 1;
    for (int t = 0; t < threads; t++) p->scratch[t] = aligned(2 * PASS * 64 * 4);
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->wake, NULL);
    for (int t = 1; t < threads; t++) {
        struct start *at = malloc(sizeof *at);
        *at = (struct start){p, t};
        if (!pthread_create(&p->workers[t], NULL, worker, at)) continue;
        free(at);
        p->threads = t;
        cpu_experts_destroy(p);
        return NULL;
    }
    return p;
}

int cpu_experts_first_row(int rows, int nodes, int node) { return first_row(rows, nodes, node); }

/* Adds a layer and returns its number, -1 if there are too many. Not while a request is at work. */
int cpu_experts_add_layer(struct pool *p, const struct matrix *up, const struct matrix *down,
                          const struct activation *activation) {
    if (p->num_layers == MAX_LAYERS || groups_of(up) > MAX_GROUPS - 8 || groups_of(down) > MAX_GROUPS - 8) return -1;
    p->layers[p->num_layers] = (struct layer){*up, *down, *activation};
    size_t inter = (size_t)p->max_pairs * (size_t)down->cols * 2;
    size_t first = (p->kernels->row_bytes(up) + 63) / 64 * 64 * (size_t)p->max_tokens;
    size_t second = (p->kernels->row_bytes(down) + 63) / 64 * 64 * (size_t)p->max_pairs;
    size_t prepared = first > second ? first : second;
    if (inter > p->inter_bytes) {
        free(p->inter);
        p->inter = aligned(inter), p->inter_bytes = inter;
    }
    for (int t = 0; prepared > p->prepared_bytes && t < p->threads; t++) {
        free(p->prepared[t]);
        p->prepared[t] = aligned(prepared);
    }
    if (prepared > p->prepared_bytes) p->prepared_bytes = prepared;
    return p->num_layers++;
}

/* out [tokens, hidden] = the weighted sum of the experts of ids [tokens, top_k] (-1: none) of x [tokens, hidden]. */
int cpu_experts_run(struct pool *p, int layer, int tokens, int top_k, const int32_t *ids, const float *weights,
                    const uint16_t *x, float *out) {
    if (layer < 0 || layer >= p->num_layers || tokens > p->max_tokens || tokens * top_k > p->max_pairs) return 1;
    p->request = (struct request){&p->layers[layer], tokens, top_k, ids, weights, x, out};
    run_request(p);
    return 0;
}

/* Answers requests that come by the doorbell from now on. bus_rate: bytes a second at which the GPU copies experts;
 * 0: the share stays. A request that takes longer than `deadline` seconds ends the process. Returns 0, or -1 if the
 * system starts no more threads. */
int cpu_experts_connect(struct pool *p, const struct mailbox *mailbox, double deadline, double bus_rate) {
    p->mailbox = *mailbox, p->deadline = deadline, p->bus_rate = bus_rate;
    if (pthread_create(&p->coordinator, NULL, coordinate, p)) return -1;
    if (pthread_create(&p->watchdog, NULL, watch, p)) {
        atomic_store(&p->stopping, 1);
        pthread_join(p->coordinator, NULL);
        return -1;
    }
    p->rung = 1;
    return 0;
}

void cpu_experts_totals(struct pool *p, uint64_t totals[4]) {
    totals[0] = atomic_load(&p->steps), totals[1] = atomic_load(&p->experts_done);
    totals[2] = atomic_load(&p->bytes_read), totals[3] = atomic_load(&p->busy_ns);
}

/* Sizes of what Python passes, to check that both sides agree. */
void cpu_experts_sizes(int32_t sizes[4]) {
    sizes[0] = sizeof(struct matrix), sizes[1] = sizeof(struct activation);
    sizes[2] = sizeof(struct header), sizes[3] = sizeof(struct mailbox);
}
