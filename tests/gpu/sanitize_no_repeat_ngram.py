"""For compute-sanitizer, by `make sanitize`: the kernels of no-repeat-n-gram on buffers of exactly the size they need.

Scores are compared on the host, so that no kernel but these runs.
"""

import os
import sys

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # one allocation of many tensors would hide accesses beyond them

import torch
from ngram_definition import Case, buffer, same, wrapped

from fastgen.ops.kernel import Kernel
from fastgen.ops.no_repeat_ngram.kernels import KERNELS

SIZES = [  # rows, width, ngram_size
    *[(1, 1, 1), (3, 7, 3), (3, 8, 8), (2, 129, 2), (2, 128, 128)],
    *[(2, 600, 33), (2, 600, 34), (2, 600, 64), (2, 700, 65), (2, 1000, 99), (1, 4096, 3)],
]


def cases() -> list[Case]:
    problems = []
    for rows, width, ngram_size in SIZES:
        tokens = wrapped([0, 1, 2, 1, 3, -1, 9], rows, width, torch.int64, shift=1)
        source = wrapped([3, 1, 2, 1, 0], 1, width + 3, torch.int32)
        lengths = torch.arange(width, width - rows, -1)
        problems += [
            Case(tokens, torch.zeros(rows, 4), ngram_size),
            Case(tokens.t().contiguous().t(), torch.zeros(4, rows).bfloat16().t(), ngram_size, lengths),
            Case(tokens.int(), torch.zeros(rows, 4).half(), ngram_size, lengths[0], source),
        ]
    return problems


def is_right(kernel: Kernel, case: Case) -> bool:
    on_gpu = case.to("cuda")
    kernel.run(on_gpu.tokens, on_gpu.scores, case.ngram_size, on_gpu.lengths, on_gpu.encoder_tokens)
    return same(buffer(on_gpu.scores).cpu(), buffer(case.expected()))


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was checked", file=sys.stderr)
        return 1
    wrong = 0
    for kernel in KERNELS:
        if kernel.device != "cuda":
            continue
        if reasons := kernel.unsupported_reasons():
            print(f"{kernel.name} was not checked: {'; '.join(reasons)}")
            continue
        failed = [case for case in cases() if not is_right(kernel, case)]
        print(f"{kernel.name}: {len(cases()) - len(failed)} of {len(cases())} cases are right")
        wrong += len(failed)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
