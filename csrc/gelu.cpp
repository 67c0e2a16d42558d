// GELU of fp32 numbers, which may be written where they are. Built once for each instruction set, see vectors.h.

#include "gelu.h"

extern "C" void fastgen_gelu(const float *numbers, float *results, int64_t count, int32_t activation, int32_t threads) {
    in_threads(threads, (count + WIDTH - 1) / WIDTH, [&](int64_t from, int64_t to) {
        const int64_t end = std::min(to * WIDTH, count);
        int64_t i = from * WIDTH;
        for (; i + WIDTH <= end; i += WIDTH) *(Vector *)(results + i) = activated(load(numbers + i), activation);
        if (i == end) return;
        Vector last = {};
        memcpy(&last, numbers + i, (end - i) * sizeof *numbers);
        last = activated(last, activation);
        memcpy(results + i, &last, (end - i) * sizeof *results);
    });
}
