// Attention of a few queries to many keys, as in a decode step, in fp32, bf16 and fp16, with sums in fp32.
//
// Keys and values are read in place, once by each thread that has queries for them; with few queries, reading takes
// longer than computing. They are stored in segments, each once for the rows that share it; one softmax covers all
// segments. The result of a query does not depend on the number of rows and threads. Built once for each instruction
// set, see vectors.h.

#include "attention.h"
#include <numeric>

namespace {

constexpr int QUERIES = 6; // the sums of this many over COLUMNS registers of values fit into registers
constexpr int COLUMNS = HAS_32_REGISTERS ? 4 : 2;
constexpr size_t MOST_KEPT = 1 << 20; // elements of a thread's buffer that stay allocated between calls
constexpr int64_t AHEAD = 2 * WIDTH;  // keys or values to prefetch, after the current one

// Mask values below this make a weight 0.
template <typename T>
constexpr float HIDES = -1e30f;
template <>
constexpr float HIDES<Fp16> = -65503; // fp16 goes down to -65504

// What is prefetched while key or value n of a head is used: the one AHEAD of it or, after the last one, those of the
// next heads.
template <typename T>
struct Ahead {
    const T *of_head;
    int64_t heads_apart, stride, length, first; // first: the first position to prefetch

    Ahead(const States<T> &states, const T *of_head, int64_t length)
        : of_head(of_head + AHEAD / length * states.of_head), heads_apart(states.of_head), stride(states.of_position),
          length(length), first(AHEAD % length) {}

