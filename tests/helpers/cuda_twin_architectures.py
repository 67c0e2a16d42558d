"""Prints as JSON how many steps of each architecture are replayed on the twin of a GPU, and the reasons against more.

`python cuda_twin_architectures.py LIBRARY NAME …`: the compiled cuda_twin.cpp, and names of architectures.py.

Tests: tests/optimizer/test_cuda_twin.py
"""

import json
import sys

import cuda_twin
from architectures import BY_NAME
from reports import capturing

import fastgen
from fastgen.optimizer.decoding.report import STEPS


def main() -> None:
    """Generates with all models."""
    cuda_twin.install(sys.argv[1])
    print(json.dumps({name: steps_of(name) for name in sys.argv[2:]}))


def steps_of(name: str) -> tuple[int, dict[str, str]]:
    """Returns how many steps of a call are replayed, and by their codes the reasons why others are not."""
    model = BY_NAME[name].model().cuda()
    inputs = {key: value.cuda() for key, value in BY_NAME[name].inputs().items()}
    with capturing("on", smallest_capacity=32):
        model.generate(**inputs, do_sample=False, min_new_tokens=8, max_new_tokens=8)
    report = fastgen.explain()
    return report.replays, {reason.code: reason.text for part, reason in report.not_done if part == STEPS}


if __name__ == "__main__":
    main()
