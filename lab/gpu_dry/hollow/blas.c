/* cuBLAS, which computes nothing: products keep whatever their output's memory holds. */
#include <stdlib.h>

#include "hollow.h"

#define HANDLE_BYTES 4096
#define VERSION 130000

int cublasCreate_v2(void **handle) { return *handle = calloc(1, HANDLE_BYTES), 0; }
int cublasLtCreate(void **handle) { return *handle = calloc(1, HANDLE_BYTES), 0; }
int cublasGetMathMode(void *handle, int *mode) { return *mode = 0, 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { return *mode = 0, 0; }
int cublasGetVersion_v2(void *handle, int *version) { return *version = VERSION, 0; }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, void *found, int *count) {
    return *count = 1, 0;
}
SUCCEEDS(cublasDestroy_v2);
SUCCEEDS(cublasSetStream_v2);
SUCCEEDS(cublasSetWorkspace_v2);
SUCCEEDS(cublasSetMathMode);
SUCCEEDS(cublasSetPointerMode_v2);
SUCCEEDS(cublasSetAtomicsMode);
SUCCEEDS(cublasGemmEx);
SUCCEEDS(cublasGemmEx_64);
SUCCEEDS(cublasGemmBatchedEx);
SUCCEEDS(cublasGemmStridedBatchedEx);
SUCCEEDS(cublasGemmStridedBatchedEx_64);
SUCCEEDS(cublasSgemm_v2);
SUCCEEDS(cublasSgemm_v2_64);
SUCCEEDS(cublasSgemmStridedBatched);
SUCCEEDS(cublasSgemmStridedBatched_64);
SUCCEEDS(cublasDgemm_v2);
SUCCEEDS(cublasSgemv_v2);
SUCCEEDS(cublasSdot_v2);
SUCCEEDS(cublasLtDestroy);
SUCCEEDS(cublasLtMatmul);
