"""No-repeat-n-gram from its definition, in plain Python, and problems to compare implementations with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from fastgen.ops import no_repeat_ngram as problem

# The same examples in every run, and nothing written to disk.
SETTINGS = settings(
    derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow], print_blob=False
)
SCORES = [0.0, -1.5, 3.25, math.nan, math.inf, -math.inf, -0.0]
SENTINEL = 7.0
BITS = {4: torch.int32, 2: torch.int16}
# On both sides of the CUDA kernel's chunks and tiles and of Triton's blocks.
WIDE_NGRAM_SIZES = [1, 2, 3, 32, 33, 34, 64, 65, 66, 97, 128, 129, 130, 256, 257]


def banned(row: Sequence[int], ngram_size: int, source: Sequence[int] | None = None) -> set[int]:
    """Returns the tokens that would end `row` with an n-gram that `source` (None: `row`) already holds."""
    if len(row) < ngram_size - 1:
        return set()
    source = row if source is None else source
    last = row[len(row) - (ngram_size - 1) :]
    ends = range(ngram_size - 1, len(source))
    return {source[end] for end in ends if source[end - (ngram_size - 1) : end] == last}


@dataclass(frozen=True)
class Case:
    """Arguments of `no_repeat_ngram_`. Tensors are views of buffers with more in them, see `buffer`."""

    tokens: Tensor
    scores: Tensor
    ngram_size: int
    lengths: int | Tensor | None = None
    encoder_tokens: Tensor | None = None

    def arguments(self) -> tuple:
        return self.tokens, self.scores, self.ngram_size, self.lengths, self.encoder_tokens

    def to(self, device: str) -> Case:
        """Copies to a device, with the same buffers and strides."""
        moved = {name: on(device, value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)

    def banned(self) -> list[set[int]]:
        """Returns the banned tokens of each row, including those outside of the vocabulary."""
        rows, width = self.tokens.shape
        lengths = torch.as_tensor(width if self.lengths is None else self.lengths).expand(rows).tolist()
        valid = [row[: min(max(length, 0), width)] for row, length in zip(self.tokens.tolist(), lengths)]
        if self.encoder_tokens is None:
            return [banned(row, self.ngram_size) for row in valid]
        sources = self.encoder_tokens.tolist()
        return [banned(row, self.ngram_size, sources[i * len(sources) // rows]) for i, row in enumerate(valid)]

    def expected(self) -> Tensor:
        """Returns the scores after blocking, in a copy of their buffer."""
        result = on(self.scores.device, self.scores)
        for row, tokens in enumerate(self.banned()):
            for token in tokens:
                if 0 <= token < result.shape[1]:
                    result[row, token] = -math.inf
        return result


def buffer(view: Tensor) -> Tensor:
    return view if view._base is None else view._base


def on(device: str | torch.device, view: Tensor) -> Tensor:
    """Copies the view and its buffer."""
    return torch.as_strided(
        buffer(view).detach().to(device, copy=True), view.shape, view.stride(), view.storage_offset()
    )


def same(scores: Tensor, expected: Tensor) -> bool:
    """Returns whether all bits are equal but those of NaN, which torch's operations on half precision may change."""
    bits = BITS[scores.element_size()]
    is_same = (scores.view(bits) == expected.view(bits)) | (scores.isnan() & expected.isnan())
    return scores.shape == expected.shape and bool(is_same.all())


def check(ban: Callable, case: Case) -> None:
    """Fails unless `ban`, one of the implementations, writes exactly what the definition requires."""
    expected = case.expected()
    inputs = [value for value in (case.tokens, case.encoder_tokens, case.lengths) if isinstance(value, Tensor)]
    before = [buffer(value).clone() for value in inputs]
    tokens, lengths = problem._typed(case.tokens, case.scores, case.ngram_size, case.lengths, case.encoder_tokens)
    problem.check(tokens, case.scores, case.ngram_size, lengths, case.encoder_tokens)
    if problem.can_ban(tokens, case.scores, case.ngram_size, case.encoder_tokens):
        ban(tokens, case.scores, case.ngram_size, lengths, case.encoder_tokens)
    assert same(buffer(case.scores), buffer(expected))
    assert all(torch.equal(buffer(value), old) for value, old in zip(inputs, before))


def wrapped(values: Sequence, rows: int, columns: int, dtype: torch.dtype, shift: int = 0) -> Tensor:
    """Returns `[rows, columns]`, whose rows repeat `values`, each starting `shift` further than the one before."""
    index = torch.arange(columns) + shift * torch.arange(rows).unsqueeze(1)
    return torch.tensor(values, dtype=dtype)[index % len(values)]


