/* Memory of the GPU at addresses that stay: torch's allocator gets its segments here, by tag, and their memory is given
 * back and taken again while torch, and captured graphs, keep the addresses (CUDA's virtual memory management).
 *
 * The driver is opened by name and its types are declared here, so that neither CUDA's headers nor its libraries are
 * needed to compile this. Every call returns CUDA's code, 0 on success. */
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/types.h>

enum { TAGS = 3, PINNED = 1, DEVICE = 1, READ_AND_WRITE = 3, RELAXED = 2, NO_DRIVER = 3, OUT_OF_HOST_MEMORY = 2 };
enum state { FREE, MAPPED, UNMAPPED, PRUNED };

struct location { int type, id; };
struct properties {
    int type, handle_types;
    struct location location;
    void *windows_handle;
    struct { unsigned char compression, rdma; unsigned short usage; unsigned char reserved[4]; } flags;
};
struct access { struct location location; int flags; };

static struct {
    int (*granularity)(size_t *, const struct properties *, int);
    int (*reserve)(uint64_t *, size_t, size_t, uint64_t, unsigned long long);
    int (*free_address)(uint64_t, size_t);
    int (*create)(uint64_t *, size_t, const struct properties *, unsigned long long);
    int (*release)(uint64_t);
    int (*map)(uint64_t, size_t, size_t, uint64_t, unsigned long long);
    int (*unmap)(uint64_t, size_t);
    int (*set_access)(uint64_t, size_t, const struct access *, size_t);
    int (*capture_mode)(int *);
} cuda;

struct segment { uint64_t address, size, handle; int device; enum state state; };
static struct { struct segment *items; int count, room; } segments[TAGS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int last_error;

int arena_open(const char *driver) {
    void *library = dlopen(driver, RTLD_NOW | RTLD_GLOBAL);
    if (!library) return NO_DRIVER;
    struct { const char *name; void *place; } symbols[] = {
        {"cuMemGetAllocationGranularity", &cuda.granularity}, {"cuMemAddressReserve", &cuda.reserve},
        {"cuMemAddressFree", &cuda.free_address}, {"cuMemCreate", &cuda.create}, {"cuMemRelease", &cuda.release},
        {"cuMemMap", &cuda.map}, {"cuMemUnmap", &cuda.unmap}, {"cuMemSetAccess", &cuda.set_access},
        {"cuThreadExchangeStreamCaptureMode", &cuda.capture_mode},
    };
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        void *symbol = dlsym(library, symbols[i].name);
        if (!symbol) return NO_DRIVER;
        *(void **)symbols[i].place = symbol;
    }
    return 0;
}

static struct properties properties_on(int device) {
    struct properties of = {0};
    of.type = PINNED;
    of.location.type = DEVICE;
    of.location.id = device;
    return of;
}

/* Gives a segment memory. On failure it has none. */
static int map_segment(struct segment *segment) {
    struct properties of = properties_on(segment->device);
    int error = cuda.create(&segment->handle, segment->size, &of, 0);
    if (error) return error;
    error = cuda.map(segment->address, segment->size, 0, segment->handle, 0);
    if (!error) {
        struct access access = {{DEVICE, segment->device}, READ_AND_WRITE};
        error = cuda.set_access(segment->address, segment->size, &access, 1);
        if (error) cuda.unmap(segment->address, segment->size);
    }
    if (error) cuda.release(segment->handle);
    else segment->state = MAPPED;
    return error;
}

static int unmap_segment(struct segment *segment, enum state state) {
    int error = cuda.unmap(segment->address, segment->size);
    if (!error) error = cuda.release(segment->handle);
    if (!error) segment->state = state;
    return error;
}

