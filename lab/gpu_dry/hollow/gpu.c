/* The card, its driver, the management library and the CUDA runtime without memory (memory.c) and graphs (graphs.c). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hollow.h"

#define SHARED_BY_DEFAULT 49152
#define SHARED_FOR_THE_SYSTEM 1024

struct card card;

__attribute__((constructor)) static void read_card(void) {
    const char *text = getenv("CEPO_DRY_CARD");
    if (text != NULL && sscanf(text, "%95[^|]|%d|%d|%zu|%zu|%d|%d", card.name, &card.major, &card.minor, &card.memory,
                               &card.shared, &card.processors, &card.count) != 7) {
        fprintf(stderr, "CEPO_DRY_CARD is '%s'; wanted: name|major|minor|memory|shared|processors|devices\n", text);
        exit(2);
    }
}

/* The runtime's numbers of attributes are the driver's. */
static int attribute(int which) {
    switch (which) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 0x7fffffff;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return SHARED_BY_DEFAULT;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return (int)card.shared;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return (int)card.shared + SHARED_FOR_THE_SYSTEM;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: return SHARED_FOR_THE_SYSTEM;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return card.major == 12 ? 1536 : 2048;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return card.processors;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return card.major;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return card.minor;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return 1500000;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return 512;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: return 1;
    default: return 0;
    }
}

/* The driver, which Triton's helper and vLLM's libraries call. */

SUCCEEDS(cuInit);
SUCCEEDS(cuCtxSetCurrent);
SUCCEEDS(cuCtxSetLimit);
SUCCEEDS(cuModuleUnload);
SUCCEEDS(cuFuncSetAttribute);
SUCCEEDS(cuFuncSetCacheConfig);
SUCCEEDS(cuLaunchKernel);
SUCCEEDS(cuLaunchKernelEx);
FAILS(cuGetExportTable);
FAILS(cuOccupancyMaxActiveClusters);
SUCCEEDS(cuTensorMapEncodeIm2col);
SUCCEEDS(cuTensorMapEncodeTiled);

