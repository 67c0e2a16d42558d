// Attention of many queries, as of a prompt or an encoder, in fp32, bf16 and fp16 with sums in fp32: blocks of keys and
// an online softmax, as in FlashAttention (Dao et al., 2022, algorithm 1).
//
// A block of keys and values is packed once for a chunk of queries, and multiplied with one tile of queries at a
// time, whose scores stay in the L1 cache. Scores that a mask hides from a whole tile are not computed: nearly half
// of them if the mask is causal. The result of a query does not depend on the number of rows and threads. Segments of
// keys are those of few_queries.cpp. Built once for each instruction set, see vectors.h.

#include "attention.h"

namespace {

constexpr int QUERIES = HAS_32_REGISTERS ? 12 : 6; // per tile; their sums for a panel fit into registers
constexpr int COLUMNS = 2;                         // registers per panel
constexpr int64_t PANEL = COLUMNS * WIDTH;         // keys, or columns of values, that are packed contiguously
constexpr int64_t BLOCK = 128;                     // keys packed at a time
constexpr int64_t MAX_CHUNK = 44 * QUERIES;        // queries per packed block, at most
constexpr int64_t MIN_CHUNK = 8 * QUERIES;         // with fewer, packing takes too much of the time
constexpr int64_t UNITS = 4;                       // per thread, if chunks stay large enough
constexpr int64_t AHEAD = 12;                      // rows to prefetch while one is packed

inline int64_t in_panels(int64_t count) { return (count + PANEL - 1) / PANEL * PANEL; }

// ---- formats: packed elements of four bytes, and how they are multiplied

// Elements of type T, converted to fp32.
template <typename T>
struct Floats {
    typedef T Number;
    typedef float Element;
    typedef Vector Part;                // one register of elements
    static constexpr int64_t OF = 1;    // numbers in an element
    static constexpr int TERMS = EXACT; // of a weight

    static void pack_row(const T *numbers, int64_t count, Element *to) { // adjacent elements are summed
        for (int64_t d = 0; d < count; d++) to[d] = to_float(numbers[d]);
    }
    static Element pack(const T *number, const T *) { return to_float(*number); } // vertically adjacent ones are
    static void pack_part(const T *numbers, const T *, Element *to) { *(Vector *)to = load(numbers); }
    static Part all(const Element *element) { return *element - Vector{}; }
    static Part load_part(const Element *elements) { return load(elements); }
    static void add(Vector &sum, Part one, Part other) { sum += one * other; }
    static void store_weights(const Vector &weights, Element *to) { *(Vector *)to = weights; }
};

#ifdef HAS_BF16_DOTS
// Pairs of adjacent elements along the summed dimension.
struct Paired {
    typedef Bf16 Number;
    typedef uint32_t Element;
    typedef Pairs Part;
    static constexpr int64_t OF = 2;
    static constexpr int TERMS = 4; // relative error of a weight 4e-5; it is rounded to 2e-3
    static void pack_row(const Bf16 *numbers, int64_t count, Element *to) {
        to[count / 2] = 0;
        memcpy(to, numbers, count * sizeof *numbers);
    }
    static Element pack(const Bf16 *one, const Bf16 *other) { return one->bits | (uint32_t)other->bits << 16; }
    static void pack_part(const Bf16 *one, const Bf16 *other, Element *to) { store_pairs(pairs_of(one, other), to); }
    static Part all(const Element *element) { return in_all_lanes(*element); }
    static Part load_part(const Element *elements) { return load_pairs(elements); }
    static void add(Vector &sum, Part one, Part other) { add_products(sum, one, other); }
    static void store_weights(const Vector &weights, Element *to) { store_as_bf16(weights, to); }
};
#endif

// sums += one[r] * other[k], summed over k, for R queries and the columns of a panel.
template <class F, int R>
inline void multiply(const typename F::Element *one, int64_t stride, const typename F::Element *other, int64_t length,
                     Vector (&sums)[R][COLUMNS]) {
    for (int64_t k = 0; k < length; k++) {
        typename F::Part parts[COLUMNS];
        for (int c = 0; c < COLUMNS; c++) parts[c] = F::load_part(other + k * PANEL + c * WIDTH);
        for (int r = 0; r < R; r++) {
            const typename F::Part all = F::all(one + r * stride + k);
            for (int c = 0; c < COLUMNS; c++) F::add(sums[r][c], all, parts[c]);
        }
    }
}

template <typename T>
inline void fetch_row(const T *numbers, int64_t count) {
    for (int64_t d = 0; d < count; d += CACHE_LINE / sizeof *numbers) __builtin_prefetch(numbers + d, 0, 2);
}

// ---- packed buffers of a block of keys and of a chunk of queries

template <class F>
struct Packed {
    typedef typename F::Element Element;
    typedef typename F::Number Number;

