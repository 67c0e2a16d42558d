"""The passes of a trainer: `fastgen.token_log_probs` with common beginnings computed once, and with all rows.

A pass is a forward without gradients, as for old and reference log-probabilities, or a forward and backward. Stock is
the same function inside `fastgen.disabled()`: one forward of the library, logits of the completions only. The largest
relative difference of log-probabilities and of gradients is compared with the dtype's tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from calls import make_model
from measure import Options, compare, with_and_without
from trl_step import GrpoStep, measure_step

import fastgen

# The largest difference, relative to the largest number.
TOLERANCES = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.1}


@dataclass(frozen=True)
class Case:
    """`groups` prompts of `prompt` tokens, with so many completions each.

    workload: in words. backward: whether gradients are computed, too. model: a key of `calls.MODELS`.
    """

    groups: int
    completions: int
    prompt: int
    length: int
    backward: bool = True
    model: str = "llama-like"
    workload: str = ""


CASES = {
    "trainer": {
        "grpo-forward": Case(4, 8, 512, 64, False, workload="4 prompts of 512, 8 completions of 64, forward"),
        "grpo": Case(4, 8, 512, 64, workload="4 prompts of 512, 8 completions of 64, forward and backward"),
        "grpo-long": Case(4, 8, 128, 256, workload="4 prompts of 128, 8 completions of 256, forward and backward"),
        "dpo": Case(4, 2, 512, 64, workload="4 pairs, prompt 512, answers of 64, forward and backward"),
        "trl-grpo": GrpoStep(),
        "trl-grpo-defaults": GrpoStep(2, 256, 8, 32, "llama-512", has_defaults=True),
        "alone": Case(8, 1, 512, 64, workload="8 prompts of 512, 1 completion of 64 each, forward and backward"),
    }
}


class Pass:
    """The model of a case in training mode, and its rows."""

    def __init__(self, case: Case, options: Options) -> None:
        self.case = case
        self.model = make_model(case.model).to(device=options.device, dtype=options.torch_dtype).train()
        vocabulary, rows = self.model.config.vocab_size, case.groups * case.completions
        prompts = torch.randint(vocabulary, (case.groups, case.prompt)).repeat_interleave(case.completions, dim=0)
        self.input_ids = torch.cat([prompts, torch.randint(vocabulary, (rows, case.length))], dim=1).to(options.device)
        self.mask = torch.ones_like(self.input_ids)

    def run(self) -> list[torch.Tensor]:
        """Returns the log-probabilities, and the gradients of the first layer's weights if there are any."""
        self.model.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(self.case.backward):
            log_probs = fastgen.token_log_probs(self.model, self.input_ids, self.mask, self.case.length)
        if not self.case.backward:
            return [log_probs]
        log_probs.mean().backward()
        layers = self.model.get_decoder().layers
        return [log_probs.detach(), *(weight.grad for weight in layers[0].parameters() if weight.dim() == 2)]


def measure(kind: str, name: str, case: Case | GrpoStep, options: Options) -> dict[str, Any]:
    if isinstance(case, GrpoStep):
        return {"case": name, "dtype": options.dtype, **measure_step(case, options)}
    torch.manual_seed(0)
    tolerance = TOLERANCES[options.dtype]

    def are_equal(stock: list[torch.Tensor], fast: list[torch.Tensor]) -> bool:
        return all((a - b).abs().max() <= tolerance * b.abs().max() for a, b in zip(fast, stock, strict=True))

    result, _ = compare(with_and_without(Pass(case, options).run), options, are_equal)
    return {"case": name, "dtype": options.dtype, **result}
