/* A GPU that computes nothing: NVIDIA's driver, its management library, the CUDA runtime and cuBLAS, as far as torch,
 * Triton and vLLM call them. Device memory is host memory with an account, and a launched kernel does nothing.
 *
 * The environment describes the card: CEPO_DRY_CARD=name|major|minor|bytes of memory|bytes of shared memory per block
 * (opt-in)|multiprocessors|number of devices. One library serves as libcuda.so.1, as libnvidia-ml.so.1 and, preloaded,
 * in place of the functions of libcudart.so and libcublas.so that torch calls. Other functions of these two fail as on
 * a machine without a driver.
 */
#pragma once
#include <stddef.h>

#include <cuda.h>
#include <cuda_runtime_api.h>

/* Functions of many names that succeed, or that fail, whatever their arguments. */
#define SUCCEEDS(name) __asm__(".globl " #name "\n.type " #name ", @function\n.set " #name ", hollow_success")
#define FAILS(name) __asm__(".globl " #name "\n.type " #name ", @function\n.set " #name ", hollow_failure")

__attribute__((used)) static int hollow_success(void) { return 0; }
__attribute__((used)) static int hollow_failure(void) { return CUDA_ERROR_NOT_SUPPORTED; }

struct card {
    char name[96];
    int major, minor;
    size_t memory, shared;
    int processors, count;
};
extern struct card card;
