// rows @ weight^T + bias in fp32 for a few rows and weights larger than the caches: what a decode step does.
//
// Libraries for large matrices pack a weight before they use it, which costs as much as such a product. Here it is read
// once, as it lies in memory; while one part is used, the next is fetched, so that reading costs no time of its own
// where there is enough to compute. Each sum is made in the same order, however many rows, columns and threads there are.
//
// Built once for each instruction set, with WIDTH: the floats in one of its registers, 8 (AVX2, FMA) or 16 (AVX-512).

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace {

typedef float Vector __attribute__((vector_size(WIDTH * sizeof(float)), aligned(sizeof(float)), may_alias));

constexpr int DOTS = WIDTH == 16 ? 6 : 3;       // weights whose dot products with ROWS rows registers can hold
constexpr int MOST_ROWS = WIDTH == 16 ? 12 : 6; // rows whose sums over 2 registers' columns registers can hold
constexpr int64_t MAX_ROWS = 64;                // that meet a weight while it is in the first cache
constexpr int CACHE_LINE = 16;                  // floats

struct Product {
    const float *rows;   // [row_count, in_features]
    const float *weight; // [out_features, in_features], or [in_features, out_features] if it is transposed
    const float *bias;   // [out_features] or null
    float *output;       // [row_count, out_features]
    int64_t row_count, in_features, out_features;
    bool is_transposed;
};

inline float total(const Vector &lanes) {
    typedef float Four __attribute__((vector_size(4 * sizeof(float)), aligned(sizeof(float)), may_alias));
    const Four *fours = (const Four *)&lanes;
    Four sum = fours[0];
    for (int i = 1; i < WIDTH / 4; i++) sum += fours[i];
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// Calls `tile` with the number `left`, from 1 to R, as a constant.
template <int R, typename Tile>
inline void with_constant(int64_t left, const Tile &tile) {
    if (left == R) return tile(std::integral_constant<int, R>());
    if constexpr (R > 1) with_constant<R - 1>(left, tile);
}

// ---- weight [out_features, in_features]: dot products

constexpr int ROWS = 4;              // of a tile
constexpr int GROUP = 12;            // weights that stay in the first cache while all rows meet them, ...
constexpr int64_t DOT_BLOCK = 256;   // ... so many of their elements at a time

struct Dots {
    const float *rows, *weight, *next;  // at the present block; next: what is fetched meanwhile
    int64_t stride;                     // of rows and of weights
    int64_t length;                     // of the block, a multiple of WIDTH
    Vector *sums;                       // [rows][GROUP]
};

// R rows and W weights; fetches F of the weights to come.
template <int R, int W, int F>
inline void add_dots(const Dots &dots, int64_t row) {
    const float *rows = dots.rows + row * dots.stride;
    const float *next = dots.next + (F == 1 ? row / ROWS * dots.stride : 0);
    Vector *sums = dots.sums + row * GROUP, kept[R][W];
    for (int i = 0; i < R; i++)
        for (int j = 0; j < W; j++) kept[i][j] = sums[i * GROUP + j];
    for (int64_t k = 0; k < dots.length; k += WIDTH) {
        Vector weights[W];
        for (int j = 0; j < F; j++) __builtin_prefetch(next + j * dots.stride + k, 0, 2);
        for (int j = 0; j < W; j++) weights[j] = *(const Vector *)(dots.weight + j * dots.stride + k);
        for (int i = 0; i < R; i++) {
            const Vector row_part = *(const Vector *)(rows + i * dots.stride + k);
            for (int j = 0; j < W; j++) kept[i][j] += row_part * weights[j];
        }
    }
    for (int i = 0; i < R; i++)
        for (int j = 0; j < W; j++) sums[i * GROUP + j] = kept[i][j];
}

// All rows and W weights. Of the weights to come, the first tiles fetch one each, or the first tile fetches all.
template <int W>
inline void add_dots_of_rows(const Dots &dots, int64_t count) {
    if (count <= ROWS) return with_constant<ROWS>(count, [&](auto r) { add_dots<r, W, W>(dots, 0); });
    int64_t row = 0;
    if (count < W * ROWS) {
        add_dots<ROWS, W, W>(dots, row);
        row = ROWS;
    } else {
        for (; row < W * ROWS; row += ROWS) add_dots<ROWS, W, 1>(dots, row);
    }
    for (; row + ROWS <= count; row += ROWS) add_dots<ROWS, W, 0>(dots, row);
    if (row < count) with_constant<ROWS>(count - row, [&](auto r) { add_dots<r, W, 0>(dots, row); });
}

void multiply_with_rows(const Product &product, int64_t from, int64_t to) {
    const int64_t in = product.in_features, whole = in / WIDTH * WIDTH;
    Vector sums[MAX_ROWS * GROUP];
    for (int64_t n = from; n < to; n += GROUP) {
        const int64_t group = std::min<int64_t>(GROUP, to - n);
        for (int64_t i = 0; i < product.row_count * GROUP; i++) sums[i] = Vector{};
        for (int64_t k = 0; k < whole; k += DOT_BLOCK) {
            const float *weight = product.weight + n * in + k;
            Dots dots{product.rows + k, weight, weight + GROUP * in, in, std::min(DOT_BLOCK, whole - k), sums};
            int64_t j = 0;
            for (; j + DOTS <= group; j += DOTS, dots.weight += DOTS * in, dots.next += DOTS * in, dots.sums += DOTS)
                add_dots_of_rows<DOTS>(dots, product.row_count);
            for (; j < group; j++, dots.weight += in, dots.next += in, dots.sums++)
                add_dots_of_rows<1>(dots, product.row_count);
        }
        for (int64_t i = 0; i < product.row_count; i++)
            for (int64_t j = 0; j < group; j++) {
                float sum = total(sums[i * GROUP + j]);
                for (int64_t k = whole; k < in; k++) sum += product.rows[i * in + k] * product.weight[(n + j) * in + k];
                product.output[i * product.out_features + n + j] = sum + (product.bias ? product.bias[n + j] : 0);
            }
    }
}

// ---- weight [in_features, out_features]: sums of its rows, that begin with the bias

constexpr int TILE = 2 * WIDTH;           // columns that are summed up in registers
constexpr int64_t MAX_PANEL = 64 * WIDTH; // columns that are read from one row of the weight before the next
constexpr int64_t FEW_ROWS = 3;           // so few are computed faster than memory gives the weight: all columns ...
constexpr int64_t FEW_BLOCK = 8;          // ... of so many of its rows are read at the same time

struct Sums {
    const float *rows, *weight, *next;  // as in Dots
    int64_t in_features, weight_stride, next_stride, out_features;
    int64_t length;                     // rows of the weight in the block
    float *output, *copy;               // copy: the tile's part of the weight, [length][V * WIDTH]
};

enum Copy { NONE, WRITE, READ };

// R rows and V registers of columns. Rows of the weight may lie in the same sets of the cache: the first rows that meet
// a tile copy it for the others.
template <int R, int V, Copy C>
inline void add_sums(const Sums &sums, int64_t row) {
    const float *rows = sums.rows + row * sums.in_features;
    float *output = sums.output + row * sums.out_features;
    Vector kept[R][V];
    for (int i = 0; i < R; i++)
        for (int j = 0; j < V; j++) kept[i][j] = *(const Vector *)(output + i * sums.out_features + j * WIDTH);
    for (int64_t k = 0; k < sums.length; k++) {
        const float *weight = C == READ ? sums.copy + k * V * WIDTH : sums.weight + k * sums.weight_stride;
        Vector weights[V];
        for (int j = 0; j < V; j++) weights[j] = *(const Vector *)(weight + j * WIDTH);
        if (C != READ)
            for (int j = 0; j < V * WIDTH; j += CACHE_LINE) __builtin_prefetch(sums.next + k * sums.next_stride + j, 0, 2);
        if (C == WRITE)
            for (int j = 0; j < V; j++) *(Vector *)(sums.copy + (k * V + j) * WIDTH) = weights[j];
        for (int i = 0; i < R; i++) {
            const float element = rows[i * sums.in_features + k];
            for (int j = 0; j < V; j++) kept[i][j] += element * weights[j];
        }
    }
    for (int i = 0; i < R; i++)
        for (int j = 0; j < V; j++) *(Vector *)(output + i * sums.out_features + j * WIDTH) = kept[i][j];
}

template <int V>
inline void add_sums_of_rows(const Sums &sums, int64_t count) {
    if (count <= MOST_ROWS) return with_constant<MOST_ROWS>(count, [&](auto r) { add_sums<r, V, NONE>(sums, 0); });
    int64_t row = MOST_ROWS;
    add_sums<MOST_ROWS, V, WRITE>(sums, 0);
    for (; row + MOST_ROWS <= count; row += MOST_ROWS) add_sums<MOST_ROWS, V, READ>(sums, row);
    if (row < count) with_constant<MOST_ROWS>(count - row, [&](auto r) { add_sums<r, V, READ>(sums, row); });
}

void multiply_with_columns(const Product &product, int64_t from, int64_t to) {
    const int64_t in = product.in_features, out = product.out_features;
    for (int64_t i = 0; i < product.row_count; i++)
        for (int64_t n = from; n < to; n++) product.output[i * out + n] = product.bias ? product.bias[n] : 0;
    const bool is_stream = product.row_count <= FEW_ROWS;
    const int64_t panels = is_stream ? 1 : (to - from + MAX_PANEL - 1) / MAX_PANEL;
    const int64_t tiles = ((to - from + panels - 1) / panels + TILE - 1) / TILE, panel = tiles * TILE;
    // While a tile is computed, its part of the next block is fetched, or as much of one of that block's rows.
    const int64_t block = is_stream ? FEW_BLOCK : tiles;
    const int64_t next_stride = is_stream ? out : TILE, next_tile = is_stream ? TILE : out;
    float copy[MAX_PANEL];
    for (int64_t n = from; n < to; n += panel) {
        const int64_t wide = std::min(panel, to - n);
        for (int64_t k = 0; k < in; k += block) {
            const float *weight = product.weight + k * out + n;
            const float *next = k + block < in ? weight + block * out : product.weight + n + panel;
            const int64_t length = std::min(block, in - k);
            Sums sums{product.rows + k, weight, next, in, out, next_stride, out, length, product.output + n, copy};
            int64_t j = 0;
            for (; j + TILE <= wide; j += TILE, sums.weight += TILE, sums.output += TILE, sums.next += next_tile)
                add_sums_of_rows<2>(sums, product.row_count);
            for (; j + WIDTH <= wide; j += WIDTH, sums.weight += WIDTH, sums.output += WIDTH)
                add_sums_of_rows<1>(sums, product.row_count);
            for (; j < wide; j++)
                for (int64_t i = 0; i < product.row_count; i++)
                    for (int64_t q = 0; q < length; q++)
                        product.output[i * out + n + j] += product.rows[i * in + k + q] * weight[q * out + j];
        }
    }
}

// ---- threads

// The columns from `from` on, before `to`.
void multiply(const Product &product, int64_t from, int64_t to) {
    for (int64_t row = 0; row < product.row_count; row += MAX_ROWS) {
        Product part = product;
        part.rows += row * product.in_features;
        part.output += row * product.out_features;
        part.row_count = std::min(MAX_ROWS, product.row_count - row);
        (product.is_transposed ? multiply_with_columns : multiply_with_rows)(part, from, to);
    }
}

// Of the OpenMP that the caller runs on: a second one's threads would wait for work on the cores of the first one's.
void (*run_in_threads)(void (*)(void *), void *, unsigned, unsigned) = nullptr;
int (*thread_number)() = nullptr;
int (*thread_count)() = nullptr;

void multiply_share(void *of) {
    const Product &product = *(const Product *)of;
    const int64_t columns = product.is_transposed ? TILE : GROUP, thread = thread_number(), threads = thread_count();
    const int64_t shares = (product.out_features + columns - 1) / columns;
    const int64_t from = shares * thread / threads * columns, to = shares * (thread + 1) / threads * columns;
    if (from < to) multiply(product, from, std::min(to, product.out_features));
}

} // namespace

// GOMP_parallel, omp_get_thread_num and omp_get_num_threads; without them everything runs in the thread that calls.
extern "C" void fastgen_few_rows_threads(void *run, void *number, void *count) {
    run_in_threads = (void (*)(void (*)(void *), void *, unsigned, unsigned))run;
    thread_number = (int (*)())number;
    thread_count = (int (*)())count;
}

extern "C" void fastgen_few_rows(const float *rows, const float *weight, const float *bias, float *output,
                                 int64_t row_count, int64_t in_features, int64_t out_features, int32_t is_transposed,
                                 int32_t threads) {
    Product product{rows, weight, bias, output, row_count, in_features, out_features, is_transposed != 0};
    if (threads > 1 && run_in_threads) run_in_threads(multiply_share, &product, threads, 0);
    else multiply(product, 0, out_features);
}
