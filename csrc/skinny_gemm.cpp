// rows @ weight^T + bias for a few rows and weights larger than the caches, as in a decode step, optionally followed
// by ReLU or GELU, or by the sum with other rows. In fp32, and in bf16 and fp16 with sums in fp32.
//
// Libraries for large matrices pack a weight before they use it, which costs as much as such a product. Here it is
// read once, in place; the next part is prefetched while the current one is used, so reading is free if there is
// enough to compute. The order of each sum does not depend on the number of rows, columns and threads. Built once for
// each instruction set, see vectors.h.

#include "gelu.h"

namespace {

constexpr int DOTS = HAS_32_REGISTERS ? 6 : 3;       // weights whose dot products with ROWS rows fit into registers
constexpr int MOST_ROWS = HAS_32_REGISTERS ? 12 : 6; // rows whose sums over 2 registers of columns fit into registers
constexpr int64_t MAX_ROWS = 64;                     // rows multiplied with a weight while it is in the L1 cache
constexpr int64_t STREAM_ROWS = 3; // up to this many rows, computing is faster than reading the weight

// ---- formats: how registers of elements are multiplied

// Weights of this type are converted to fp32 in registers; rows are fp32 already.
template <typename T>
struct Single {
    typedef float Row;                 // type of the rows
    typedef T Number;                  // type of weight, bias and output
    typedef Vector Part;               // a register
    static constexpr int STEP = WIDTH; // elements along in_features in a step of a dot product, ...
    static constexpr int PAIR = 1;     // ... and in a step of a sum of rows of the weight
    static Part row_part(const Row *row) { return load(row); }
    static Part weight_part(const Number *weight) { return load(weight); }
    static Part element(const Row *row) { return *row - Vector{}; }
    template <int V>
    static void columns(const Number *first, const Number *, Part (&parts)[V]) {
        for (int j = 0; j < V; j++) parts[j] = load(first + j * WIDTH);
    }
    static void add(Vector &sum, Part row, Part weight) { sum += row * weight; }
};

#ifdef HAS_BF16_DOTS
// Pairs of adjacent elements of a row are multiplied with pairs of a weight.
struct Paired {
    typedef Bf16 Row, Number;
    typedef Pairs Part;
    static constexpr int STEP = 2 * WIDTH, PAIR = 2;
    static Part row_part(const Row *row) { return load_pairs(row); }
    static Part weight_part(const Number *weight) { return load_pairs(weight); }
    static Part element(const Row *row) {
        uint32_t pair;
        memcpy(&pair, row, sizeof pair);
        return in_all_lanes(pair);
    }
    // Interleaves two rows of the weight: the two elements of each column become adjacent.
    template <int V>
    static void columns(const Number *first, const Number *second, Part (&parts)[V]) {
        for (int j = 0; j < V; j++) parts[j] = pairs_of(first + j * WIDTH, second + j * WIDTH);
    }
    static void add(Vector &sum, Part row, Part weight) { add_products(sum, row, weight); }
};
#endif

template <class F>
struct Product {
    const typename F::Row *rows;      // [row_count, in_features]
    const typename F::Number *weight; // [out_features, in_features], or [in_features, out_features] if it is transposed
    const typename F::Number *bias;   // [out_features] or null
    const typename F::Number *added;  // [row_count, out_features] or null
    typename F::Number *output;       // [row_count, out_features]
    int64_t row_count, in_features, out_features;
    bool is_transposed;
    int32_t activation; // an Activation

