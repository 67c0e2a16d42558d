// The arguments of the CPU and CUDA implementations of no-repeat-n-gram. Plain C, called through ctypes, without
// torch.
//
// Scores are only written, so a score is its bit pattern: 2 bytes for fp16 and bf16, 4 for fp32.
#pragma once

#include <cstdint>

extern "C" {

struct NGramProblem {
    // [rows, vocabulary_size]; strides count elements.
    void *scores;
    int64_t rows;
    int64_t vocabulary_size;
    int64_t score_row_stride;
    int64_t score_stride;

    // [rows, width]; the first `length` tokens of each row are valid.
    const void *tokens;
    int64_t width;
    int64_t token_row_stride;
    int64_t token_stride;

    // Tokens whose n-grams are banned: [rows / rows_per_source, source_width]. Null: `tokens`.
    const void *source;
    int64_t source_width;
    int64_t source_row_stride;
    int64_t source_stride;
    int64_t rows_per_source;

    // One length per row (lengths_stride 1), one for all (0), or null: `width`. Read where the kernel runs.
    const void *lengths;
    int64_t lengths_stride;

    int64_t ngram_size;
    int32_t score_bytes;  // 2 or 4
    int32_t token_bytes;  // 4 or 8
    int32_t length_bytes; // 4 or 8
    uint32_t minus_infinity;
};
}
