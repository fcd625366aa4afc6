/* Memory of the device, with an account: an allocation beyond the card's memory fails, as on a card.
 *
 * All device memory is in one range of addresses, and all pinned memory in another. An address is used once. Pages get
 * memory when they are written, so a model that nobody fills takes none. Memory that is freed, or whose mapping has been
 * taken away (that of an engine that sleeps), may not be touched: SIGSEGV.
 *
 * CEPO_DRY_LARGEST_COPY=bytes: larger copies only touch their first and last bytes.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "hollow.h"

#define RANGE_BYTES (1UL << 43)
#define PAGE_BYTES (1UL << 21)
#define CONTEXT_BYTES (500UL << 20)
#define MOST_BLOCKS (1 << 16)

struct range {
    char *begin;
    size_t used;
};
struct block {
    void *pointer;
    size_t bytes;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct range device_range, pinned_range;
static struct block blocks[MOST_BLOCKS];
static size_t bytes_in_use = CONTEXT_BYTES;
static size_t largest_copy = SIZE_MAX;

__attribute__((constructor)) static void read_largest_copy(void) {
    const char *text = getenv("CEPO_DRY_LARGEST_COPY");
    if (text != NULL) largest_copy = strtoull(text, NULL, 10);
}

static size_t whole_pages(size_t bytes) { return bytes == 0 ? PAGE_BYTES : (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES; }

static int is_in(const struct range *range, const void *pointer) {
    return range->begin != NULL && (const char *)pointer >= range->begin && (const char *)pointer < range->begin + range->used;
}

static void *mapped(void *at, size_t bytes, int protection) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at == NULL ? 0 : MAP_FIXED);
    void *found = mmap(at, bytes, protection, flags, -1, 0);
    return found == MAP_FAILED ? NULL : found;
}

/* Addresses without memory; NULL if the range is exhausted. The range is mapped at its first use, because a process that
 * uses no GPU may have a limit on its address space. */
static void *reserve(struct range *range, size_t bytes) {
    pthread_mutex_lock(&lock);
    if (range->begin == NULL) {
        char *begin = mapped(NULL, RANGE_BYTES + PAGE_BYTES, PROT_NONE);
        range->begin = (char *)(((uintptr_t)begin + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES);
    }
    void *pointer = range->used + bytes <= RANGE_BYTES ? range->begin + range->used : NULL;
    range->used += bytes;
    pthread_mutex_unlock(&lock);
    return pointer;
}

static int take(size_t bytes) {
    pthread_mutex_lock(&lock);
    int fits = bytes_in_use + bytes <= card.memory;
    if (fits) bytes_in_use += bytes;
    pthread_mutex_unlock(&lock);
    return fits;
}

static void give_back(size_t bytes) {
    pthread_mutex_lock(&lock);
    bytes_in_use -= bytes;
    pthread_mutex_unlock(&lock);
}

static void note_block(void *pointer, size_t bytes) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST_BLOCKS; i++) {
        if (blocks[i].pointer != NULL) continue;
        blocks[i] = (struct block){pointer, bytes};
        break;
    }
    pthread_mutex_unlock(&lock);
}

/* The bytes of a block that is then forgotten; 0 if there is none. */
static size_t forget_block(const void *pointer) {
    size_t bytes = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST_BLOCKS && bytes == 0; i++) {
        if (blocks[i].pointer != pointer) continue;
        bytes = blocks[i].bytes;
        blocks[i].pointer = NULL;
    }
    pthread_mutex_unlock(&lock);
    return bytes;
}

/* Blocks of the runtime. */

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    *available = card.memory - bytes_in_use;
    *total = card.memory;
    return cudaSuccess;
}
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *found) {
    found[0] = card.memory;
    found[1] = card.memory - bytes_in_use;
    found[2] = bytes_in_use;
    return 0;
}
cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    size_t size = whole_pages(bytes);
    if (!take(size)) return cudaErrorMemoryAllocation;
    void *found = reserve(&device_range, size);
    if (found == NULL || mapped(found, size, PROT_READ | PROT_WRITE) == NULL) {
        give_back(size);
        return cudaErrorMemoryAllocation;
    }
    note_block(found, size);
    *pointer = found;
    return cudaSuccess;
}
cudaError_t cudaFree(void *pointer) {
    size_t bytes = pointer == NULL ? 0 : forget_block(pointer);
    if (bytes == 0) return cudaSuccess;
    mapped(pointer, bytes, PROT_NONE);
    give_back(bytes);
    return cudaSuccess;
}