    int64_t depth, columns;                     // elements per query; elements per value, in whole panels
    std::vector<Element> queries, keys, values; // [chunk][depth]; panels [depth][PANEL]; panels [BLOCK / OF][PANEL]
    std::vector<Element> line;                  // of a key
    std::vector<float> sums, most, totals;      // [chunk][columns]; per query: the largest score, the sum of weights
    std::vector<int64_t> positions, masks;      // per query; the start of its mask
    std::vector<Number> zeros;                  // as long as a key or a value

    void make_room(const Attention<Number> &of, int64_t chunk) {
        depth = (of.width + F::OF - 1) / F::OF, columns = in_panels(of.value_width);
        queries.resize(chunk * depth + 1); // one more for the remainder of an odd width
        line.resize(depth + 1);
        keys.resize(BLOCK * depth);
        values.assign(BLOCK / F::OF * columns, Element{});
        sums.resize(chunk * columns);
        most.resize(chunk);
        totals.resize(chunk);
        positions.resize(chunk);
        masks.resize(chunk);
        zeros.assign(std::max(of.width, of.value_width), Number{});
    }

    void pack_keys(const Number *from, int64_t stride, int64_t length, int64_t width) {
        for (int64_t n = 0; n < in_panels(length); n++) {
            Element *to = keys.data() + n / PANEL * PANEL * depth + n % PANEL;
            fetch_row(from + (n + AHEAD) * stride, width);
            F::pack_row(n < length ? from + n * stride : zeros.data(), width, line.data());
            for (int64_t d = 0; d < depth; d++) to[d * PANEL] = line[d];
        }
    }