# The size of a buffer for a view of `[rows, columns]`, and the view.
LAYOUTS: dict[str, tuple[Callable[[int, int], tuple[int, int]], Callable[[Tensor], Tensor]]] = {
    "contiguous": (lambda rows, columns: (rows, columns), lambda buffer: buffer),
    "some columns": (lambda rows, columns: (rows, columns + 5), lambda buffer: buffer[:, 2:-3]),
    "some rows": (lambda rows, columns: (rows + 2, columns), lambda buffer: buffer[1:-1]),
    "every second row": (lambda rows, columns: (2 * rows, columns), lambda buffer: buffer[::2]),
    "every third column": (lambda rows, columns: (rows, 3 * columns + 1), lambda buffer: buffer[:, 1::3]),
    "transposed": (lambda rows, columns: (columns, rows), lambda buffer: buffer.t()),
    "a part, transposed": (lambda rows, columns: (columns + 3, rows + 2), lambda buffer: buffer[1:-2, 1:-1].t()),
}


def lay_out(values: Tensor, layout: str, garbage: Sequence) -> Tensor:
    """Returns `values` as a view of a larger buffer, the rest of which is `garbage`."""
    size_of, view_of = LAYOUTS[layout]
    size = size_of(*values.shape)
    view = view_of(wrapped(garbage, 1, math.prod(size), values.dtype).reshape(size))
    view.copy_(values)
    return view


@st.composite
def cases(
    draw: st.DrawFn, max_rows: int = 6, max_width: int = 16, max_period: int = 6, ngram_sizes: Sequence[int] = ()
) -> Case:
    """Problems of few different tokens, so that n-grams repeat, also with the buffer around them.

    max_period: of the sequence of tokens. ngram_sizes: those to be drawn; none means 1 to two more than the width.
    """
    token_dtype = draw(st.sampled_from(problem.TOKEN_DTYPES))
    score_dtype = draw(st.sampled_from(problem.SCORE_DTYPES))
    inputs = draw(st.integers(1, max_rows) | st.integers(0, max_rows))
    beams = draw(st.integers(1, max(1, max_rows // max(inputs, 1))))
    rows, width = inputs * beams, draw(st.integers(max_width // 2, max_width) | st.integers(0, max_width))
    vocabulary_size = draw(st.integers(2, 6) | st.integers(0, 6))
    if ngram_sizes:
        ngram_size = draw(st.sampled_from(ngram_sizes))
    else:
        ngram_size = draw(st.integers(1, 4) | st.integers(1, width + 2))

    outside = [vocabulary_size, vocabulary_size + 1, -1, -2, torch.iinfo(token_dtype).min, torch.iinfo(token_dtype).max]
    if token_dtype == torch.int64:
        outside += [2**32, 2**32 + 1, -(2**32)]  # whose lower half is a token
    alphabet = draw(st.lists(st.sampled_from([*range(vocabulary_size)] * 4 + outside), min_size=1, max_size=4))
    pattern = draw(st.lists(st.sampled_from(alphabet), min_size=1, max_size=max_period))
    layouts = st.sampled_from(list(LAYOUTS))

    def sequences(count: int, columns: int) -> Tensor:
        values = wrapped(pattern, count, columns, token_dtype, shift=draw(st.integers(0, 3)))
        if values.numel():
            places = st.tuples(st.integers(0, count - 1), st.integers(0, columns - 1), st.sampled_from(alphabet))
            for row, column, token in draw(st.lists(places, max_size=3)):
                values[row, column] = token
        return lay_out(values, draw(layouts), pattern)

    tokens = sequences(rows, width)
    encoder_tokens = (
        sequences(inputs, draw(st.integers(0, max_width) | st.just(max_width))) if draw(st.booleans()) else None
    )
    values = wrapped(draw(st.lists(st.sampled_from(SCORES), min_size=1)), rows, vocabulary_size, score_dtype, 1)
    return Case(
        tokens=tokens,
        scores=lay_out(values, draw(layouts), [SENTINEL]),
        ngram_size=ngram_size,
        lengths=draw(lengths(rows, width, ngram_size)),
        encoder_tokens=encoder_tokens,
    )


def wide_cases() -> st.SearchStrategy[Case]:
    """Rows of several tiles and blocks, n-grams of several chunks."""
    return cases(max_rows=3, max_width=600, max_period=40, ngram_sizes=WIDE_NGRAM_SIZES)


@st.composite
def lengths(draw: st.DrawFn, rows: int, width: int, ngram_size: int) -> int | Tensor | None:
    form = draw(st.sampled_from(["none", "int", "scalar", "one a row", "every second of a vector", "expanded"]))
    if form == "none":
        return None
    short = min(max(ngram_size - 2, 0), width)  # no n - 1 tokens
    inside = st.integers(width // 2, width) | st.integers(0, width) | st.just(short)
    if form == "int":
        return draw(inside)
    dtype = draw(st.sampled_from(problem.TOKEN_DTYPES))
    limits = torch.iinfo(dtype)
    value = inside | st.sampled_from([limits.min, -1, width + 1, width + 2, limits.max])
    if form in ("scalar", "expanded"):
        scalar = torch.tensor(draw(value), dtype=dtype)
        return scalar if form == "scalar" else scalar.expand(rows)
    values = draw(st.lists(value, min_size=rows, max_size=rows))
    if form == "one a row":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor([number for value in values for number in (value, width)], dtype=dtype)[::2]
