// A function of one 16-bit number as a table of its 65,536 results, indexed by the bits of the number. Built once for
// each instruction set, see vectors.h.

#include "vectors.h"

extern "C" void fastgen_lookup(const uint16_t *numbers, const uint16_t *table, uint16_t *results, int64_t count,
                               int32_t threads) {
    in_threads(threads, count, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) results[i] = table[numbers[i]];
    });
}
