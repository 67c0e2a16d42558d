"""Prints the names of some mutants that mutmut has made, for `mutmut run`: of each file as many, drawn with a seed.

    python tests/helpers/mutation_sample.py SEED OF_A_DECISION OF_ANOTHER

OF_A_DECISION: how many of each file below, where a mutant that survives is most likely a wrong decision.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

DECISIONS = {
    "ops/cpu_linear/choice.py",
    "ops/no_repeat_ngram/problem.py",
    "optimizer/decoding/beam_search.py",
    "optimizer/decoding/gain.py",
    "optimizer/decoding/late_flag.py",
    "optimizer/decoding/recordable.py",
    "optimizer/decoding/step_history.py",
    "optimizer/fairseq/plan.py",
    "optimizer/fairseq/recordable.py",
    "optimizer/transformers/beam_search.py",
    "optimizer/transformers/decode_step.py",
    "optimizer/transformers/eligibility.py",
    "optimizer/transformers/recordable.py",
    "optimizer/transformers/rows.py",
}


def main(seed: str, of_a_decision: str, of_another: str) -> None:
    package = Path("mutants/fastgen")
    for known in sorted(package.rglob("*.meta")):
        file = known.relative_to(package).with_suffix("").as_posix()
        names = sorted(json.loads(known.read_text())["exit_code_by_key"])
        wanted = int(of_a_decision if file in DECISIONS else of_another)
        for name in random.Random(f"{seed} {file}").sample(names, min(wanted, len(names))):
            print(name)


if __name__ == "__main__":
    main(*sys.argv[1:])