    void pack_values(const Number *from, int64_t stride, int64_t length, int64_t width) {
        for (int64_t n = 0; n < in_panels(length); n += F::OF) {
            const Number *one = n < length ? from + n * stride : zeros.data();
            const Number *other = n + 1 < length ? from + (n + 1) * stride : zeros.data();
            for (int i = 0; i < F::OF; i++) fetch_row(from + (n + i + AHEAD) * stride, width);
            const auto at = [&](int64_t d) {
                return values.data() + d / PANEL * PANEL * (BLOCK / F::OF) + n / F::OF * PANEL + d % PANEL;
            };
            int64_t d = 0;
            for (; d + WIDTH <= width; d += WIDTH) F::pack_part(one + d, other + d, at(d));
            for (; d < width; d++) *at(d) = F::pack(one + d, other + d);
        }
    }
};

// Whether a query at this position sees any of the keys from `first` on; its mask starts at `start`.
template <typename T>
bool sees_any(const Attention<T> &of, int64_t start, int64_t position, int64_t first, int64_t length) {
    if (of.mask_type == NONE) return true;
    if (of.mask_type == CAUSAL) return first <= position;
    const auto any = [&](auto step, const auto *mask, const auto &sees) {
        bool found = false;
        for (int64_t n = 0; n < length; n++) found |= sees(mask[start + (first + n) * step]);
        return found;
    };
    const auto any_by = [&](auto step) {
        if (of.mask_type == BOOLS) return any(step, (const uint8_t *)of.mask, [](uint8_t one) { return one != 0; });
        if (of.mask_type == FLOATS)
            return any(step, (const float *)of.mask, [](float one) { return !(one == HIDDEN); });
        return any(step, (const T *)of.mask, [](T one) { return !(to_float(one) == HIDDEN); });
    };
    return of.mask_strides[3] == 1 ? any_by(std::integral_constant<int64_t, 1>()) : any_by(of.mask_strides[3]);
}

// R queries, starting with number `first` of the chunk, and the block of keys that starts at key `key`.
template <class F, int R>
void attend_tile(const Attention<typename F::Number> &of, Packed<F> &packed, int64_t first, int64_t key,
                 int64_t length) {
    const int64_t *positions = packed.positions.data() + first, *masks = packed.masks.data() + first;
    int64_t from = in_panels(length), to = 0; // the panels that any of the queries sees
    for (int64_t n = 0; n < length; n += PANEL)
        for (int r = 0; r < R; r++)
            if (sees_any(of, masks[r], positions[r], key + n, std::min(PANEL, length - n))) {
                from = std::min(from, n), to = n + PANEL;
                break;
            }
    if (from >= to) return;

    alignas(64) float scores[R][BLOCK];
    for (int64_t n = from; n < to; n += PANEL) {
        Vector sums[R][COLUMNS] = {};
        const auto *keys = packed.keys.data() + n * packed.depth;
        multiply<F, R>(packed.queries.data() + first * packed.depth, packed.depth, keys, packed.depth, sums);
        for (int r = 0; r < R; r++)
            for (int c = 0; c < COLUMNS; c++) *(Vector *)(scores[r] + n + c * WIDTH) = sums[r][c] * of.scale;
    }
    const int64_t seen = std::min(to, length);
    alignas(64) typename F::Element weights[R][BLOCK / F::OF];
    float factors[R];
    for (int r = 0; r < R; r++) {
        float *of_query = scores[r];
        if (of.mask_type == CAUSAL)
            std::fill(of_query + std::clamp(positions[r] + 1 - key, from, seen), of_query + seen, HIDDEN);
        else if (of.mask_type != NONE) add_mask(of, masks[r], key + from, of_query + from, seen - from);
        std::fill(of_query + seen, of_query + to, HIDDEN);
        Vector lanes = load(of_query + from), sum{};
        for (int64_t n = from + WIDTH; n < to; n += WIDTH) lanes = larger(lanes, load(of_query + n));
        float &most = packed.most[first + r], &total_of_all = packed.totals[first + r];
        const float before = most, found = largest(lanes);
        if (found > most) most = found;
        // If all are hidden, weights are 0, or NaN for NaN scores.
        const float less = most > HIDDEN ? most : 0;
        for (int64_t n = from; n < to; n += WIDTH) {
            const Vector some = exp_of<F::TERMS>(load(of_query + n) - less);
            sum += some;
            F::store_weights(some, weights[r] + n / F::OF);
        }
        factors[r] = before > HIDDEN ? exp_of<F::TERMS>(before - less - Vector{})[0] : 1;
        total_of_all = total_of_all * factors[r] + total(sum);
    }
    for (int64_t d = 0; d < packed.columns; d += PANEL) {
        Vector sums[R][COLUMNS];
        float *to_sums = packed.sums.data() + first * packed.columns + d;
        for (int r = 0; r < R; r++)
            for (int c = 0; c < COLUMNS; c++) sums[r][c] = load(to_sums + r * packed.columns + c * WIDTH) * factors[r];
        const auto *values = packed.values.data() + d * (BLOCK / F::OF) + from / F::OF * PANEL;
        multiply<F, R>(weights[0] + from / F::OF, BLOCK / F::OF, values, (to - from) / F::OF, sums);
        for (int r = 0; r < R; r++)
            for (int c = 0; c < COLUMNS; c++) *(Vector *)(to_sums + r * packed.columns + c * WIDTH) = sums[r][c];
    }
}

// Prefetches part `number` of `parts` of the keys and values that are packed next.
template <typename T>
void fetch(const Segment<T> &segment, const T *keys, const T *values, int64_t length, int64_t width,
           int64_t value_width, int64_t number, int64_t parts) {
    for (int64_t n = length * number / parts; n < length * (number + 1) / parts; n++) {
        fetch_row(keys + n * segment.keys.of_position, width);
        fetch_row(values + n * segment.values.of_position, value_width);
    }
}

// `count` queries from number `begin` on, of one row and one KV head.
template <class F>
void attend_chunk(const Attention<typename F::Number> &of, Packed<F> &packed, int64_t row, int64_t kv_head,
                  int64_t begin, int64_t count) {
    int64_t last = 0; // of the positions
    for (int64_t q = 0; q < count; q++) {
        const auto *query = of.query + of.place(row, kv_head, begin + q, of.query_strides);
        fetch_row(query + AHEAD * of.query_strides[2], of.width);
        F::pack_row(query, of.width, packed.queries.data() + q * packed.depth);
        packed.masks[q] = of.place(row, kv_head, begin + q, of.mask_strides);
        packed.positions[q] = (begin + q) % of.length;
        last = std::max(last, packed.positions[q]);
    }
    std::fill(packed.sums.begin(), packed.sums.end(), 0.0f);
    std::fill(packed.most.begin(), packed.most.end(), HIDDEN);
    std::fill(packed.totals.begin(), packed.totals.end(), 0.0f);
    int64_t start = 0;
    for (const auto &segment : of.segments) {
        const int64_t copy = row / (of.rows / segment.copies);
        const int64_t end = of.mask_type == CAUSAL ? std::min(segment.length, last + 1 - start) : segment.length;
        const auto *keys = segment.keys.at(copy, kv_head), *values = segment.values.at(copy, kv_head);
        for (int64_t n = 0; n < end; n += BLOCK) {
            const int64_t length = std::min(BLOCK, segment.length - n), next = std::min(BLOCK, end - n - length);
            packed.pack_keys(keys, segment.keys.of_position, length, of.width);
            packed.pack_values(values, segment.values.of_position, length, of.value_width);
            keys += length * segment.keys.of_position, values += length * segment.values.of_position;
            for (int64_t first = 0; first < count; first += QUERIES) {
                if (next > 0)
                    fetch(segment, keys, values, next, of.width, of.value_width, first / QUERIES,
                          (count - 1) / QUERIES + 1);
                with_constant<QUERIES>(std::min<int64_t>(QUERIES, count - first),
                                       [&](auto some) { attend_tile<F, some>(of, packed, first, start + n, length); });
            }
        }
        start += segment.length;
    }
    for (int64_t q = 0; q < count; q++) {
        auto *output = of.output + of.place(row, kv_head, begin + q, of.output_strides);
        const float of_all = packed.totals[q], part = of_all == 0 ? 0 : 1 / of_all;
        for (int64_t d = 0; d < of.value_width; d++) store(packed.sums[q * packed.columns + d] * part, output + d);
    }
}

template <class F>
void attend_all(const Attention<typename F::Number> &of, int32_t threads) {
    const int64_t heads = of.rows * of.kv_heads, queries = of.groups() * of.length;
    const int64_t even = queries * heads / (UNITS * threads) / QUERIES * QUERIES;
    const int64_t chunk = std::clamp(even, MIN_CHUNK, MAX_CHUNK), chunks = (queries + chunk - 1) / chunk;
    in_threads(threads, heads * chunks, [&](int64_t unit, int64_t to) {
        static thread_local Packed<F> packed;
        packed.make_room(of, chunk);
        for (; unit < to; unit++) {
            const int64_t head = unit / chunks, begin = unit % chunks * chunk;
            attend_chunk(of, packed, head / of.kv_heads, head % of.kv_heads, begin, std::min(chunk, queries - begin));
        }
    });
}

} // namespace

extern "C" void fastgen_flash_attention(void *const *pointers, const int64_t *sizes, float scale, int32_t threads) {
    attend_all<Floats<float>>({pointers, sizes, scale}, threads);
}

extern "C" void fastgen_flash_attention_bf16(void *const *pointers, const int64_t *sizes, float scale,
                                             int32_t threads) {
#ifdef HAS_BF16_DOTS
    attend_all<Paired>({pointers, sizes, scale}, threads);
#else
    attend_all<Floats<Bf16>>({pointers, sizes, scale}, threads);
#endif
}

extern "C" void fastgen_flash_attention_fp16(void *const *pointers, const int64_t *sizes, float scale,
                                             int32_t threads) {
    attend_all<Floats<Fp16>>({pointers, sizes, scale}, threads);
}
