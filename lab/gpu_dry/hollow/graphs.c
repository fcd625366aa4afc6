/* CUDA graphs: capturing and replaying do nothing, but the runtime says of a stream that it is being captured. */
#include <stdlib.h>

#include "hollow.h"

static __thread enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    return capture = cudaStreamCaptureStatusActive, cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    capture = cudaStreamCaptureStatusNone;
    *graph = (cudaGraph_t)calloc(1, 8);
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    return *status = capture, cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
    *status = capture;
    if (id != NULL) *id = 1;
    if (graph != NULL) *graph = (cudaGraph_t)&card;
    if (nodes != NULL) *nodes = NULL;
    if (edges != NULL) *edges = NULL;
    if (count != NULL) *count = 0;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
    return *executable = (cudaGraphExec_t)calloc(1, 8), cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiate(executable, graph, flags);
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) { return *count = 1, cudaSuccess; }
SUCCEEDS(cudaGraphLaunch);
SUCCEEDS(cudaGraphUpload);
SUCCEEDS(cudaGraphDestroy);
SUCCEEDS(cudaGraphExecDestroy);
SUCCEEDS(cudaGraphDebugDotPrint);
SUCCEEDS(cudaStreamUpdateCaptureDependencies);
