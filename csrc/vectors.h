// Vector registers and threads for the kernels. Built once for each instruction set, with WIDTH: the number of floats
// in a register, 4 (NEON), 8 (AVX2, FMA) or 16 (AVX-512). Only this file depends on the instruction set: conversions
// to and from fp16, and dot products of bf16.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>
#ifdef __x86_64__
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_BF16_DOTS // dot products of pairs of bf16
#endif

// The caller's OpenMP runtime: the threads of a second runtime would spin on the same cores.
#define OF_THIS_LIBRARY __attribute__((visibility("hidden"))) inline
OF_THIS_LIBRARY void (*run_in_threads)(void (*)(void *), void *, unsigned, unsigned) = nullptr;
OF_THIS_LIBRARY int (*thread_number)() = nullptr;
OF_THIS_LIBRARY int (*thread_count)() = nullptr;

namespace {

constexpr int64_t CACHE_LINE = 64;            // bytes
constexpr bool HAS_32_REGISTERS = WIDTH != 8; // AVX2 has 16

typedef float Vector __attribute__((vector_size(WIDTH * sizeof(float)), aligned(sizeof(float)), may_alias));
typedef int32_t Integers __attribute__((vector_size(WIDTH * sizeof(int32_t))));

typedef float Four __attribute__((vector_size(4 * sizeof(float)), aligned(sizeof(float)), may_alias));

inline Four folded(const Vector &lanes) {
    const Four *fours = (const Four *)&lanes;
    Four sum = fours[0];
    for (int i = 1; i < WIDTH / 4; i++) sum += fours[i];
    return sum;
}

inline float total(const Vector &lanes) {
    const Four sum = folded(lanes);
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// Lanes of two vectors: indices from 0 to WIDTH - 1 select from the first, larger ones from the second.
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(one, other, ...) __builtin_shufflevector(one, other, __VA_ARGS__)
#else
#define SHUFFLE(one, other, ...) __builtin_shuffle(one, other, Integers{__VA_ARGS__})
#endif

// Sums of lanes that are HALF apart: of the first vector in lanes whose index does not have this bit, otherwise of
// the second.
template <int HALF, int... LANE>
inline Vector sums_of_pairs(Vector one, Vector other, std::integer_sequence<int, LANE...>) {
    return SHUFFLE(one, other, ((LANE & HALF ? WIDTH : 0) + LANE)...) +
           SHUFFLE(one, other, ((LANE & HALF ? WIDTH : 0) + (LANE ^ HALF))...);
}

// Lane i of the first vector becomes the sum of vector i, for all WIDTH vectors.
template <int HALF = WIDTH / 2>
inline void sum_up(Vector (&lanes)[WIDTH]) {
    for (int i = 0; i < HALF; i++)
        lanes[i] = sums_of_pairs<HALF>(lanes[i], lanes[i + HALF], std::make_integer_sequence<int, WIDTH>());
    if constexpr (HALF > 1) sum_up<HALF / 2>(lanes);
}

// ---- storage formats of numbers

struct Bf16 {
    uint16_t bits;
};

struct Fp16 {
    uint16_t bits;
};

inline float to_float(float number) { return number; }

inline float to_float(Bf16 number) {
    const uint32_t bits = (uint32_t)number.bits << 16;
    float found;
    memcpy(&found, &bits, sizeof found);
    return found;
}

inline void store(float number, float *to) { *to = number; }

// Converts the bits of floats to bits of bf16, rounded to nearest even.
template <typename T>
inline T rounded(const T &bits) {
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline void store(float number, Bf16 *to) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    to->bits = number != number ? 0x7fc0 : rounded(bits);
}

// Eight numbers, and their storage.
typedef float Eight __attribute__((vector_size(8 * sizeof(float))));
typedef uint32_t EightWords __attribute__((vector_size(8 * sizeof(uint32_t))));
typedef uint16_t EightHalves __attribute__((vector_size(8 * sizeof(uint16_t))));

inline Eight in_format(const Eight &numbers, const float *) { return numbers; }

inline EightHalves in_format(const Eight &numbers, const Bf16 *) {
    const EightWords bits = (EightWords)numbers, is_nan = (EightWords)(numbers != numbers);
    return __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & rounded(bits)), EightHalves);
}

inline Eight from_format(const Eight &stored, const float *) { return stored; }
inline Eight from_format(const EightHalves &stored, const Bf16 *) {
    return (Eight)(__builtin_convertvector(stored, EightWords) << 16);
}

// A register of bf16, each in the upper half of 32 bits.
typedef uint32_t Bits __attribute__((vector_size(WIDTH * sizeof(uint32_t))));

inline Bits upper_halves(const Bf16 *numbers) {
    typedef uint16_t Halves __attribute__((vector_size(WIDTH * sizeof(uint16_t)), aligned(2), may_alias));
    return __builtin_convertvector(*(const Halves *)numbers, Bits) << 16;
}

