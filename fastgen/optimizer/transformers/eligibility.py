"""Whether a forward of some of the rows gives them what a forward of all rows would."""

from __future__ import annotations

from typing import Any

import torch

from fastgen.optimizer.transformers import compiled, model_state, modules

# Models in which the rows of a batch have an influence on each other.
COUPLED_MODELS = {
    "nllb-moe": "the capacity of its experts depends on the number of rows",
    "big_bird": "its sparse attention draws random numbers for each row",
}


def model_reasons(model: Any) -> list[str]:
    """What in the model or around it lets rows depend on each other, or is made for its rows; empty if nothing is."""
    reasons = []
    if torch.is_grad_enabled():
        reasons.append("gradients are recorded, but shared caches are written in place")
    reasons += modules.unsupported_reasons(model)
    reasons += compiled.reasons(model)
    if model.config.model_type in COUPLED_MODELS:
        reasons.append(f"{model.config.model_type}: {COUPLED_MODELS[model.config.model_type]}")
    return reasons + (model_state.known_reasons(model) or [])