/* The function of a name in this library. If the driver has several versions of it, the hollow GPU has one of them. */
CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status) {
    static const char *const endings[] = {"_v2", ""};
    Dl_info place;
    dladdr((void *)cuGetProcAddress_v2, &place);
    void *library = dlopen(place.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    *function = NULL;
    for (size_t i = 0; i < sizeof endings / sizeof *endings && *function == NULL; i++) {
        char versioned[128];
        snprintf(versioned, sizeof versioned, "%s%s", name, endings[i]);
        *function = dlsym(library, versioned);
    }
    int is_missing = *function == NULL;
    if (status != NULL) *status = is_missing ? CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND : CU_GET_PROC_ADDRESS_SUCCESS;
    return is_missing ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { return *count = card.count, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int number) {
    return *device = number, number < card.count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
    return *value = attribute((int)which), CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *found, CUdevice device) { return *found = (CUcontext)&card, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    return *flags = 0, *active = 1, CUDA_SUCCESS;
}
CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device) {
    return *context = (CUcontext)&card, CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *found) { return *found = (CUcontext)&card, CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return *value = 0, CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *module, const void *image) { return *module = (CUmodule)&card, CUDA_SUCCESS; }
CUresult cuModuleLoad(CUmodule *module, const char *path) { return *module = (CUmodule)&card, CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    return *function = (CUfunction)&card, CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function) {
    return *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0, CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
    return *text = error == CUDA_SUCCESS ? "no error" : "the hollow GPU cannot do this", CUDA_SUCCESS;
}

/* The management library, which tells vLLM its platform. */

SUCCEEDS(nvmlInit_v2);
SUCCEEDS(nvmlInitWithFlags);
SUCCEEDS(nvmlShutdown);

FAILS(nvmlDeviceGetNvLinkRemoteDeviceType);
FAILS(nvmlDeviceGetNvLinkRemotePciInfo_v2);

const char *nvmlErrorString(int code) { return "the hollow GPU cannot do this"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { return snprintf(text, size, "580.82.07"), 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = 13000, 0; }
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes) { return *count = 0, 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) { return *device = &card, 0; }
/* After its version: the cluster's 16 bytes, two numbers, and the state, of which 0 means that there is no fabric. */
int nvmlDeviceGetGpuFabricInfoV(void *device, char *found) { return memset(found + 4, 0, 16 + 2 * 4 + 1), 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { return *count = (unsigned)card.count, 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    return *device = (char *)&card + index, index < (unsigned)card.count ? 0 : 2;
}
int nvmlDeviceGetName(void *device, char *name, unsigned size) { return snprintf(name, size, "%s", card.name), 0; }
int nvmlDeviceGetUUID(void *device, char *text, unsigned size) {
    return snprintf(text, size, "GPU-00000000-0000-0000-0000-%012d", (int)((char *)device - (char *)&card) + 1), 0;
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    return *major = card.major, *minor = card.minor, 0;
}
int nvmlDeviceGetP2PStatus(void *one, void *other, int index, int *status) { return *status = 0, 0; }

/* The runtime, as torch calls it. */

SUCCEEDS(cudaGetLastError);
SUCCEEDS(cudaPeekAtLastError);
SUCCEEDS(cudaDeviceSynchronize);
SUCCEEDS(cudaLaunchKernel);
SUCCEEDS(cudaLaunchKernelExC);
SUCCEEDS(cudaThreadExchangeStreamCaptureMode);
SUCCEEDS(cudaStreamSynchronize);
SUCCEEDS(cudaStreamQuery);
SUCCEEDS(cudaStreamWaitEvent);
SUCCEEDS(cudaStreamDestroy);
SUCCEEDS(cudaDeviceSetLimit);
SUCCEEDS(cudaProfilerStart);
SUCCEEDS(cudaProfilerStop);
SUCCEEDS(cudaEventRecord);
SUCCEEDS(cudaEventRecordWithFlags);
SUCCEEDS(cudaEventQuery);
SUCCEEDS(cudaEventSynchronize);

static __thread int current;

cudaError_t cudaGetDeviceCount(int *count) { return *count = card.count, cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { return *device = current, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
    return device < card.count ? (current = device, cudaSuccess) : cudaErrorInvalidDevice;
}
cudaError_t cudaDriverGetVersion(int *version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) {
    return *value = attribute((int)which), cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { return *can = 0, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    memset(found, 0, sizeof *found);
    snprintf(found->name, sizeof found->name, "%s", card.name);
    found->uuid.bytes[15] = (char)(device + 1);
    found->totalGlobalMem = card.memory;
    found->sharedMemPerBlock = SHARED_BY_DEFAULT;
    found->sharedMemPerBlockOptin = card.shared;
    found->sharedMemPerMultiprocessor = card.shared + SHARED_FOR_THE_SYSTEM;
    found->reservedSharedMemPerBlock = SHARED_FOR_THE_SYSTEM;
    found->regsPerBlock = found->regsPerMultiprocessor = 65536;
    found->warpSize = 32;
    found->maxThreadsPerBlock = 1024;
    found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024, found->maxThreadsDim[2] = 64;
    found->maxGridSize[0] = 0x7fffffff, found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    found->maxThreadsPerMultiProcessor = attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR);
    found->maxBlocksPerMultiProcessor = 32;
    found->major = card.major, found->minor = card.minor;
    found->multiProcessorCount = card.processors;
    found->l2CacheSize = 50 << 20;
    found->unifiedAddressing = found->cooperativeLaunch = found->streamPrioritiesSupported = 1;
    return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *status) {
    void *found = dlsym(RTLD_DEFAULT, symbol);
    *function = found != NULL ? found : (void *)hollow_failure;
    if (status != NULL) *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
/* A kernel may not be given more shared memory than the card has. */
cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute which, int value) {
    int is_too_large = which == cudaFuncAttributeMaxDynamicSharedMemorySize && value > (int)card.shared;
    return is_too_large ? cudaErrorInvalidValue : cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *function) {
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024;
    /* torch has no code for 8.9, so such a card runs that for 8.6; CUB looks for exactly the version of the code. */
    int version = card.major * 10 + card.minor;
    found->binaryVersion = found->ptxVersion = version == 89 ? 86 : version;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int size,
                                                                   size_t shared, unsigned flags) {
    return *blocks = 1, cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    return *least = 0, *greatest = -5, cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return *stream = (cudaStream_t)calloc(1, 8), cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    return *stream = (cudaStream_t)calloc(1, 8), cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { return *priority = 0, cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t *event) { return *event = (cudaEvent_t)calloc(1, 8), cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    return *event = (cudaEvent_t)calloc(1, 8), cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    return *milliseconds = 1, cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { return free(event), cudaSuccess; }
