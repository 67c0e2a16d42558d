// A function of one number in bf16 as the table of its 65,536 results, by the bits of the number.
// Built once for each instruction set, see vectors.h.

#include "vectors.h"

extern "C" void fastgen_lookup_bf16(const Bf16 *numbers, const Bf16 *table, Bf16 *results, int64_t count,
                                    int32_t threads) {
    in_threads(threads, count, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) results[i] = table[numbers[i].bits];
    });
}
