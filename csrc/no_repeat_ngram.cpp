// No-repeat-n-gram on the CPU: rows in parallel, each window of n tokens compared with the row's last n - 1.

#include "no_repeat_ngram.h"

#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

namespace {

// Starting a thread takes about as long as comparing this many windows.
constexpr int64_t kWindowsPerThread = 1 << 17;

template <typename Token>
struct Sequence {
    const Token *first;
    int64_t stride;

    Token operator[](int64_t i) const { return first[i * stride]; }
};

template <typename Length>
int64_t length_of(const NGramProblem &p, int64_t row) {
    const int64_t length = static_cast<const Length *>(p.lengths)[row * p.lengths_stride];
    return std::clamp<int64_t>(length, 0, p.width);
}

int64_t length_of(const NGramProblem &p, int64_t row) {
    if (!p.lengths) return p.width;
    return p.length_bytes == 4 ? length_of<int32_t>(p, row) : length_of<int64_t>(p, row);
}

template <typename Token, typename Score>
void ban_in_row(const NGramProblem &p, int64_t row) {
    const int64_t length = length_of(p, row);
    const int64_t prefix_size = p.ngram_size - 1;
    const Sequence<Token> tokens{static_cast<const Token *>(p.tokens) + row * p.token_row_stride, p.token_stride};
    const Sequence<Token> source =
        p.source ? Sequence<Token>{static_cast<const Token *>(p.source) + row / p.rows_per_source * p.source_row_stride,
                                   p.source_stride}
                 : tokens;
    const int64_t windows = (p.source ? p.source_width : length) - prefix_size;
    if (length < prefix_size || windows <= 0) return;

    const Sequence<Token> prefix{tokens.first + (length - prefix_size) * tokens.stride, tokens.stride};
    Score *scores = static_cast<Score *>(p.scores) + row * p.score_row_stride;
    const auto ban = [&](int64_t window) {
        const int64_t token = source[window + prefix_size];
        if (token >= 0 && token < p.vocabulary_size) {
            scores[token * p.score_stride] = static_cast<Score>(p.minus_infinity);
        }
    };
    if (prefix_size == 0) {
        for (int64_t window = 0; window < windows; ++window) ban(window);
        return;
    }
    const Token last = prefix[prefix_size - 1];
    for (int64_t window = 0; window < windows; ++window) {
        if (source[window + prefix_size - 1] != last) continue;
        int64_t i = 0;
        while (i < prefix_size - 1 && source[window + i] == prefix[i]) ++i;
        if (i == prefix_size - 1) ban(window);
    }
}

template <typename Token, typename Score>
void ban_in_rows(const NGramProblem &p, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) ban_in_row<Token, Score>(p, row);
}

using BanInRows = void (*)(const NGramProblem &, int64_t, int64_t);

BanInRows implementation_for(const NGramProblem &p) {
    if (p.token_bytes == 4) {
        return p.score_bytes == 2 ? ban_in_rows<int32_t, uint16_t> : ban_in_rows<int32_t, uint32_t>;
    }
    return p.score_bytes == 2 ? ban_in_rows<int64_t, uint16_t> : ban_in_rows<int64_t, uint32_t>;
}

} // namespace

extern "C" void fastgen_no_repeat_ngram_cpu(const NGramProblem *problem, int32_t max_threads) {
    const NGramProblem &p = *problem;
    const BanInRows ban = implementation_for(p);
    const int64_t windows = p.rows * (p.source ? p.source_width : p.width);
    const int64_t threads = std::max<int64_t>(1, std::min({int64_t{max_threads}, p.rows, windows / kWindowsPerThread}));

    std::vector<std::thread> others;
    int64_t begin = 0;
    try {
        for (; static_cast<int64_t>(others.size()) + 1 < threads;) {
            const int64_t end = begin + p.rows / threads;
            others.emplace_back(ban, std::cref(p), begin, end);
            begin = end;
        }
    } catch (const std::system_error &) {
        // The system refuses more threads: this thread does the rest.
    }
    ban(p, begin, p.rows);
    for (std::thread &other : others) other.join();
}
