// Layer norm, output = (row - mean) / sqrt(variance + epsilon) * weight + bias, of rows or of their sums with other
// rows, in fp32, bf16 and fp16 with sums in fp32: each row is read from memory once, and rounded once, as torch does.
//
// What a row gives does not depend on how many rows and threads there are.
// Built once for each instruction set, see vectors.h.

#include "vectors.h"
#include <cmath>

namespace {

template <typename T>
struct LayerNorm {
    const T *rows, *added; // added: null, or rows to add
    const T *weight, *bias;
    T *output;
    int64_t row_count, width;
    float epsilon;
};

// The sum over a row of what `term` makes of its numbers.
template <typename T, typename Term>
inline float sum_of(const T *row, int64_t width, const Term &term) {
    Vector sums[4] = {};
    int64_t d = 0;
    for (; d + 4 * WIDTH <= width; d += 4 * WIDTH)
        for (int i = 0; i < 4; i++) sums[i] += term(load(row + d + i * WIDTH));
    for (; d + WIDTH <= width; d += WIDTH) sums[0] += term(load(row + d));
    float sum = total((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; d < width; d++) sum += term(to_float(row[d]));
    return sum;
}

template <typename T>
inline void store_all(const Vector &numbers, T *to) {
    if constexpr (WIDTH < 8) {
        for (int i = 0; i < WIDTH; i++) store(numbers[i], to + i);
    } else {
        for (int i = 0; i < WIDTH; i += 8) {
            Eight part;
            memcpy(&part, (const float *)&numbers + i, sizeof part);
            const auto stored = in_format(part, to);
            memcpy(to + i, &stored, sizeof stored);
        }
    }
}

template <typename T>
inline void add(const T *row, const T *added, T *output, int64_t width) {
    int64_t d = 0;
    for (; d + WIDTH <= width; d += WIDTH) store_all(load(row + d) + load(added + d), output + d);
    for (; d < width; d++) store(to_float(row[d]) + to_float(added[d]), output + d);
}

template <typename T>
void normalize(const LayerNorm<T> &norm, int64_t from, int64_t to) {
    const int64_t width = norm.width;
    for (int64_t i = from; i < to; i++) {
        const T *row = norm.rows + i * width, *weight = norm.weight, *bias = norm.bias;
        T *output = norm.output + i * width;
        if (norm.added) { // the sum is rounded, as if torch had stored it
            add(row, norm.added + i * width, output, width);
            row = output;
        }
        const float mean = sum_of(row, width, [](auto x) { return x; }) / width;
        const float squares = sum_of(row, width, [mean](auto x) { return (x - mean) * (x - mean); });
        const float scale = 1 / std::sqrt(squares / width + norm.epsilon);
        int64_t d = 0;
        for (; d + WIDTH <= width; d += WIDTH)
            store_all((load(row + d) - mean) * scale * load(weight + d) + load(bias + d), output + d);
        for (; d < width; d++)
            store((to_float(row[d]) - mean) * scale * to_float(weight[d]) + to_float(bias[d]), output + d);
    }
}

template <typename T>
void normalize_in(int32_t threads, const LayerNorm<T> &norm) {
    in_threads(threads, norm.row_count, [&](int64_t from, int64_t to) { normalize(norm, from, to); });
}

} // namespace

extern "C" void fastgen_layer_norm(const float *rows, const float *added, const float *weight, const float *bias,
                                   float *output, int64_t row_count, int64_t width, float epsilon, int32_t threads) {
    normalize_in<float>(threads, {rows, added, weight, bias, output, row_count, width, epsilon});
}

extern "C" void fastgen_layer_norm_bf16(const Bf16 *rows, const Bf16 *added, const Bf16 *weight, const Bf16 *bias,
                                        Bf16 *output, int64_t row_count, int64_t width, float epsilon,
                                        int32_t threads) {
    normalize_in<Bf16>(threads, {rows, added, weight, bias, output, row_count, width, epsilon});
}

extern "C" void fastgen_layer_norm_fp16(const Fp16 *rows, const Fp16 *added, const Fp16 *weight, const Fp16 *bias,
                                        Fp16 *output, int64_t row_count, int64_t width, float epsilon,
                                        int32_t threads) {
    normalize_in<Fp16>(threads, {rows, added, weight, bias, output, row_count, width, epsilon});
}
