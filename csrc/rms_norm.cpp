// RMS norm in fp32, output = weight * (row / sqrt(mean(row^2) + epsilon)): one pass over rows that lie in a cache.
//
// What a row gives does not depend on how many rows and threads there are.
// Built once for each instruction set, see vectors.h.

#include "vectors.h"
#include <cmath>

namespace {

struct Norm {
    const float *rows, *weight;
    float *output;
    int64_t row_count, width;
    float epsilon;
};

void normalize(const Norm &norm, int64_t from, int64_t to) {
    const int64_t width = norm.width, whole = width / WIDTH * WIDTH;
    for (int64_t i = from; i < to; i++) {
        const float *row = norm.rows + i * width;
        float *output = norm.output + i * width;
        Vector squares[2] = {};
        for (int64_t d = 0; d < whole; d += WIDTH) squares[d / WIDTH % 2] += load(row + d) * load(row + d);
        float sum = total(squares[0] + squares[1]);
        for (int64_t d = whole; d < width; d++) sum += row[d] * row[d];
        const float scale = 1 / std::sqrt(sum / width + norm.epsilon);
        for (int64_t d = 0; d < width; d++) output[d] = norm.weight[d] * (row[d] * scale);
    }
}

void normalize_share(void *of) {
    const Norm &norm = *(const Norm *)of;
    const int64_t thread = thread_number(), threads = thread_count();
    normalize(norm, norm.row_count * thread / threads, norm.row_count * (thread + 1) / threads);
}

} // namespace

extern "C" void fastgen_rms_norm(const float *rows, const float *weight, float *output, int64_t row_count,
                                 int64_t width, float epsilon, int32_t threads) {
    Norm norm{rows, weight, output, row_count, width, epsilon};
    if (threads > 1 && run_in_threads) run_in_threads(normalize_share, &norm, threads, 0);
    else normalize(norm, 0, row_count);
}
