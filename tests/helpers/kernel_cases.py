"""Cases of the C++ kernels: what they are called with, and what torch's own operations give in fp64.

    cases = all_cases()
    run_cases(driver, cases, folder)  # writes what the driver's kernels have written into the tensors of the cases
    for case in cases: case.check()

`driver`: the command of kernel_driver.cpp, built together with the kernels; cases are recorded where fastgen would call
them, so that no kernel has to be installed.
"""

from __future__ import annotations

import ctypes
import random
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from attention_cases import ALL_COPIES, ALL_MASKS, ALL_WIDTHS, random_case
from simd_kernels import torch_threads
from torch import Tensor
from torch.nn import functional

from fastgen.ops import activations, beams, cpu_linear, norms, simd
from fastgen.ops.kernel import tolerance
from fastgen.ops.no_repeat_ngram import kernels as ngram_kernels
from fastgen.ops.no_repeat_ngram import reference
from fastgen.ops.shared_attention import FEW, MANY, attention_by_products

Blocks = list[tuple[bytes, list[tuple[int, int, int]]]]  # bytes, and where, of which block, which byte an address is of
PRODUCTS = [(1, 3), (4, 700), (7, 64), (12, 257), (16, 300), (25, 33), (65, 700)]  # rows, in_features
OUTPUTS = (1, 13, 97, 193)  # out_features
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": torch.clone,
    activations.RELU: torch.relu,
    activations.GELU: functional.gelu,
    activations.GELU_TANH: partial(functional.gelu, approximate="tanh"),
}


