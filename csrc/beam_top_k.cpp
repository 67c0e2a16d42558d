// The best continuations of the beams of each input, with torch's order of equal scores. torch uses std::partial_sort
// for a small k: a heap of the best scores so far is compared with each remaining score in turn. Here the scores are
// added on the fly, and compared with the worst score of the heap one register at a time; most are not better. Built
// once for each instruction set, see vectors.h.

#include "vectors.h"
#include <cmath>

namespace {

constexpr int REGISTERS = 4; // compared at once

struct Candidate {
    float score;
    int64_t index;
};

struct IsBetter {
    bool operator()(const Candidate &one, const Candidate &other) const {
        return (std::isnan(one.score) && !std::isnan(other.score)) || one.score > other.score;
    }
};

inline bool all_set(const Integers &lanes) {
    int64_t words[WIDTH / 2];
    memcpy(words, &lanes, sizeof words);
    for (int i = 1; i < WIDTH / 2; i++) words[0] &= words[i];
    return words[0] == -1;
}

// The k best scores of one input: log_probs `[beams, vocabulary]` plus the score of each beam. The heap has capacity
// k + 1.
void choose(const float *log_probs, const float *beam_scores, int64_t beams, int64_t vocabulary, int64_t k,
            Candidate *heap) {
    int64_t count = 0;
    const auto look_at = [&](float score, int64_t index) {
        heap[std::min(count, k)] = {score, index};
        if (count < k) {
            if (++count == k) std::make_heap(heap, heap + k, IsBetter());
        } else if (IsBetter()(heap[k], heap[0])) {
            std::pop_heap(heap, heap + k + 1, IsBetter()); // removes the worst score
        }
    };
    constexpr int64_t BLOCK = REGISTERS * WIDTH;
    for (int64_t beam = 0; beam < beams; beam++) {
        const float *row = log_probs + beam * vocabulary, score = beam_scores[beam];
        for (int64_t n = 0; n < vocabulary;) {
            const int64_t end = std::min(n + BLOCK, vocabulary);
            if (count == k && end == n + BLOCK) {
                Integers are_worse = load(row + n) + score <= heap[0].score;
                for (int i = 1; i < REGISTERS; i++) are_worse &= load(row + n + i * WIDTH) + score <= heap[0].score;
                if (all_set(are_worse)) n = end;
            }
            for (; n < end; n++) look_at(row[n] + score, beam * vocabulary + n);
        }
    }
    std::sort_heap(heap, heap + k, IsBetter());
}

} // namespace

// log_probs `[inputs * beams, vocabulary]`, beam_scores `[inputs, beams]`; values and index `[inputs, k]`, the best
// first.
extern "C" void fastgen_beam_top_k(const float *log_probs, const float *beam_scores, float *values, int64_t *index,
                                   int64_t inputs, int64_t beams, int64_t vocabulary, int64_t k, int32_t threads) {
    in_threads(threads, inputs, [&](int64_t from, int64_t to) {
        std::vector<Candidate> heap(k + 1);
        for (; from < to; from++) {
            choose(log_probs + from * beams * vocabulary, beam_scores + from * beams, beams, vocabulary, k,
                   heap.data());
            for (int64_t i = 0; i < k; i++) {
                values[from * k + i] = heap[i].score;
                index[from * k + i] = heap[i].index;
            }
        }
    });
}