    // Writes WIDE elements of the output from `place` on. The sum is rounded before anything is computed from it, as if
    // it had been stored.
    template <int WIDE>
    void finish(Eight numbers, int64_t place) const {
        auto stored = in_format(numbers, output);
        if (activation) stored = in_format(activated(from_format(stored, output), activation), output);
        if (added) {
            auto others = stored;
            memcpy(&others, added + place, WIDE * sizeof *output);
            stored = in_format(from_format(stored, output) + from_format(others, output), output);
        }
        memcpy(output + place, &stored, WIDE * sizeof *output);
    }
};

// ---- weight [out_features, in_features]: dot products

constexpr int ROWS = 4; // per tile

// Bytes of each weight that stay in the L1 cache while all rows are multiplied with them: enough to be worth reading
// and writing the sums again and, for few rows, which finish a block of wide registers quickly, little enough to
// prefetch the next block in time.
inline int64_t block_bytes(int64_t row_count) { return WIDTH == 16 && row_count <= 8 ? 1024 : 3072; }

template <class F>
struct Dots {
    const typename F::Row *rows;             // at the current block, as the weight
    const typename F::Number *weight, *next; // next: the following weights, which are prefetched
    int64_t stride;                          // of rows and weights
    int64_t length;                          // of the block, a multiple of STEP
    bool is_first, is_last;                  // block: sums start, sums are totalled
    Vector *sums;                            // [rows][weights], between two blocks
    float *totals;                           // [rows][weights]
};

// Totals of up to WIDTH registers are computed at once, while the next tile's products start.
template <int R, int W>
inline void store_totals(const Vector (&sums)[R][W], float *totals) {
    for (int first = 0; first < R * W; first += WIDTH) {
        Vector lanes[WIDTH];
        for (int i = 0; i < WIDTH; i++)
            lanes[i] = first + i < R * W ? sums[(first + i) / W][(first + i) % W] : Vector{};
        sum_up(lanes);
        *(Vector *)(totals + first) = lanes[0];
    }
}

// R rows and W weights; prefetches N of the following weights.
template <class F, int R, int W, int N>
inline void add_dots(const Dots<F> &dots, int64_t row) {
    const typename F::Row *rows = dots.rows + row * dots.stride;
    const typename F::Number *next = dots.next + (N < W ? row / ROWS * N * dots.stride : 0);
    Vector *sums = dots.sums + row * W, kept[R][W];
    for (int i = 0; i < R; i++)
        for (int j = 0; j < W; j++) kept[i][j] = dots.is_first ? Vector{} : sums[i * W + j];
    for (int64_t k = 0; k < dots.length; k += F::STEP) {
        typename F::Part weights[W];
        for (int j = 0; j < N; j++) __builtin_prefetch(next + j * dots.stride + k, 0, 2);
        for (int j = 0; j < W; j++) weights[j] = F::weight_part(dots.weight + j * dots.stride + k);
        for (int i = 0; i < R; i++) {
            const typename F::Part row_part = F::row_part(rows + i * dots.stride + k);
            for (int j = 0; j < W; j++) F::add(kept[i][j], row_part, weights[j]);
        }
    }
    if (dots.is_last) return store_totals(kept, dots.totals + row * W);
    for (int i = 0; i < R; i++)
        for (int j = 0; j < W; j++) sums[i * W + j] = kept[i][j];
}

// The first tiles, which prefetch N of the following weights each; returns the row after them.
template <class F, int W, int N>
inline int64_t add_dots_and_fetch(const Dots<F> &dots) {
    int64_t row = 0;
    for (int fetched = 0; fetched < W; fetched += N, row += ROWS) add_dots<F, ROWS, W, N>(dots, row);
    return row;
}

// Fewer rows than two tiles, and W weights: the first tile prefetches all following weights.
template <class F, int W>
inline void add_dots_of_few_rows(const Dots<F> &dots, int64_t count) {
    if (count <= ROWS) return with_constant<ROWS>(count, [&](auto r) { add_dots<F, r, W, W>(dots, 0); });
    add_dots<F, ROWS, W, W>(dots, 0);
    with_constant<ROWS>(count - ROWS, [&](auto r) { add_dots<F, r, W, 0>(dots, ROWS); });
}

// All rows and W weights. With more tiles, each prefetches fewer of the following weights.
template <class F, int W>
inline void add_dots_of_rows(const Dots<F> &dots, int64_t count) {
    if (count < 2 * ROWS) return add_dots_of_few_rows<F, W>(dots, count);
    constexpr int HALF = (W + 1) / 2, THIRD = (W + 2) / 3;
    int64_t row;
    if (count >= W * ROWS) row = add_dots_and_fetch<F, W, 1>(dots);
    else if (count >= 3 * ROWS) row = add_dots_and_fetch<F, W, THIRD>(dots);
    else row = add_dots_and_fetch<F, W, HALF>(dots);
    for (; row + ROWS <= count; row += ROWS) add_dots<F, ROWS, W, 0>(dots, row);
    if (row < count) with_constant<ROWS>(count - row, [&](auto r) { add_dots<F, r, W, 0>(dots, row); });
}

// Translates the addresses of PAGES pages of the part of the weight that is read next. A page that is not in the TLB
// is looked up in memory, and all instructions after its first access wait for that. If memory bandwidth is the limit
// anyway, this does not gain.
inline void translate_pages(const void *part, int64_t bytes) {
    constexpr uintptr_t PAGE = 4096, PAGES = 8, BATCH = PAGES * PAGE;
    const uintptr_t begin = (uintptr_t)part + BATCH, end = begin + bytes;
    for (uintptr_t batch = (begin + BATCH - 1) / BATCH * BATCH; batch < end; batch += BATCH)
        for (uintptr_t page = batch; page < batch + BATCH; page += PAGE) __builtin_prefetch((const void *)page, 0, 2);
}

// Output of W weights: totals, the remainder of in_features after the whole steps, bias.
template <class F, int W>
inline void store_output(const Product<F> &product, const float *totals, int64_t whole, int64_t n) {
    const int64_t in = product.in_features;
    Eight bias = {};
    for (int j = 0; product.bias && j < W; j++) bias[j] = to_float(product.bias[n + j]);
    for (int64_t i = 0; i < product.row_count; i++) {
        Eight numbers;
        memcpy(&numbers, totals + i * W, sizeof numbers);
        for (int64_t k = whole; k < in; k++)
            for (int j = 0; j < W; j++)
                numbers[j] += to_float(product.rows[i * in + k]) * to_float(product.weight[(n + j) * in + k]);
        product.template finish<W>(numbers + bias, i * product.out_features + n);
    }
}

// W weights from n on, block by block.
template <class F, int W>
inline void multiply_weights(const Product<F> &product, int64_t n) {
    const int64_t in = product.in_features, whole = in / F::STEP * F::STEP;
    const int64_t block = block_bytes(product.row_count) / sizeof(typename F::Number);
    if (product.row_count > STREAM_ROWS) translate_pages(product.weight + n * in, W * in * sizeof(typename F::Number));
    Vector sums[MAX_ROWS * W];
    float totals[MAX_ROWS * W + std::max(WIDTH, 8)]; // whole registers are stored, and eight elements read
    for (int64_t k = 0; k == 0 || k < whole; k += block) {
        const typename F::Number *weight = product.weight + n * in + k;
        const int64_t length = std::min(block, whole - k);
        const bool is_last = k + length == whole;
        add_dots_of_rows<F, W>({product.rows + k, weight, weight + W * in, in, length, k == 0, is_last, sums, totals},
                               product.row_count);
    }
    store_output<F, W>(product, totals, whole, n);
}

template <class F>
void multiply_with_rows(const Product<F> &product, int64_t from, int64_t to) {
    int64_t n = from;
    for (; n + DOTS <= to; n += DOTS) multiply_weights<F, DOTS>(product, n);
    for (; n < to; n++) multiply_weights<F, 1>(product, n);
}

// ---- weight [in_features, out_features]: sums of its rows, starting with the bias

constexpr int TILE = 2 * WIDTH;           // columns that are summed in registers
constexpr int64_t MAX_PANEL = 64 * WIDTH; // columns of one row of the weight that are read before the next row
constexpr int64_t FEW_BLOCK = 8;          // rows of the weight whose columns are all read at the same time

template <class F>
struct Sums {
    const typename F::Row *rows; // as in Dots
    const typename F::Number *weight, *next;
    int64_t in_features, weight_stride, next_stride;
    int64_t length; // rows of the weight in the block
    float *sums;    // [rows][sums_stride]
    int64_t sums_stride;
    typename F::Part *copy; // the tile's part of the weight
};

enum Copy { NONE, WRITE, READ };

// R rows and V registers of columns. Rows of the weight may map to the same cache sets, so the first rows of a tile
// copy it for the remaining rows.
template <class F, int R, int V, Copy C>
inline void add_sums(const Sums<F> &sums, int64_t row) {
    const typename F::Row *rows = sums.rows + row * sums.in_features;
    float *output = sums.sums + row * sums.sums_stride;
    Vector kept[R][V];
    for (int i = 0; i < R; i++)
        for (int j = 0; j < V; j++) kept[i][j] = *(const Vector *)(output + i * sums.sums_stride + j * WIDTH);
    for (int64_t k = 0; k < sums.length; k += F::PAIR) {
        const typename F::Number *weight = sums.weight + k * sums.weight_stride;
        typename F::Part weights[V], *copy = sums.copy + k / F::PAIR * V;
        if (C == READ)
            for (int j = 0; j < V; j++) weights[j] = copy[j];
        else {
            F::columns(weight, weight + sums.weight_stride, weights);
            for (int p = 0; p < F::PAIR; p++)
                for (int j = 0; j < V * WIDTH; j += CACHE_LINE / sizeof *weight)
                    __builtin_prefetch(sums.next + (k + p) * sums.next_stride + j, 0, 2);
        }
        if (C == WRITE)
            for (int j = 0; j < V; j++) copy[j] = weights[j];
        for (int i = 0; i < R; i++) {
            const typename F::Part element = F::element(rows + i * sums.in_features + k);
            for (int j = 0; j < V; j++) F::add(kept[i][j], element, weights[j]);
        }
    }
    for (int i = 0; i < R; i++)
        for (int j = 0; j < V; j++) *(Vector *)(output + i * sums.sums_stride + j * WIDTH) = kept[i][j];
}

template <class F, int V>
inline void add_sums_of_rows(const Sums<F> &sums, int64_t count) {
    if (count <= MOST_ROWS) return with_constant<MOST_ROWS>(count, [&](auto r) { add_sums<F, r, V, NONE>(sums, 0); });
    int64_t row = MOST_ROWS;
    add_sums<F, MOST_ROWS, V, WRITE>(sums, 0);
    for (; row + MOST_ROWS <= count; row += MOST_ROWS) add_sums<F, MOST_ROWS, V, READ>(sums, row);
    if (row < count) with_constant<MOST_ROWS>(count - row, [&](auto r) { add_sums<F, r, V, READ>(sums, row); });
}

// Writes `count` sums of a row to the output at `place`.
template <class F>
inline void finish_sums(const Product<F> &product, const float *sums, int64_t place, int64_t count) {
    for (; count >= 8; count -= 8, sums += 8, place += 8) {
        Eight numbers;
        memcpy(&numbers, sums, sizeof numbers);
        product.template finish<8>(numbers, place);
    }
    for (; count > 0; count--, sums++, place++) product.template finish<1>(Eight{*sums}, place);
}

template <class F>
void multiply_with_columns(const Product<F> &product, int64_t from, int64_t to) {
    const int64_t in = product.in_features, out = product.out_features;
    const bool is_stream = product.row_count <= STREAM_ROWS;
    const int64_t panels = is_stream ? 1 : (to - from + MAX_PANEL - 1) / MAX_PANEL;
    const int64_t tiles = ((to - from + panels - 1) / panels + TILE - 1) / TILE, panel = tiles * TILE;
    // While a tile is computed, its part of the next block is prefetched, or an equal part of one of that block's
    // rows.
    const int64_t block = is_stream ? FEW_BLOCK : (tiles + F::PAIR - 1) / F::PAIR * F::PAIR;
    const int64_t next_stride = is_stream ? out : TILE, next_tile = is_stream ? TILE : out;
    typename F::Part copy[MAX_PANEL / WIDTH + 2];
    static thread_local std::vector<float> sums; // elements of the output are rounded once, at the end
    sums.resize(product.row_count * panel);
    for (int64_t n = from; n < to; n += panel) {
        const int64_t wide = std::min(panel, to - n);
        for (int64_t i = 0; i < product.row_count; i++)
            for (int64_t j = 0; j < wide; j++) sums[i * panel + j] = product.bias ? to_float(product.bias[n + j]) : 0;
        for (int64_t k = 0; k < in; k += block) {
            const typename F::Number *weight = product.weight + k * out + n;
            const typename F::Number *next = k + block < in ? weight + block * out : product.weight + n + panel;
            const int64_t length = std::min(block, in - k);
            Sums<F> part{product.rows + k, weight, next, in, out, next_stride, length, sums.data(), panel, copy};
            int64_t j = 0;
            for (; j + TILE <= wide; j += TILE, part.weight += TILE, part.sums += TILE, part.next += next_tile)
                add_sums_of_rows<F, 2>(part, product.row_count);
            for (; j + WIDTH <= wide; j += WIDTH, part.weight += WIDTH, part.sums += WIDTH)
                add_sums_of_rows<F, 1>(part, product.row_count);
            for (; j < wide; j++)
                for (int64_t i = 0; i < product.row_count; i++)
                    for (int64_t q = 0; q < length; q++)
                        sums[i * panel + j] += to_float(product.rows[i * in + k + q]) * to_float(weight[q * out + j]);
        }
        for (int64_t i = 0; i < product.row_count; i++)
            finish_sums(product, sums.data() + i * panel, i * out + n, wide);
    }
}

// ---- threads

// The columns from `from` to `to` - 1.
template <class F>
void multiply(const Product<F> &product, int64_t from, int64_t to) {
    for (int64_t row = 0; row < product.row_count; row += MAX_ROWS) {
        Product<F> part = product;
        part.rows += row * product.in_features;
        part.output += row * product.out_features;
        if (product.added) part.added += row * product.out_features;
        part.row_count = std::min(MAX_ROWS, product.row_count - row);
        product.is_transposed ? multiply_with_columns(part, from, to) : multiply_with_rows(part, from, to);
    }
}

template <class F>
void multiply_in(int32_t threads, const Product<F> &product) {
    const int64_t columns = product.is_transposed ? TILE : DOTS;
    in_threads(threads, (product.out_features + columns - 1) / columns, [&](int64_t from, int64_t to) {
        if (from < to) multiply(product, from * columns, std::min(to * columns, product.out_features));
    });
}

// Converts the rows to fp32 first, as the weights are in registers.
template <typename T>
void multiply_widened(int32_t threads, const T *rows, Product<Single<T>> product) {
    std::vector<float> widened(product.row_count * product.in_features);
    for (size_t i = 0; i < widened.size(); i++) widened[i] = to_float(rows[i]);
    product.rows = widened.data();
    multiply_in(threads, product);
}

} // namespace