@dataclass
class KernelCase:
    """One call of a kernel, whose tensors must not move; exact: the outputs have the bits of what is expected."""

    kernel: str
    types: Sequence[Any]
    arguments: Sequence[Any]
    tensors: Sequence[Tensor]  # that addresses are of
    outputs: Sequence[Tensor]
    expected: Sequence[Tensor]
    is_exact: bool

    def check(self) -> None:
        """Raises AssertionError if outputs are not what is expected."""
        for output, expected in zip(self.outputs, self.expected, strict=True):
            atol = 0.0
            if not self.is_exact:
                largest = expected[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 0
                atol = tolerance("product", output.dtype) * (largest + 1)
                output, expected = output.double(), expected.double()
            torch.testing.assert_close(
                output, expected, rtol=0, atol=atol, equal_nan=True, msg=lambda message: f"{self.kernel}: {message}"
            )


@contextmanager
def _recorded() -> Iterator[list[tuple[str, Sequence[Any], Sequence[Any]]]]:
    """Inside this context kernels are not called, but noted: name, types of arguments, arguments."""
    calls: list[tuple[str, Sequence[Any], Sequence[Any]]] = []

    def function(name: str, dtype: torch.dtype, types: tuple[Any, ...]) -> Callable[..., None]:
        return lambda *arguments: calls.append((f"fastgen_{name}{simd._SUFFIXES[dtype]}", types, arguments))

    ngram_types = ctypes.POINTER(ngram_kernels.NGramProblem), ctypes.c_int32
    with (
        mock.patch.object(simd, "function", function),
        mock.patch.object(
            ngram_kernels,
            "_cpu",
            lambda: lambda *them: calls.append(("fastgen_no_repeat_ngram_cpu", ngram_types, them)),
        ),
        torch_threads(3),
        torch.no_grad(),
    ):
        yield calls


def _case(run: Callable[[], Any], inputs: Sequence[Tensor], expected: Any, is_exact: bool = False) -> KernelCase:
    """run: calls the kernel once and returns its outputs, or None if it writes into the first of the inputs."""
    with _recorded() as calls:
        outputs = run()
    (call,) = calls
    outputs = inputs[0] if outputs is None else outputs
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    for output in outputs:
        if output is not inputs[0]:
            output.fill_(77)
    expected = expected if isinstance(expected, tuple) else (expected,)
    return KernelCase(*call, [*inputs, *outputs], outputs, expected, is_exact)


def _products() -> Iterator[KernelCase]:
    for number, (rows, width) in enumerate(PRODUCTS):
        for out in OUTPUTS:
            for dtype in simd.DTYPES:
                for is_transposed in (False, True):
                    sizes = (width, out) if is_transposed else (out, width), (rows, width), (out,), (rows, out)
                    weight, states, bias, added = (torch.randn(size).to(dtype) for size in sizes)
                    weight = weight.t() if is_transposed else weight
                    options = ((None, None, ""), (bias, None, "gelu"), (bias, added, "gelu_tanh"), (bias, None, "relu"))
                    bias, added, activation = options[(number + out) % 4]
                    expected = functional.linear(*(None if x is None else x.double() for x in (states, weight, bias)))
                    expected = ACTIVATIONS[activation](expected.to(dtype).double())
                    expected = expected if added is None else expected.to(dtype).double() + added.double()
                    inputs = [x for x in (states, weight, bias, added) if x is not None]
                    arguments = states, weight, bias, added, activation
                    yield _case(lambda them=arguments: cpu_linear._skinny_linear(*them), inputs, expected)
    weight = torch.ones(3, 64)
    weight[0, 5], weight[1, 7] = torch.nan, torch.inf
    states = torch.ones(2, 64)
    yield _case(lambda: cpu_linear._skinny_linear(states, weight, None), [states, weight], states @ weight.t())


def _attentions(count: int = 40) -> Iterator[KernelCase]:
    draw = random.Random(0).choice
    for kernel, lengths, queries in (
        (FEW, (1, 7, 8, 17, 31, 100), (1, 2)),
        (MANY, (32, 63, 129), (33, 65)),
    ):
        for seed in range(count):
            copies, mask, dtype = draw(ALL_COPIES), draw(ALL_MASKS), draw(simd.DTYPES)
            first, second, length = draw(lengths), draw(lengths), draw(queries)
            widths, kv_heads = [draw(ALL_WIDTHS) for _ in range(2)], draw((1, 3))
            groups = draw((1, 2)) if length < 65 else 1
            case = random_case(copies, (first, second, 3), groups, kv_heads, length, *widths, mask, dtype, seed=seed)
            yield _attention(kernel, *case)
        for dtype in simd.DTYPES:
            yield _attention(kernel, *_hidden(lengths[-1], queries[-1], dtype))
    for dtype in simd.DTYPES:
        case = random_case((1,), (133,), 2, 3, 65, 80, 80, None, dtype)
        yield _attention(MANY, *case, is_causal=True)


def _hidden(keys: int, length: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Rows whose keys are all hidden, queries that are no numbers, and scores far apart."""
    query, keys, values, mask = random_case((1,), (keys,), 1, 2, length, 64, 64, "added", dtype, inputs=4)
    mask[0] = -torch.inf
    query[1] = torch.nan
    query[2] *= 100
    return query, keys, values, mask


def _attention(kernel: Any, query: Tensor, keys: Any, values: Any, mask: Tensor | None, **options: Any) -> KernelCase:
    wide = mask if mask is None or mask.dtype == torch.bool else mask.double()
    if options:
        wide = torch.ones(query.shape[2], keys[0].shape[2], dtype=torch.bool).tril()
    doubles = query.double(), [one.double() for one in keys], [one.double() for one in values]
    inputs = [query, *keys, *values, *([] if mask is None else [mask])]
    expected = attention_by_products(*doubles, wide, 0.3)
    return _case(lambda: kernel.run(query, keys, values, mask, 0.3, **options), inputs, expected)


def _norms() -> Iterator[KernelCase]:
    for rows, width in ((1, 1), (2, 7), (3, 8), (17, 33), (5, 768)):
        for dtype in simd.DTYPES:
            states, weight = torch.randn(rows, width).to(dtype), torch.randn(width).to(dtype)
            wide = states.double()
            expected = weight.double() * wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
            yield _case(lambda them=(states, weight): norms._rms_norm(*them, 1e-6), [states, weight], expected)


def _layer_norms() -> Iterator[KernelCase]:
    for number, (rows, width) in enumerate(((1, 1), (2, 7), (3, 8), (17, 33), (5, 768))):
        for dtype in simd.DTYPES:
            states, added = (torch.randn(rows, width).to(dtype) for _ in range(2))
            weight, bias = (torch.randn(width).to(dtype) for _ in range(2))
            others = added if number % 2 else None
            wide = (states if others is None else states + others).double()
            expected = functional.layer_norm(wide, (width,), weight.double(), bias.double())
            inputs = [states, weight, bias, *([] if others is None else [others])]
            arguments = states, weight, bias, 1e-5, others
            yield _case(lambda them=arguments: norms._layer_norm(*them), inputs, expected)


def _gelus() -> Iterator[KernelCase]:
    for count in (1, 7, 16, 100, 1003):
        for activation in (activations.GELU, activations.GELU_TANH):
            numbers = 3 * torch.randn(count)
            expected = ACTIVATIONS[activation](numbers.double())
            yield _case(lambda them=(numbers, activation): activations._gelu(*them), [numbers], expected)


def _exact() -> Iterator[KernelCase]:
    """Tables, rows that change places, candidates of beams and bans of n-grams: the bits of torch."""
    table = torch.randn(1 << 16).to(torch.bfloat16)
    numbers = torch.arange(1 << 16).to(torch.int16).flip(0)[:1001].view(torch.bfloat16)
    expected = table.flip(0)[:1001]
    yield _case(lambda: activations._lookup(numbers, table), [numbers, table], expected, is_exact=True)
    for dtype in (torch.float64, torch.float16):
        states, beam_idx = torch.randn(2, 5, 3, 7, 9).to(dtype), torch.tensor([0, 4, 4, 1, 0])
        moved, inputs = states[:, :, :, 1:6], [states, beam_idx]
        expected = states.clone()
        expected[:, :, :, 1:6] = moved.index_select(1, beam_idx)
        yield _case(lambda them=([moved], beam_idx): beams._move(*them), inputs, expected, is_exact=True)
    for vocabulary, digits in ((200, 0), (256, None), (1001, 0)):
        log_probs = functional.log_softmax(3 * torch.randn(8, vocabulary), dim=-1)
        log_probs = log_probs if digits is None else log_probs.round(decimals=digits)
        beam_scores = -torch.rand(2, 4).cumsum(1)
        expected = beams.best_in_one_stage(log_probs, beam_scores, 8)
        inputs = [log_probs, beam_scores]
        yield _case(lambda them=inputs: beams._choose(*them, 8), inputs, tuple(expected), is_exact=True)
    for dtype in simd.DTYPES:
        for source in (None, torch.randint(0, 3, (2, 40))):
            scores, tokens = torch.randn(4, 20).to(dtype), torch.randint(0, 3, (4, 30), dtype=torch.int64)
            lengths = torch.tensor([30, 12, 1, 29])
            expected, arguments = scores.clone(), (tokens, scores, 3, lengths, source)
            reference.ban(tokens, expected, *arguments[2:])
            inputs = [scores, tokens, lengths, *([] if source is None else [source])]
            yield _case(lambda them=arguments: ngram_kernels.ban_on_cpu(*them), inputs, expected, is_exact=True)


def all_cases() -> list[KernelCase]:
    """Returns new cases, the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return [*_products(), *_attentions(), *_layer_norms(), *_norms(), *_gelus(), *_exact()]


def run_cases(driver: Sequence[str | Path], cases: Sequence[KernelCase], folder: Path) -> None:
    """Has the driver call the kernels, and writes their outputs into those of the cases."""
    play_cases(driver, write_cases(cases, folder), cases)


def write_cases(cases: Sequence[KernelCase], folder: Path) -> Path:
    """Returns a file that any number of drivers can read; it contains the outputs as they are when it is written."""
    file = folder / "cases"
    file.write_bytes(b"".join(map(_packed, cases)))
    return file


def play_cases(driver: Sequence[str | Path], inputs: Path, cases: Sequence[KernelCase]) -> None:
    """Does what `run_cases` does, with the file that `write_cases` has written of these cases."""
    results = inputs.with_name("results")
    done = subprocess.run([*driver, inputs, results], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    written, place = results.read_bytes(), 0
    for case in cases:
        for output in case.outputs:
            storage = output.untyped_storage()
            ctypes.memmove(storage.data_ptr(), written[place : place + storage.nbytes()], storage.nbytes())
            place += storage.nbytes()
    assert place == len(written)


def _packed(case: KernelCase) -> bytes:
    """Returns what kernel_driver.cpp reads for one case, see there."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in case.tensors}
    blocks: Blocks = [(ctypes.string_at(start, storage.nbytes()), []) for start, storage in storages.items()]

    def place_of(address: int) -> tuple[int, int]:
        for block, (start, storage) in enumerate(storages.items()):
            if start <= address < start + storage.nbytes():
                return block, address - start
        raise ValueError(f"{case.kernel}: address {address} is of none of the tensors of the case")

    def block_of(data: Any, offsets: Sequence[int]) -> tuple[int, int]:
        """Appends a structure or an array, with addresses at these offsets that are not null."""
        content = bytes(data)
        addresses = [(at, struct.unpack_from("<q", content, at)[0]) for at in offsets]
        blocks.append((content, [(at, *place_of(address)) for at, address in addresses if address]))
        return len(blocks) - 1, 0

    pairs = zip(case.types, case.arguments, strict=True)
    arguments = [_argument(kind, value, place_of, block_of) for kind, value in pairs]
    outputs = [list(storages).index(output.untyped_storage().data_ptr()) for output in case.outputs]
    name = case.kernel.encode()
    packed = [_int64(len(name)), name, _int64(len(blocks))]
    for content, addresses in blocks:
        packed += [_int64(len(content)), content, _int64(len(addresses)), *(_int64(*one) for one in addresses)]
    return b"".join([*packed, _int64(len(arguments)), *arguments, _int64(len(outputs), *outputs)])


def _argument(kind: Any, value: Any, place_of: Callable, block_of: Callable) -> bytes:
    integer, number, address = range(3)  # as `Kind` in kernel_driver.cpp
    if kind is ctypes.c_float:
        return _int64(number, *struct.unpack("<q", struct.pack("<fi", value, 0)), 0)
    if kind in (ctypes.c_int32, ctypes.c_int64):
        return _int64(integer, value, 0)
    if value is None:
        return _int64(address, -1, 0)
    if isinstance(value, ctypes.Array):
        is_pointers = value._type_ is ctypes.c_void_p
        return _int64(address, *block_of(value, range(0, ctypes.sizeof(value), 8) if is_pointers else ()))
    if kind is not ctypes.c_void_p:  # a pointer to a structure, made with byref
        problem = value._obj
        fields = [getattr(type(problem), name).offset for name, type_ in problem._fields_ if type_ is ctypes.c_void_p]
        return _int64(address, *block_of(problem, fields))
    return _int64(address, *place_of(value.value if isinstance(value, ctypes.c_void_p) else value))


def _int64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)