    const T *at(int64_t n) const {
        n += first;
        return n < length ? of_head + n * stride : of_head + heads_apart + (n - length) * stride;
    }
};

// How STEP elements of a key are multiplied with those of a query, and the layout of queries for this.
template <typename T>
struct Dot {
    typedef float Query;
    static constexpr int64_t STEP = WIDTH;
    static void add(Vector &lanes, const Query *query, const T *key) { lanes += load(key) * load(query); }
};

#ifdef HAS_BF16_DOTS
template <>
struct Dot<Bf16> {
    typedef Bf16 Query;
    static constexpr int64_t STEP = 2 * WIDTH;
    static void add(Vector &lanes, const Query *query, const Bf16 *key) {
        add_products(lanes, load_pairs(query), load_pairs(key));
    }
};
#endif

// scores[q][n] = query q times key n, for the keys of one copy.
template <typename T>
void multiply_keys(const typename Dot<T>::Query *queries, int64_t count, const T *keys, int64_t stride, int64_t length,
                   int64_t width, float *scores, int64_t scores_stride, Ahead<T> ahead) {
    constexpr int64_t STEP = Dot<T>::STEP;
    const int64_t steps = width / STEP * STEP, whole = width / WIDTH * WIDTH;
    for (int64_t n = 0; n < length; n += WIDTH) {
        const T *block = keys + n * stride;
        const int64_t wide = std::min<int64_t>(WIDTH, length - n);
        const T *next = ahead.at(n);
        for (int64_t j = 0; j < wide; j++)
            for (int64_t d = 0; d < width; d += CACHE_LINE / sizeof(T)) __builtin_prefetch(next + j * stride + d);
        for (int64_t q = 0; q < count; q++) {
            const auto *query = queries + q * width;
            float *found = scores + q * scores_stride + n;
            if (wide == WIDTH) {
                Vector lanes[WIDTH] = {};
                for (int64_t d = 0; d < steps; d += STEP)
                    for (int j = 0; j < WIDTH; j++) Dot<T>::add(lanes[j], query + d, block + j * stride + d);
                for (int64_t d = steps; d < whole; d += WIDTH)
                    for (int j = 0; j < WIDTH; j++) lanes[j] += load(block + j * stride + d) * load(query + d);
                sum_up(lanes);
                *(Vector *)found = lanes[0];
            } else {
                for (int64_t j = 0; j < wide; j++) {
                    Vector lanes{};
                    for (int64_t d = 0; d < steps; d += STEP) Dot<T>::add(lanes, query + d, block + j * stride + d);
                    for (int64_t d = steps; d < whole; d += WIDTH)
                        lanes += load(block + j * stride + d) * load(query + d);
                    found[j] = total(lanes);
                }
            }
            for (int64_t d = whole; d < width; d++)
                for (int64_t j = 0; j < wide; j++) found[j] += to_float(query[d]) * to_float(block[j * stride + d]);
        }
    }
}

// sums[q] += weights[q][n] * value n, for Q queries and C registers of columns.
template <typename T, int Q, int C>
inline void add_values(const float *weights, int64_t weights_stride, const T *values, int64_t stride, int64_t length,
                       float *sums, int64_t sums_stride, Ahead<T> ahead) {
    Vector kept[Q][C];
    for (int q = 0; q < Q; q++)
        for (int c = 0; c < C; c++) kept[q][c] = load(sums + q * sums_stride + c * WIDTH);
    for (int64_t n = 0; n < length; n++) {
        Vector parts[C];
        for (int c = 0; c < C; c++) parts[c] = load(values + n * stride + c * WIDTH);
        for (int c = 0; c < C; c += CACHE_LINE / (WIDTH * sizeof(T))) __builtin_prefetch(ahead.at(n) + c * WIDTH);
        for (int q = 0; q < Q; q++) {
            const float weight = weights[q * weights_stride + n];
            for (int c = 0; c < C; c++) kept[q][c] += weight * parts[c];
        }
    }
    for (int q = 0; q < Q; q++)
        for (int c = 0; c < C; c++) *(Vector *)(sums + q * sums_stride + c * WIDTH) = kept[q][c];
}

template <typename T>
void multiply_values(const float *weights, int64_t weights_stride, int64_t count, const T *values, int64_t stride,
                     int64_t length, int64_t width, float *sums, Ahead<T> ahead) {
    for (int64_t q = 0; q < count; q += QUERIES, weights += QUERIES * weights_stride, sums += QUERIES * width)
        with_constant<QUERIES>(std::min<int64_t>(QUERIES, count - q), [&](auto some) {
            int64_t d = 0;
            for (; d + COLUMNS * WIDTH <= width; d += COLUMNS * WIDTH, ahead.of_head += COLUMNS * WIDTH)
                add_values<T, some, COLUMNS>(weights, weights_stride, values + d, stride, length, sums + d, width,
                                             ahead);
            for (; d + WIDTH <= width; d += WIDTH, ahead.of_head += WIDTH)
                add_values<T, some, 1>(weights, weights_stride, values + d, stride, length, sums + d, width, ahead);
            for (; d < width; d++)
                for (int64_t n = 0; n < length; n++)
                    for (int i = 0; i < some; i++)
                        sums[i * width + d] += weights[i * weights_stride + n] * to_float(values[n * stride + d]);
        });
}

// One more than the index of the last key that the mask lets a query see; all keys if it hides all.
template <typename T>
int64_t seen_by(const Attention<T> &of, int64_t start, int64_t keys) {
    for (int64_t n = keys; n > 0; n--) {
        const int64_t place = start + (n - 1) * of.mask_strides[3];
        const bool sees = of.mask_type == BOOLS    ? ((const bool *)of.mask)[place]
                          : of.mask_type == FLOATS ? !(((const float *)of.mask)[place] < HIDES<float>)
                                                   : !(to_float(((const T *)of.mask)[place]) < HIDES<T>);
        if (sees) return n;
    }
    return keys;
}

// Converts scores to weights before normalization and returns their sum: 0 if all keys are hidden, NaN as in torch.
float to_weights(float *scores, int64_t length, int64_t padded) {
    std::fill(scores + length, scores + padded, HIDDEN);
    Vector lanes = load(scores);
    for (int64_t n = WIDTH; n < padded; n += WIDTH) lanes = larger(lanes, load(scores + n));
    const float most = largest(lanes);
    if (!(most > HIDDEN)) { // all are hidden, unless a score is NaN
        for (int64_t n = 0; n < length; n++)
            if (scores[n] != scores[n]) return NAN;
        return 0;
    }
    Vector sum{};
    for (int64_t n = 0; n < padded; n += WIDTH) sum += *(Vector *)(scores + n) = exp_of(load(scores + n) - most);
    return total(sum);
}

template <typename T, typename Query>
inline void copy_query(const T *query, Query *to, int64_t width) {
    if constexpr (std::is_same_v<T, Query>) memcpy(to, query, width * sizeof *to);
    else
        for (int64_t d = 0; d < width; d++) to[d] = to_float(query[d]);
}

// Divides the sums of weighted values by the total of the weights, which is 0 if all keys are hidden.
template <typename T>
inline void store_output(const float *sums, float total, T *output, int64_t width) {
    int64_t d = 0;
    for (; d + 8 <= width; d += 8) {
        Eight numbers;
        memcpy(&numbers, sums + d, sizeof numbers);
        const auto stored = in_format(total == 0 ? Eight{} : numbers / total, output);
        memcpy(output + d, &stored, 8 * sizeof *output);
    }
    for (; d < width; d++) store(total == 0 ? 0.0f : sums[d] / total, output + d);
}

// Queries that are computed together: the `total` queries of one KV head, of the rows that share a copy of the
// segment with the fewest copies (`least`), or the part from `first` on.
struct Unit {
    int64_t least, copy, head, total, first, count;
};

template <typename T>
void attend(const Attention<T> &of, const Unit &unit, std::vector<float> &memory) {
    const int64_t count = unit.count, head = unit.head, of_row = of.groups() * of.length;
    const int64_t keys = of.keys(), padded = (keys + WIDTH - 1) / WIDTH * WIDTH;
    memory.resize(count * (of.width + padded + of.value_width + 1));
    auto *queries = (typename Dot<T>::Query *)memory.data();
    float *scores = memory.data() + count * of.width, *found = scores + count * padded;
    float *totals = found + count * of.value_width;
    const auto place = [&](int64_t q, const int64_t *strides) {
        const int64_t number = unit.copy * unit.total + unit.first + q;
        return of.place(number / of_row, head, number % of_row, strides);
    };
    // Keys that are hidden from all queries, such as those after the current position in a static cache, are not
    // read. Blocks stay whole, because a partial block would change the order of sums.
    const int64_t last = keys - of.segments.back().length;
    int64_t seen = of.mask_type == NONE ? keys : last;
    for (int64_t q = 0; q < count && seen < keys; q++)
        seen = std::max(seen, seen_by(of, place(q, of.mask_strides), keys));
    seen = std::min(keys, last + (seen - last + WIDTH - 1) / WIDTH * WIDTH);
    const auto for_copies = [&](const auto &multiply) { // for each segment, with the queries that see the copy
        int64_t start = 0;
        for (Segment<T> segment : of.segments) {
            const int64_t length = segment.length;
            segment.length = std::min(length, seen - start);
            if (segment.length <= 0) continue;
            const int64_t copies = segment.copies / unit.least, of_copy = unit.total / copies;
            const int64_t number = unit.copy * copies + unit.first / of_copy, each = std::min(of_copy, count);
            for (int64_t q = 0; q < count; q += each)
                multiply(segment, number + q / each, q, each, scores + q * padded + start);
            start += length;
        }
    };
    for (int64_t q = 0; q < count; q++)
        copy_query(of.query + place(q, of.query_strides), queries + q * of.width, of.width);
    for_copies([&](const Segment<T> &segment, int64_t number, int64_t first, int64_t each, float *part) {
        const T *keys = segment.keys.at(number, head);
        multiply_keys(queries + first * of.width, each, keys, segment.keys.of_position, segment.length, of.width, part,
                      padded, Ahead<T>(segment.keys, keys, segment.length));
    });
    for (int64_t q = 0; q < count; q++) {
        for (int64_t n = 0; n < seen; n++) scores[q * padded + n] *= of.scale;
        if (of.mask_type != NONE) add_mask(of, place(q, of.mask_strides), 0, scores + q * padded, seen);
        totals[q] = to_weights(scores + q * padded, seen, (seen + WIDTH - 1) / WIDTH * WIDTH);
    }
    std::fill(found, found + count * of.value_width, 0.0f);
    for_copies([&](const Segment<T> &segment, int64_t number, int64_t first, int64_t each, float *part) {
        const T *values = segment.values.at(number, head);
        multiply_values(part, padded, each, values, segment.values.of_position, segment.length, of.value_width,
                        found + first * of.value_width, Ahead<T>(segment.values, values, segment.length));
    });
    for (int64_t q = 0; q < count; q++)
        store_output(found + q * of.value_width, totals[q], of.output + place(q, of.output_strides), of.value_width);
}

// The number of parts that the queries of a unit are divided into if threads would be idle; `pieces` stay whole.
inline int64_t parts_of(int64_t units, int64_t queries, int64_t pieces, int64_t threads) {
    if (units >= 4 * threads) return 1;
    const int64_t most = std::max<int64_t>(1, std::min(pieces, queries / QUERIES));
    return std::min(most, threads / std::gcd(units, threads));
}

template <typename T>
void attend_all(const Attention<T> &of, int32_t threads) {
    int64_t least = of.rows;
    for (const Segment<T> &segment : of.segments) least = std::min(least, segment.copies);
    const int64_t total = of.rows / least * of.groups() * of.length, units = least * of.kv_heads;
    int64_t pieces = total; // a part has whole copies of all segments, except segments with one copy per unit
    for (const Segment<T> &segment : of.segments)
        if (segment.copies > least) pieces = std::min(pieces, segment.copies / least);
    const int64_t parts = parts_of(units, total, pieces, threads), of_piece = total / pieces;
    in_threads(threads, units * parts, [&](int64_t number, int64_t to) {
        static thread_local std::vector<float> memory;
        for (; number < to; number++) {
            const int64_t unit = number / parts, part = number % parts;
            const int64_t first = pieces * part / parts * of_piece, behind = pieces * (part + 1) / parts * of_piece;
            attend(of, {least, unit / of.kv_heads, unit % of.kv_heads, total, first, behind - first}, memory);
        }
        if (memory.size() > MOST_KEPT) std::vector<float>().swap(memory);
    });
}

} // namespace

extern "C" void fastgen_few_queries(void *const *pointers, const int64_t *sizes, float scale, int32_t threads) {
    attend_all<float>({pointers, sizes, scale}, threads);
}

extern "C" void fastgen_few_queries_bf16(void *const *pointers, const int64_t *sizes, float scale, int32_t threads) {
    attend_all<Bf16>({pointers, sizes, scale}, threads);
}

extern "C" void fastgen_few_queries_fp16(void *const *pointers, const int64_t *sizes, float scale, int32_t threads) {
    attend_all<Fp16>({pointers, sizes, scale}, threads);
}
