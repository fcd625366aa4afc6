/* The CUDA runtime that NVIDIA's CuTe compiler, and so FlashAttention 4, contains.
 *
 * libcute_dsl_runtime.so has a CUDA runtime of its own inside, which asks the driver for tables that are not documented.
 * Compiled host code calls it by names with an underscore in front, and looks them up in the libraries of CUTE_DSL_LIBS in
 * their order: with this library first, it finds the functions below, which the hollow runtime (gpu.c) has too. Those that
 * are not below fail as on a machine without a driver.
 */
#include "hollow.h"

#define SUCCEEDS_BESIDE(name) __asm__(".globl _" #name "\n.type _" #name ", @function\n.set _" #name ", hollow_success")

cudaError_t _cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute which, int value) {
    return cudaFuncSetAttribute(function, which, value);
}
cudaError_t _cudaKernelSetAttributeForDevice(cudaKernel_t kernel, enum cudaFuncAttribute which, int value, int device) {
    return cudaFuncSetAttribute((const void *)kernel, which, value);
}

cudaError_t _cudaLibraryLoadData(cudaLibrary_t *library, const void *code, enum cudaJitOption *jit_options,
                                 void **jit_values, unsigned num_jit_options, enum cudaLibraryOption *options,
                                 void **values, unsigned num_options) {
    return *library = (cudaLibrary_t)&card, cudaSuccess;
}
cudaError_t _cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name) {
    return *kernel = (cudaKernel_t)&card, cudaSuccess;
}
CUresult _cuKernelGetAttribute(int *value, CUfunction_attribute which, CUkernel kernel, CUdevice device) {
    return cuFuncGetAttribute(value, which, (CUfunction)kernel);
}
SUCCEEDS_BESIDE(cudaLibraryUnload);
SUCCEEDS_BESIDE(cudaLaunchKernel);
SUCCEEDS_BESIDE(cudaLaunchKernelEx);
SUCCEEDS_BESIDE(cuTensorMapEncodeTiled);

cudaError_t _cudaGetDevice(int *device) { return cudaGetDevice(device); }
cudaError_t _cudaSetDevice(int device) { return cudaSetDevice(device); }
cudaError_t _cudaGetDeviceCount(int *count) { return cudaGetDeviceCount(count); }
cudaError_t _cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) {
    return cudaDeviceGetAttribute(value, which, device);
}
CUresult _cuDeviceGet(CUdevice *device, int number) { return cuDeviceGet(device, number); }

/* Loads a library at its first use, and prepares it for each device. The arguments follow the calls of compiled code. */
int cuda_dialect_init_library_once(void **library, int (*load)(void **), int (*prepare)(void **, int), void *context) {
    if (*library != NULL) return cudaSuccess;
    void *loaded = NULL;
    int error = load(&loaded);
    for (int device = 0; error == cudaSuccess && prepare != NULL && device < card.count; device++) {
        error = prepare(&loaded, device);
    }
    if (error == cudaSuccess) *library = loaded;
    return error;
}
int cuda_dialect_unload_library_once(void **library) { return *library = NULL, cudaSuccess; }