// GOMP_parallel, omp_get_thread_num and omp_get_num_threads; without them everything runs in the thread that calls.
extern "C" void fastgen_threads(void *run, void *number, void *count) {
    run_in_threads = (void (*)(void (*)(void *), void *, unsigned, unsigned))run;
    thread_number = (int (*)())number;
    thread_count = (int (*)())count;
}

extern "C" void fastgen_skinny_gemm(const float *rows, const float *weight, const float *bias, const float *added,
                                    float *output, int64_t row_count, int64_t in_features, int64_t out_features,
                                    int32_t is_transposed, int32_t activation, int32_t threads) {
    multiply_in<Single<float>>(threads, {rows, weight, bias, added, output, row_count, in_features, out_features,
                                         is_transposed != 0, activation});
}

extern "C" void fastgen_skinny_gemm_bf16(const Bf16 *rows, const Bf16 *weight, const Bf16 *bias, const Bf16 *added,
                                         Bf16 *output, int64_t row_count, int64_t in_features, int64_t out_features,
                                         int32_t is_transposed, int32_t activation, int32_t threads) {
#ifdef HAS_BF16_DOTS
    if (in_features % 2 == 0)
        return multiply_in<Paired>(threads, {rows, weight, bias, added, output, row_count, in_features, out_features,
                                             is_transposed != 0, activation});
#endif
    multiply_widened<Bf16>(
        threads, rows,
        {nullptr, weight, bias, added, output, row_count, in_features, out_features, is_transposed != 0, activation});
}

extern "C" void fastgen_skinny_gemm_fp16(const Fp16 *rows, const Fp16 *weight, const Fp16 *bias, const Fp16 *added,
                                         Fp16 *output, int64_t row_count, int64_t in_features, int64_t out_features,
                                         int32_t is_transposed, int32_t activation, int32_t threads) {
    multiply_widened<Fp16>(
        threads, rows,
        {nullptr, weight, bias, added, output, row_count, in_features, out_features, is_transposed != 0, activation});
}