static void *allocate(int tag, ssize_t wanted, int device) {
    struct properties of = properties_on(device);
    struct segment new = {0};
    size_t granularity = 0;
    int mode = RELAXED; /* torch allocates here within captures of graphs, too */
    if (wanted <= 0 || !cuda.create) return NULL;
    pthread_mutex_lock(&lock);
    cuda.capture_mode(&mode);
    int error = 0;
    if (segments[tag].count == segments[tag].room) {
        int room = segments[tag].room ? 2 * segments[tag].room : 64;
        struct segment *items = realloc(segments[tag].items, room * sizeof *items);
        if (items) segments[tag].items = items, segments[tag].room = room;
        else error = OUT_OF_HOST_MEMORY;
    }
    if (!error) error = cuda.granularity(&granularity, &of, 0);
    if (!error) {
        new.device = device;
        new.size = ((uint64_t)wanted + granularity - 1) / granularity * granularity;
        error = cuda.reserve(&new.address, new.size, 0, 0, 0);
    }
    if (!error && (error = map_segment(&new))) cuda.free_address(new.address, new.size);
    if (!error) segments[tag].items[segments[tag].count++] = new;
    else last_error = error;
    cuda.capture_mode(&mode);
    pthread_mutex_unlock(&lock);
    return error ? NULL : (void *)(uintptr_t)new.address;
}

void *arena_allocate_0(ssize_t size, int device, void *stream) { (void)stream; return allocate(0, size, device); }
void *arena_allocate_1(ssize_t size, int device, void *stream) { (void)stream; return allocate(1, size, device); }
void *arena_allocate_2(ssize_t size, int device, void *stream) { (void)stream; return allocate(2, size, device); }

void arena_free(void *address, ssize_t size, int device, void *stream) {
    int mode = RELAXED;
    (void)size, (void)device, (void)stream;
    pthread_mutex_lock(&lock);
    cuda.capture_mode(&mode);
    for (int tag = 0; tag < TAGS; tag++)
        for (int i = 0; i < segments[tag].count; i++) {
            struct segment *segment = &segments[tag].items[i];
            if (segment->state == FREE || segment->address != (uintptr_t)address) continue;
            if (segment->state == MAPPED) unmap_segment(segment, FREE);
            cuda.free_address(segment->address, segment->size);
            segment->state = FREE;
        }
    cuda.capture_mode(&mode);
    pthread_mutex_unlock(&lock);
}

int arena_count(int tag) { return segments[tag].count; }
int arena_last_error(void) { return last_error; }

/* Tells a segment's address, size and state. */
void arena_segment(int tag, int index, uint64_t *out) {
    pthread_mutex_lock(&lock);
    struct segment *segment = &segments[tag].items[index];
    out[0] = segment->address, out[1] = segment->size, out[2] = segment->state;
    pthread_mutex_unlock(&lock);
}

/* Gives the memory of a segment back for good that holds nothing; its address stays taken, because torch has it. */
int arena_prune(int tag, uint64_t address) {
    int error = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < segments[tag].count && !error; i++) {
        struct segment *segment = &segments[tag].items[i];
        if (segment->address == address && segment->state == MAPPED) error = unmap_segment(segment, PRUNED);
    }
    pthread_mutex_unlock(&lock);
    return error;
}

int arena_unmap(int tag) {
    int error = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < segments[tag].count && !error; i++)
        if (segments[tag].items[i].state == MAPPED) error = unmap_segment(&segments[tag].items[i], UNMAPPED);
    pthread_mutex_unlock(&lock);
    return error;
}

/* Gives every segment of a tag memory again, or none of them. */
int arena_map(int tag) {
    int error = 0, i = 0;
    pthread_mutex_lock(&lock);
    for (; i < segments[tag].count && !error; i++)
        if (segments[tag].items[i].state == UNMAPPED) error = map_segment(&segments[tag].items[i]);
    if (error)
        while (i--)
            if (segments[tag].items[i].state == MAPPED) unmap_segment(&segments[tag].items[i], UNMAPPED);
    pthread_mutex_unlock(&lock);
    return error;
}
