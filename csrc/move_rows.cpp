// Rows of keys or values change places, in memory that stays: what beam search does to a cache after each step.
// Built once for each instruction set, see vectors.h.

#include "vectors.h"

// states: of layers, rows and heads, which are strides[0], [1] and [2] bytes apart, and `bytes` of each. Row i becomes
// what row source[i] was.
extern "C" void fastgen_move_rows(char *states, const int64_t *source, const int64_t *strides, int64_t layers,
                                  int64_t rows, int64_t heads, int64_t bytes, int32_t threads) {
    std::vector<int64_t> moving;
    for (int64_t i = 0; i < rows; i++)
        if (source[i] != i) moving.push_back(i);
    if (moving.empty()) return;
    in_threads(threads, layers * heads, [&](int64_t from, int64_t to) {
        std::vector<char> moved(moving.size() * bytes); // stays in a cache
        for (; from < to; from++) {
            char *first = states + from / heads * strides[0] + from % heads * strides[2];
            for (size_t i = 0; i < moving.size(); i++)
                memcpy(&moved[i * bytes], first + source[moving[i]] * strides[1], bytes);
            for (size_t i = 0; i < moving.size(); i++) memcpy(first + moving[i] * strides[1], &moved[i * bytes], bytes);
        }
    });
}
