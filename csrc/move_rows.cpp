// Reorders rows of keys or values in place, as beam search does to a cache after each step. Built once for each
// instruction set, see vectors.h.

#include "vectors.h"

// states: layers, rows and heads with the strides strides[0], [1] and [2] in bytes, and `bytes` bytes each. Row i
// becomes the previous row source[i].
extern "C" void fastgen_move_rows(char *states, const int64_t *source, const int64_t *strides, int64_t layers,
                                  int64_t rows, int64_t heads, int64_t bytes, int32_t threads) {
    std::vector<int64_t> moving;
    for (int64_t i = 0; i < rows; i++)
        if (source[i] != i) moving.push_back(i);
    if (moving.empty()) return;
    in_threads(threads, layers * heads, [&](int64_t from, int64_t to) {
        std::vector<char> moved(moving.size() * bytes); // fits into a cache
        for (; from < to; from++) {
            char *first = states + from / heads * strides[0] + from % heads * strides[2];
            for (size_t i = 0; i < moving.size(); i++)
                memcpy(&moved[i * bytes], first + source[moving[i]] * strides[1], bytes);
            for (size_t i = 0; i < moving.size(); i++) memcpy(first + moving[i] * strides[1], &moved[i * bytes], bytes);
        }
    });
}
