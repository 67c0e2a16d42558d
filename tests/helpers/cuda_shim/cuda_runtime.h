// What `csrc/*.cu` needs of CUDA, on the host: with this folder first among the include folders, g++ compiles those
// files as C++, and the tests run the same kernel source without a GPU.
//
// Blocks run one after another. The threads of a block run as fibers of the calling thread, each up to the next
// barrier, where it waits for all other threads. A barrier that some threads of a block miss, or at which they arrive from
// different lines, fails the launch. What CUDA refuses to launch is refused here too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInvalidDevice = 101,
    cudaErrorLaunchFailure = 719,
};

using cudaStream_t = struct CUstream_st*;

// Two devices; the first is current at the start.
extern "C" {
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetLastError();
const char* cudaGetErrorString(cudaError_t error);

// Where the last kernel was launched.
extern int cuda_shim_last_device;
extern cudaStream_t cuda_shim_last_stream;
}

namespace cuda_shim {

struct Position {
    dim3 grid, block_size, block, thread;
};

// Of the fiber that runs.
const Position& position();
void barrier(int line);
bool barrier_or(int line, bool predicate);
cudaError_t launch(dim3 grid, dim3 block, cudaStream_t stream, const std::function<void()>& thread);

template <typename... Parameters, std::size_t... I>
void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<Parameters*>(arguments[I])...);
}

}  // namespace cuda_shim

template <typename... Parameters>
cudaError_t cudaLaunchKernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, void** arguments,
                             std::size_t /*shared_bytes*/, cudaStream_t stream) {
    return cuda_shim::launch(grid, block, stream, [=] {
        cuda_shim::call(kernel, arguments, std::index_sequence_for<Parameters...>());
    });
}

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(...)
#define gridDim (cuda_shim::position().grid)
#define blockDim (cuda_shim::position().block_size)
#define blockIdx (cuda_shim::position().block)
#define threadIdx (cuda_shim::position().thread)
#define __syncthreads() cuda_shim::barrier(__LINE__)
#define __syncthreads_or(predicate) cuda_shim::barrier_or(__LINE__, predicate)
