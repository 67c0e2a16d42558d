// RMS norm, output = weight * (row / sqrt(mean(row^2) + epsilon)), in fp32, bf16 and fp16 with sums in fp32: one pass
// over rows that fit into a cache. The factor of the weight is rounded first, as in the models.
//
// The result of a row does not depend on the number of rows and threads. Built once for each instruction set, see
// vectors.h.

#include "vectors.h"
#include <cmath>

namespace {

template <typename T>
struct Norm {
    const T *rows, *weight;
    T *output;
    int64_t row_count, width;
    float epsilon;
};

template <typename T>
void normalize(const Norm<T> &norm, int64_t from, int64_t to) {
    const int64_t width = norm.width, whole = width / WIDTH * WIDTH;
    for (int64_t i = from; i < to; i++) {
        const T *row = norm.rows + i * width;
        T *output = norm.output + i * width;
        Vector squares[2] = {};
        for (int64_t d = 0; d < whole; d += WIDTH) squares[d / WIDTH % 2] += load(row + d) * load(row + d);
        float sum = total(squares[0] + squares[1]);
        for (int64_t d = whole; d < width; d++) sum += to_float(row[d]) * to_float(row[d]);
        const float scale = 1 / std::sqrt(sum / width + norm.epsilon);
        for (int64_t d = 0; d < width; d++) {
            T scaled;
            store(to_float(row[d]) * scale, &scaled);
            store(to_float(norm.weight[d]) * to_float(scaled), output + d);
        }
    }
}

template <typename T>
void normalize_in(int32_t threads, const Norm<T> &norm) {
    in_threads(threads, norm.row_count, [&](int64_t from, int64_t to) { normalize(norm, from, to); });
}

} // namespace

extern "C" void fastgen_rms_norm(const float *rows, const float *weight, float *output, int64_t row_count,
                                 int64_t width, float epsilon, int32_t threads) {
    normalize_in<float>(threads, {rows, weight, output, row_count, width, epsilon});
}

extern "C" void fastgen_rms_norm_bf16(const Bf16 *rows, const Bf16 *weight, Bf16 *output, int64_t row_count,
                                      int64_t width, float epsilon, int32_t threads) {
    normalize_in<Bf16>(threads, {rows, weight, output, row_count, width, epsilon});
}

extern "C" void fastgen_rms_norm_fp16(const Fp16 *rows, const Fp16 *weight, Fp16 *output, int64_t row_count,
                                      int64_t width, float epsilon, int32_t threads) {
    normalize_in<Fp16>(threads, {rows, weight, output, row_count, width, epsilon});
}