/* FSDP and vLLM behave differently with memory that does not say that it is pinned. */
cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    size_t size = whole_pages(bytes);
    void *found = reserve(&pinned_range, size);
    if (found == NULL || mapped(found, size, PROT_READ | PROT_WRITE) == NULL) return cudaErrorMemoryAllocation;
    note_block(found, size);
    *pointer = found;
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void *pointer) {
    size_t bytes = pointer == NULL ? 0 : forget_block(pointer);
    if (bytes > 0) mapped(pointer, bytes, PROT_NONE);
    return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void **found, void *host, unsigned flags) { return *found = host, cudaSuccess; }
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *found, void *host, unsigned flags) {
    return *found = (CUdeviceptr)host, CUDA_SUCCESS;
}
SUCCEEDS(cudaHostRegister);
SUCCEEDS(cudaHostUnregister);

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *pointer) {
    memset(found, 0, sizeof *found);
    found->type = cudaMemoryTypeUnregistered;
    if (is_in(&device_range, pointer)) found->type = cudaMemoryTypeDevice;
    if (is_in(&pinned_range, pointer)) {
        found->type = cudaMemoryTypeHost;
        found->hostPointer = (void *)pointer;
    }
    found->devicePointer = (void *)pointer;
    return cudaSuccess;
}
CUresult cuPointerGetAttribute(void *found, CUpointer_attribute which, CUdeviceptr pointer) {
    if (which == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) {
        *(int *)found = 0;
    } else {
        *(CUdeviceptr *)found = pointer;
    }
    return CUDA_SUCCESS;
}

/* The driver's virtual memory, of torch's growing segments and of vLLM's allocator for engines that sleep. A handle is the
 * number of bytes that it stands for, of which only the size matters. */

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *kind,
                                       CUmemAllocationGranularity_flags which) {
    return *bytes = PAGE_BYTES, CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t bytes, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags) {
    void *found = reserve(&device_range, whole_pages(bytes));
    if (found == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
    *pointer = (CUdeviceptr)found;
    return CUDA_SUCCESS;
}
SUCCEEDS(cuMemAddressFree);
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *kind,
                     unsigned long long flags) {
    if (!take(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = bytes;
    return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { return give_back(handle), CUDA_SUCCESS; }
CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    return mapped((void *)pointer, bytes, PROT_READ | PROT_WRITE) == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes) {
    return mapped((void *)pointer, bytes, PROT_NONE) == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
SUCCEEDS(cuMemSetAccess);
FAILS(cuMemExportToShareableHandle);
FAILS(cuMemImportFromShareableHandle);
FAILS(cuMemGetAllocationPropertiesFromHandle);
FAILS(cuMemGetAddressRange);
FAILS(cuMemRetainAllocationHandle);
FAILS(cuMulticastAddDevice);
FAILS(cuMulticastBindMem);
FAILS(cuMulticastCreate);
FAILS(cuMulticastUnbind);

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    return *pool = (cudaMemPool_t)&card, cudaSuccess;
}
SUCCEEDS(cudaMemPoolSetAttribute);
SUCCEEDS(cudaMemPoolTrimTo);

/* Copies. */

static cudaError_t copy(void *to, const void *from, size_t bytes) {
    if (bytes <= largest_copy) {
        memcpy(to, from, bytes);
        return cudaSuccess;
    }
    ((volatile char *)to)[0] = ((const volatile char *)from)[0];
    ((volatile char *)to)[bytes - 1] = ((const volatile char *)from)[bytes - 1];
    return cudaSuccess;
}
static cudaError_t fill(void *pointer, int value, size_t bytes) {
    if (bytes <= largest_copy) {
        memset(pointer, value, bytes);
    } else {
        ((volatile char *)pointer)[0] = ((volatile char *)pointer)[bytes - 1] = (char)value;
    }
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) { return copy(to, from, bytes); }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return copy(to, from, bytes);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t stream) {
    for (size_t row = 0; row < height; row++) copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return cudaSuccess;
}
cudaError_t cudaMemset(void *pointer, int value, size_t bytes) { return fill(pointer, value, bytes); }
cudaError_t cudaMemsetAsync(void *pointer, int value, size_t bytes, cudaStream_t stream) {
    return fill(pointer, value, bytes);
}
