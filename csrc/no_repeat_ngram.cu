// No-repeat-n-gram on a GPU: Algorithm 1 of FastSeq (https://arxiv.org/abs/2106.04718), in tiles.
//
// A block takes a tile of one row's windows, a thread one window of it at a time; tokens are staged in shared memory
// in chunks of the n-gram, so that neither the length of a row nor n is limited. No torch header: see
// no_repeat_ngram.h.

#include <cuda_runtime.h>

#include "no_repeat_ngram.h"

namespace {

constexpr int kThreads = 128;
constexpr int kChunk = 32; // tokens of the prefix that are compared between two barriers
constexpr int64_t kMaxGridY = 65535;

template <typename Token>
struct Sequence {
    const Token *first;
    int64_t stride;

    __device__ Token operator[](int64_t i) const { return first[i * stride]; }
};

__device__ int64_t length_of(const NGramProblem &p, int64_t row) {
    if (!p.lengths) return p.width;
    const int64_t i = row * p.lengths_stride;
    const int64_t length =
        p.length_bytes == 4 ? static_cast<const int32_t *>(p.lengths)[i] : static_cast<const int64_t *>(p.lengths)[i];
    return length < 0 ? 0 : length < p.width ? length : p.width;
}

// Whether the window that starts `threadIdx.x` tokens after `tile` equals the prefix. All threads of a block call it.
template <typename Token>
__device__ bool equals_prefix(Sequence<Token> source, int64_t tile, int64_t windows, Sequence<Token> prefix,
                              int64_t prefix_size) {
    __shared__ Token tile_tokens[kThreads + kChunk];
    __shared__ Token prefix_tokens[kChunk];

    bool equal = tile + threadIdx.x < windows;
    for (int64_t chunk = 0; chunk < prefix_size; chunk += kChunk) {
        const int size = prefix_size - chunk < kChunk ? static_cast<int>(prefix_size - chunk) : kChunk;
        // The last window of a row ends with its last token, so this does not read past the end of the row.
        const int64_t left = windows + prefix_size - (tile + chunk);
        const int staged = left < kThreads + size ? static_cast<int>(left) : kThreads + size;
        for (int i = threadIdx.x; i < staged; i += kThreads) tile_tokens[i] = source[tile + chunk + i];
        for (int i = threadIdx.x; i < size; i += kThreads) prefix_tokens[i] = prefix[chunk + i];
        __syncthreads();
        for (int i = 0; equal && i < size; ++i) equal = tile_tokens[threadIdx.x + i] == prefix_tokens[i];
        // Also prevents a fast thread from staging the next chunk while a slow thread still reads this one.
        if (!__syncthreads_or(equal)) return false;
    }
    return equal;
}

template <typename Token, typename Score>
__global__ void __launch_bounds__(kThreads) ban_repeated_ngrams(NGramProblem p) {
    const int64_t prefix_size = p.ngram_size - 1;
    const int64_t tile = static_cast<int64_t>(blockIdx.x) * kThreads;
    for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
        const int64_t length = length_of(p, row);
        const int64_t windows = (p.source ? p.source_width : length) - prefix_size;
        if (length < prefix_size || tile >= windows) continue; // the same for all threads of the block

        const Sequence<Token> tokens{static_cast<const Token *>(p.tokens) + row * p.token_row_stride, p.token_stride};
        const Sequence<Token> prefix{tokens.first + (length - prefix_size) * p.token_stride, p.token_stride};
        const Sequence<Token> source =
            p.source
                ? Sequence<Token>{static_cast<const Token *>(p.source) + row / p.rows_per_source * p.source_row_stride,
                                  p.source_stride}
                : tokens;
        if (!equals_prefix(source, tile, windows, prefix, prefix_size)) continue;
        const int64_t token = source[tile + threadIdx.x + prefix_size];
        if (token >= 0 && token < p.vocabulary_size) {
            Score *scores = static_cast<Score *>(p.scores) + row * p.score_row_stride;
            scores[token * p.score_stride] = static_cast<Score>(p.minus_infinity);
        }
    }
}

template <typename Token, typename Score>
cudaError_t launch(NGramProblem p, cudaStream_t stream) {
    const int64_t windows = (p.source ? p.source_width : p.width) - p.ngram_size + 1;
    if (p.rows <= 0 || windows <= 0) return cudaSuccess;
    const dim3 grid(static_cast<unsigned>((windows + kThreads - 1) / kThreads),
                    static_cast<unsigned>(p.rows < kMaxGridY ? p.rows : kMaxGridY));
    void *arguments[] = {&p};
    return cudaLaunchKernel(ban_repeated_ngrams<Token, Score>, grid, dim3(kThreads), arguments, 0, stream);
}

cudaError_t launch(const NGramProblem &p, cudaStream_t stream) {
    if (p.token_bytes == 4) {
        return p.score_bytes == 2 ? launch<int32_t, uint16_t>(p, stream) : launch<int32_t, uint32_t>(p, stream);
    }
    return p.score_bytes == 2 ? launch<int64_t, uint16_t>(p, stream) : launch<int64_t, uint32_t>(p, stream);
}

} // namespace

// Launches on `stream` of `device`, and restores the caller's current device. Returns null, or an error message.
extern "C" const char *fastgen_no_repeat_ngram_cuda(const NGramProblem *problem, int32_t device, void *stream) {
    int current = device;
    cudaError_t error = cudaGetDevice(&current);
    if (error == cudaSuccess && current != device) error = cudaSetDevice(device);
    if (error == cudaSuccess) error = launch(*problem, static_cast<cudaStream_t>(stream));
    if (current != device) cudaSetDevice(current);
    if (error == cudaSuccess) return nullptr;
    cudaGetLastError(); // clears it in this library's runtime
    return cudaGetErrorString(error);
}