inline Vector load(const float *numbers) { return *(const Vector *)numbers; }
inline Vector load(const Bf16 *numbers) { return (Vector)upper_halves(numbers); }

#ifdef __x86_64__
inline float to_float(Fp16 number) { return _cvtsh_ss(number.bits); }

inline void store(float number, Fp16 *to) { to->bits = _cvtss_sh(number, _MM_FROUND_TO_NEAREST_INT); }

inline EightHalves in_format(const Eight &numbers, const Fp16 *) {
    return (EightHalves)_mm256_cvtps_ph((__m256)numbers, _MM_FROUND_TO_NEAREST_INT);
}

inline Eight from_format(const EightHalves &stored, const Fp16 *) { return (Eight)_mm256_cvtph_ps((__m128i)stored); }

inline Vector load(const Fp16 *numbers) {
#ifdef __AVX512F__
    return (Vector)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i *)numbers));
#else
    Vector found;
    for (int i = 0; i < WIDTH; i += 8)
        _mm256_storeu_ps((float *)&found + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(numbers + i))));
    return found;
#endif
}
#else
inline float to_float(Fp16 number) {
    __fp16 half;
    memcpy(&half, &number, sizeof half);
    return half;
}

inline void store(float number, Fp16 *to) {
    const __fp16 half = number;
    memcpy(to, &half, sizeof half);
}

typedef __fp16 EightFp16 __attribute__((vector_size(8 * sizeof(__fp16))));

inline EightHalves in_format(const Eight &numbers, const Fp16 *) {
    return (EightHalves) __builtin_convertvector(numbers, EightFp16);
}

inline Eight from_format(const EightHalves &stored, const Fp16 *) {
    return __builtin_convertvector((EightFp16)stored, Eight);
}

inline Vector load(const Fp16 *numbers) {
    typedef __fp16 Halves __attribute__((vector_size(WIDTH * sizeof(__fp16)), aligned(2), may_alias));
    return __builtin_convertvector(*(const Halves *)numbers, Vector);
}
#endif

// ---- dot products of bf16: of WIDTH pairs of adjacent numbers

#ifdef __AVX512BF16__
typedef __m512i Pairs;

inline Pairs load_pairs(const void *pairs) { return _mm512_loadu_si512(pairs); }
inline void store_pairs(Pairs pairs, void *to) { _mm512_storeu_si512(to, pairs); }
inline Pairs in_all_lanes(uint32_t pair) { return _mm512_set1_epi32((int)pair); }

inline void add_products(Vector &sums, Pairs one, Pairs other) {
    sums = (Vector)_mm512_dpbf16_ps((__m512)sums, (__m512bh)one, (__m512bh)other);
}

inline void store_as_bf16(const Vector &numbers, void *to) {
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)numbers));
}
#elif defined(HAS_BF16_DOTS)
typedef Bits Pairs;

inline Pairs load_pairs(const void *pairs) { return (Pairs)vld1q_u8((const uint8_t *)pairs); }
inline void store_pairs(Pairs pairs, void *to) { vst1q_u8((uint8_t *)to, (uint8x16_t)pairs); }
inline Pairs in_all_lanes(uint32_t pair) { return pair - Pairs{}; }

inline void add_products(Vector &sums, Pairs one, Pairs other) {
    sums = vbfdotq_f32(sums, (bfloat16x8_t)one, (bfloat16x8_t)other);
}

inline void store_as_bf16(const Vector &numbers, void *to) {
    vst1_u8((uint8_t *)to, (uint8x8_t)vcvt_bf16_f32(numbers));
}
#endif

#ifdef HAS_BF16_DOTS
// Each pair has an element of the first argument in its lower half and of the second in its upper half.
inline Pairs pairs_of(const Bf16 *one, const Bf16 *other) {
    return (Pairs)(upper_halves(one) >> 16 | upper_halves(other));
}
#endif

// Divides `units` into parts [from, to), one per thread, and calls `work` with each.
template <typename Work>
inline void in_threads(int32_t threads, int64_t units, const Work &work) {
    struct Task {
        const Work &work;
        int64_t units;
    } task{work, units};
    const auto share = [](void *of) {
        const Task &task = *(const Task *)of;
        const int64_t thread = thread_number(), threads = thread_count();
        task.work(task.units * thread / threads, task.units * (thread + 1) / threads);
    };
    if (threads > 1 && run_in_threads) run_in_threads(share, &task, threads, 0);
    else work(0, units);
}

// Calls `tile` with `left`, from 1 to R, as a compile-time constant.
template <int R, typename Tile>
inline void with_constant(int64_t left, const Tile &tile) {
    if (left == R) return tile(std::integral_constant<int, R>());
    if constexpr (R > 1) with_constant<R - 1>(left, tile);
}

} // namespace
