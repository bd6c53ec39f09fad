/* CUDA's virtual memory management over the main memory of a process: handles are files in memory, and what is not
 * mapped cannot be read. It has as much memory as a test allows it. */
#define _GNU_SOURCE
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

enum { GRANULARITY = 2 << 20, OUT_OF_MEMORY = 2, INVALID = 1, MANY = 4096 };

static uint64_t sizes[MANY], used, limit = ~0ull;
static int captures_relaxed;

void fake_limit(uint64_t bytes) { limit = bytes; }
uint64_t fake_used(void) { return used; }
int fake_mode(void) { return captures_relaxed; }

int cuMemGetAllocationGranularity(size_t *out, const void *of, int option) {
    (void)of, (void)option;
    *out = GRANULARITY;
    return 0;
}
int cuMemAddressReserve(uint64_t *out, size_t size, size_t alignment, uint64_t at, unsigned long long flags) {
    (void)alignment, (void)at, (void)flags;
    void *address = mmap(0, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *out = (uint64_t)(uintptr_t)address;
    return address == MAP_FAILED ? OUT_OF_MEMORY : 0;
}
int cuMemAddressFree(uint64_t address, size_t size) { return munmap((void *)(uintptr_t)address, size) ? INVALID : 0; }
int cuMemCreate(uint64_t *out, size_t size, const void *of, unsigned long long flags) {
    (void)of, (void)flags;
    if (used + size > limit || size % GRANULARITY) return OUT_OF_MEMORY;
    int file = memfd_create("segment", 0);
    if (file < 0 || file >= MANY || ftruncate(file, size)) return OUT_OF_MEMORY;
    sizes[file] = size, used += size, *out = file;
    return 0;
}
int cuMemRelease(uint64_t handle) {
    used -= sizes[handle];
    return close(handle) ? INVALID : 0;
}
int cuMemMap(uint64_t address, size_t size, size_t offset, uint64_t handle, unsigned long long flags) {
    (void)flags;
    void *at = mmap((void *)(uintptr_t)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, handle, offset);
    return at == MAP_FAILED ? INVALID : 0;
}
int cuMemUnmap(uint64_t address, size_t size) {
    void *at = mmap((void *)(uintptr_t)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    return at == MAP_FAILED ? INVALID : 0;
}
int cuMemSetAccess(uint64_t address, size_t size, const int *access, size_t count) {
    if (count != 1 || access[0] != 1 || access[2] != 3) return INVALID;
    return mprotect((void *)(uintptr_t)address, size, PROT_READ | PROT_WRITE) ? INVALID : 0;
}
int cuThreadExchangeStreamCaptureMode(int *mode) {
    int before = captures_relaxed ? 2 : 0;
    captures_relaxed = *mode == 2;
    *mode = before;
    return 0;
}
