// The arguments of one attention call, and the parts that the kernels for few and for many queries share: masks, and
// softmax weights. Built once for each instruction set, see vectors.h.

#pragma once

#include "vectors.h"
#include <cmath>

namespace {

constexpr float HIDDEN = -INFINITY; // a score

constexpr int EXACT = 7; // terms of the series beyond the first: relative error of e^x 1e-7

// e^x for x <= 0: a power of two times the Taylor series of the remainder, whose absolute value is at most ln 2 / 2.
template <int TERMS = EXACT>
inline Vector exp_of(Vector x) {
    constexpr float ROUND = 12582912.0f; // 1.5 * 2^23: adding it leaves no bits for a fraction
    constexpr float FACTORS[] = {1, 1, 1.0f / 2, 1.0f / 6, 1.0f / 24, 1.0f / 120, 1.0f / 720, 1.0f / 5040};
    const Vector whole = (x * 1.44269504f + ROUND) - ROUND;
    const Vector rest = x - whole * 0.693359375f + whole * 2.12194440e-4f; // ln 2 in two parts
    Vector power = rest * FACTORS[TERMS] + FACTORS[TERMS - 1];
    for (int i = TERMS - 2; i >= 0; i--) power = power * rest + FACTORS[i];
    const Integers two = (__builtin_convertvector(whole, Integers) + 127) << 23;
    return x < -87.0f ? Vector{} : power * (Vector)two;
}

// The maximum; the first argument if one of the two is NaN.
template <typename V>
inline V larger(V one, V other) {
    return other > one ? other : one;
}

inline float largest(const Vector &lanes) {
    const Four *fours = (const Four *)&lanes;
    Four most = fours[0];
    for (int i = 1; i < WIDTH / 4; i++) most = larger(most, fours[i]);
    return std::max(std::max(most[0], most[1]), std::max(most[2], most[3]));
}

// Keys or values: the address, and the strides in elements of a copy, a head, a position; the last dimension is
// contiguous.
template <typename T>
struct States {
    const T *data;
    int64_t of_copy, of_head, of_position;

    const T *at(int64_t copy, int64_t head) const { return data + copy * of_copy + head * of_head; }
};

template <typename T>
struct Segment {
    States<T> keys, values;
    int64_t copies, length;
};

enum Mask { NONE, FLOATS, OF_QUERY, BOOLS, CAUSAL }; // OF_QUERY: the query's type, if it is not fp32

template <typename T>
struct Attention {
    const T *query;
    T *output;
    const void *mask;
    std::vector<Segment<T>> segments;
    int64_t rows, heads, length, kv_heads, width, value_width;
    int64_t query_strides[3], output_strides[3], mask_strides[4]; // row, head, position (and key)
    int64_t mask_type;
    float scale;

    // pointers: query, output, mask or null, then keys and values of each segment. sizes: in the order in which they
    // are read.
    Attention(void *const *pointers, const int64_t *sizes, float scale) : scale(scale) {
        query = (const T *)pointers[0];
        output = (T *)pointers[1];
        mask = pointers[2];
        int64_t segment_count;
        for (int64_t *size : {&rows, &heads, &length, &kv_heads, &width, &value_width, &segment_count})
            *size = *sizes++;
        for (int64_t &stride : query_strides) stride = *sizes++;
        for (int64_t &stride : output_strides) stride = *sizes++;
        for (int64_t &stride : mask_strides) stride = *sizes++;
        mask_type = *sizes++;
        for (int64_t i = 0; i < segment_count; i++, sizes += 8)
            segments.push_back({{(const T *)pointers[3 + 2 * i], sizes[2], sizes[3], sizes[4]},
                                {(const T *)pointers[4 + 2 * i], sizes[5], sizes[6], sizes[7]},
                                sizes[0],
                                sizes[1]});
    }

    int64_t groups() const { return heads / kv_heads; } // query heads per KV head

    int64_t keys() const {
        int64_t sum = 0;
        for (const Segment<T> &segment : segments) sum += segment.length;
        return sum;
    }

    // Offset of query `q` (position within the head group) for a given row and KV head.
    int64_t place(int64_t row, int64_t kv_head, int64_t q, const int64_t *strides) const {
        return row * strides[0] + (kv_head * groups() + q / length) * strides[1] + q % length * strides[2];
    }
};

// Adds the mask of a query, which starts at `start`, to its scores for the keys from `first` on.
template <typename T>
void add_mask(const Attention<T> &of, int64_t start, int64_t first, float *scores, int64_t length) {
    const auto add = [&](auto step) { // a compile-time constant if possible
        start += first * step;
        if (of.mask_type == FLOATS)
            for (int64_t n = 0; n < length; n++) scores[n] += ((const float *)of.mask + start)[n * step];
        else if (of.mask_type == OF_QUERY)
            for (int64_t n = 0; n < length; n++) scores[n] += to_float(((const T *)of.mask + start)[n * step]);
        else if (of.mask_type == BOOLS)
            for (int64_t n = 0; n < length; n++) scores[n] += ((const bool *)of.mask + start)[n * step] ? 0 : HIDDEN;
    };
    if (of.mask_strides[3] == 1) add(std::integral_constant<int64_t, 1>());
    else add(of.mask_strides[3]);
}

} // namespace
