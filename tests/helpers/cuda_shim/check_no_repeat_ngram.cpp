// Runs both implementations of csrc/ on a few problems, for sanitizers: buffers of exactly the size that they may touch.
//
// No row bans a token twice, so that no two threads write one score, and the race detector needs no exceptions.

#include <cstdio>
#include <limits>
#include <memory>
#include <set>
#include <vector>

#include "no_repeat_ngram.h"

extern "C" void fastgen_no_repeat_ngram_cpu(const NGramProblem* problem, int32_t max_threads);
extern "C" const char* fastgen_no_repeat_ngram_cuda(const NGramProblem* problem, int32_t device, void* stream);

namespace {

struct Shape {
    int64_t rows, width, ngram_size, beams;  // beams 0: a row's own n-grams
};

constexpr Shape kShapes[] = {
    {1, 1, 1, 0},     {3, 7, 3, 0},      {3, 8, 8, 0},    {3, 8, 9, 0},    {2, 129, 2, 0},
    {2, 128, 128, 0}, {2, 600, 33, 0},   {1, 600, 34, 0}, {2, 600, 64, 0}, {2, 700, 65, 0},
    {2, 1000, 99, 0}, {6, 300, 40, 3},   {4, 5, 7, 2},    {4, 9, 1, 4},    {8, 1 << 15, 5, 0},
};
constexpr int64_t kWidestOnShim = 1000;

template <typename T>
struct Matrix {  // [rows, columns], one column after another if `is_transposed`
    int64_t rows, columns, row_stride, stride;
    std::unique_ptr<T[]> values;

    Matrix(int64_t rows, int64_t columns, bool is_transposed)
        : rows(rows),
          columns(columns),
          row_stride(is_transposed ? 1 : columns),
          stride(is_transposed ? rows : 1),
          values(new T[rows * columns]()) {}

    T& at(int64_t row, int64_t column) { return values[row * row_stride + column * stride]; }
};

// Runs of n - 1 zeros, each followed by a token that is there once: [0 0 1 0 0 2 0 0 …], ending with such a run.
template <typename Token>
void fill(Matrix<Token>& tokens, int64_t ngram_size, const std::vector<int64_t>& lengths) {
    for (int64_t row = 0; row < tokens.rows; ++row) {
        for (int64_t i = 0; i < tokens.columns; ++i) {
            const int64_t from_end = lengths[row] - i;
            tokens.at(row, i) = static_cast<Token>(from_end > 0 && from_end % ngram_size ? 0 : i + 1);
        }
    }
}

template <typename Token>
std::set<int64_t> banned(Matrix<Token>& tokens, int64_t row, int64_t length, Matrix<Token>& source, int64_t source_row,
                         int64_t source_length, int64_t ngram_size) {
    std::set<int64_t> result;
    const int64_t start = length - ngram_size + 1;
    for (int64_t window = 0; start >= 0 && window + ngram_size <= source_length; ++window) {
        int64_t i = 0;
        while (i < ngram_size - 1 && source.at(source_row, window + i) == tokens.at(row, start + i)) ++i;
        if (i == ngram_size - 1) result.insert(source.at(source_row, window + i));
    }
    return result;
}

template <typename Token, typename Score>
bool check(const Shape& shape, bool is_transposed, bool on_gpu) {
    const int64_t inputs = shape.beams ? shape.rows / shape.beams : 0;
    const int64_t vocabulary_size = shape.width - 1 + (shape.width < 3);  // the last token is outside
    const Score minus_infinity = std::numeric_limits<Score>::max();
    Matrix<Token> tokens(shape.rows, shape.width, is_transposed), source(inputs, shape.width + 3, is_transposed);
    Matrix<Score> scores(shape.rows, vocabulary_size, is_transposed);
    std::vector<int64_t> lengths(shape.rows);
    for (int64_t row = 0; row < shape.rows; ++row) lengths[row] = shape.width - row % 3;
    fill(tokens, shape.ngram_size, lengths);
    fill(source, shape.ngram_size, std::vector<int64_t>(inputs, shape.width + 3));

    NGramProblem p{};
    p.scores = scores.values.get(), p.rows = shape.rows, p.vocabulary_size = vocabulary_size;
    p.score_row_stride = scores.row_stride, p.score_stride = scores.stride;
    p.tokens = tokens.values.get(), p.width = shape.width;
    p.token_row_stride = tokens.row_stride, p.token_stride = tokens.stride;
    if (shape.beams) {
        p.source = source.values.get(), p.source_width = shape.width + 3, p.rows_per_source = shape.beams;
        p.source_row_stride = source.row_stride, p.source_stride = source.stride;
    }
    p.lengths = lengths.data(), p.lengths_stride = 1, p.length_bytes = 8;
    p.ngram_size = shape.ngram_size, p.score_bytes = sizeof(Score), p.token_bytes = sizeof(Token);
    p.minus_infinity = minus_infinity;
    if (on_gpu) {
        if (const char* error = fastgen_no_repeat_ngram_cuda(&p, 0, nullptr)) {
            std::printf("%s\n", error);
            return false;
        }
    } else {
        fastgen_no_repeat_ngram_cpu(&p, 4);
    }

    for (int64_t row = 0; row < shape.rows; ++row) {
        const std::set<int64_t> expected =
            shape.beams ? banned(tokens, row, lengths[row], source, row / shape.beams, shape.width + 3, p.ngram_size)
                        : banned(tokens, row, lengths[row], tokens, row, lengths[row], p.ngram_size);
        for (int64_t token = 0; token < vocabulary_size; ++token) {
            if (scores.at(row, token) == (expected.count(token) ? minus_infinity : 0)) continue;
            std::printf("token %lld of row %lld is wrong\n", static_cast<long long>(token),
                        static_cast<long long>(row));
            return false;
        }
    }
    return true;
}

bool check_types(const Shape& shape, bool is_transposed, bool on_gpu) {
    return check<int32_t, uint16_t>(shape, is_transposed, on_gpu) &&
           check<int64_t, uint32_t>(shape, is_transposed, on_gpu);
}

}  // namespace

int main() {
    for (const Shape& shape : kShapes) {
        for (const bool is_transposed : {false, true}) {
            for (const bool on_gpu : {false, true}) {
                if (on_gpu && shape.width > kWidestOnShim) continue;
                if (check_types(shape, is_transposed, on_gpu)) continue;
                std::printf("%lld rows of %lld tokens, n %lld, %s\n", static_cast<long long>(shape.rows),
                            static_cast<long long>(shape.width), static_cast<long long>(shape.ngram_size),
                            on_gpu ? "CUDA" : "C++");
                return 1;
            }
        }
    }
    std::printf("all equal\n");
    return 0;
}
