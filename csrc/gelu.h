// Activations of fp32 numbers in registers: relu, and GELU, x / 2 * (1 + f(x)), where f is an odd function that grows
// to 1: erf(x / sqrt(2)), or tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)).
//
// Both functions are z * P(z^2) / Q(z^2), fitted to a relative error of 1e-7 or less between 0 and the limit, from
// which on they are 1 in fp32. Neither an exponential nor a table is needed.

#pragma once

#include "vectors.h"

namespace {

enum Activation : int32_t { NO_ACTIVATION, RELU, GELU, GELU_TANH }; // as ACTIVATIONS in fastgen/ops/activations.py

struct OddFunction {
    float limit;
    float numerator[6], denominator[6]; // coefficients of P and Q, the constant first
};

constexpr OddFunction ERF = {
    3.925f,
    {1.1283791065e0f, 1.9184079766e-1f, 5.2934192121e-2f, 3.8266787305e-3f, 2.8617208591e-4f, 2.0374936867e-6f},
    {1, 5.0334674120e-1f, 1.1469857395e-1f, 1.5090540051e-2f, 1.1772472644e-3f, 3.8029742427e-5f}};
constexpr OddFunction TANH = {
    8.67f,
    {1, 1.4110358059e-1f, 4.4408421963e-3f, 4.2660725740e-5f, 1.1343539796e-7f, 3.8191595719e-11f},
    {1, 4.7443690896e-1f, 2.9253145680e-2f, 5.0370825920e-4f, 2.6400687148e-6f, 3.0359310621e-9f}};

template <typename V>
inline V polynomial(const float (&coefficients)[6], const V &at) {
    V sum = coefficients[5] - V{};
    for (int i = 4; i >= 0; i--) sum = sum * at + coefficients[i];
    return sum;
}

template <typename V>
inline V value_of(const OddFunction &function, const V &z) {
    const V square = z * z, limit = function.limit - V{}, one = 1 - V{};
    const V ratio = z * polynomial(function.numerator, square) / polynomial(function.denominator, square);
    const V bounded = ratio > one ? one : (ratio < -one ? -one : ratio); // NaN stays
    return z > limit ? one : (z < -limit ? -one : bounded);
}

template <typename V>
inline V gelu(const V &x, bool is_tanh) {
    const V f =
        is_tanh ? value_of(TANH, V(x * (0.7978845608f + 0.0356774081f * x * x))) : value_of(ERF, V(x * 0.7071067812f));
    return x * 0.5f * (1 + f);
}

template <typename V>
inline V activated(V numbers, int32_t activation) {
    if (activation == RELU) return numbers < 0 ? V{} : numbers;
    return activation == NO_ACTIVATION ? numbers : gelu(numbers, activation == GELU_TANH);
}

} // namespace
