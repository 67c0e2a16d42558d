"""The peer's side: a program in an environment of its own that loads a model, and generates on each request.

    python run_NAME.py FOLDER DTYPE THREADS

FOLDER comes from peers.py and holds the model in `model`, as `save_pretrained` writes it, `inputs.pt`, and
`arguments.json`, those of `generate`. A program answers in lines of JSON on its standard output:

| when | answer |
|---|---|
| the model is loaded | `{"ready": true, "versions": {name: version}}` |
| it cannot do the work | `{"reason": "…"}`, and it ends |
| a line arrives on standard input | `{"seconds": 1.23, "tokens": [[…], …]}`: new tokens of each row |

Output of libraries goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

Tokens = list[list[int]]
Call = Callable[[], Tokens]
DEFAULTS = {"num_beams": 1, "num_return_sequences": 1, "no_repeat_ngram_size": 0, "top_k": 50}


@dataclass(frozen=True)
class Task:
    """The work of a peer. model: a folder; arguments: of `generate`; an eos_token_id of None forces the length."""

    folder: Path
    model: Path
    inputs: dict[str, torch.Tensor]
    arguments: dict[str, Any]
    dtype: str
    threads: int

    def prompts(self) -> Tokens:
        """Returns the tokens of each row of input_ids, without padding."""
        input_ids = self.inputs["input_ids"]
        masks = self.inputs.get("attention_mask", torch.ones_like(input_ids)).bool()
        return [row[mask].tolist() for row, mask in zip(input_ids, masks)]

    def common_length(self) -> int:
        """Returns the number of tokens that all prompts begin with, at most all but the last token of each."""
        prompts = self.prompts()
        columns = zip(*(prompt[:-1] for prompt in prompts))
        return sum(1 for _ in takewhile(lambda column: len({*column}) == 1, columns)) if len(prompts) > 1 else 0


class CannotError(Exception):
    """The peer cannot do the work: the message says why."""


def read_task(argv: list[str]) -> Task:
    folder = Path(argv[1])
    arguments = DEFAULTS | json.loads((folder / "arguments.json").read_text(encoding="utf-8"))
    inputs = torch.load(folder / "inputs.pt", weights_only=True)
    return Task(folder, folder / "model", inputs, arguments, argv[2], int(argv[3]))


def answer(load: Callable[[Task], Call], *packages: str) -> None:
    """Runs this program. load: returns the call that generates; packages: whose versions are reported."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    task = read_task(sys.argv)
    torch.set_num_threads(task.threads)
    try:
        call = load(task)
        tell(ready=True, versions={name: version(name) for name in packages})
        for _ in sys.stdin:
            begun = time.perf_counter()
            tokens = call()
            tell(seconds=time.perf_counter() - begun, tokens=tokens)
    except CannotError as error:
        tell(reason=str(error))
    except Exception as error:  # whatever a peer raises is why it has no figure
        tell(reason=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}")
        raise
