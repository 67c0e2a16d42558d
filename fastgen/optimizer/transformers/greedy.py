"""`GenerationMixin._sample`: on a CPU finished inputs leave greedy decoding; recorded steps for greedy and sampling.

Where tokens are drawn all rows stay, so that a seed gives the same ones. All other calls go to the library's loop.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.generation.stopping_criteria import EosTokenCriteria

from fastgen.optimizer.decoding.late_flag import LateFlag
from fastgen.optimizer.transformers import recorded_steps
from fastgen.optimizer.transformers.decode_step import DecodeStep, loop_reasons, rows_of, undone_after_errors
from fastgen.optimizer.transformers.no_repeat_ngram import writing_processors


def sample(
    original: Callable,
    self: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    leaves = _can_end_early(input_ids, stopping_criteria, generation_config)
    fits = streamer is None and generation_config.compile_config is None
    fits = fits and (leaves or recorded_steps.are_wanted(input_ids.device))
    fits = fits and not loop_reasons(self, stopping_criteria, generation_config, synced_gpus, model_kwargs)
    records = fits and recorded_steps.can_record(self, generation_config, input_ids, model_kwargs)
    if not records and not (fits and leaves):
        return original(
            self,
            input_ids,
            writing_processors(logits_processor, generation_config),
            stopping_criteria,
            generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **model_kwargs,
        )
    step = DecodeStep(self, generation_config, logits_processor, model_kwargs, input_ids.shape[0], 1, records)
    loop = in_recorded_steps if records else greedy
    with undone_after_errors(model_kwargs):
        return loop(input_ids, generation_config, step, stopping_criteria)


def _can_end_early(input_ids: Tensor, stopping_criteria: Any, config: Any) -> bool:
    """Whether some of several rows may end before others, on a CPU."""
    has_end = any(type(criterion) is EosTokenCriteria for criterion in stopping_criteria)
    several = input_ids.shape[0] > 1 and input_ids.device.type == "cpu"
    return has_end and several and not config.do_sample


def in_recorded_steps(input_ids: Tensor, config: Any, step: DecodeStep, stopping_criteria: Any) -> Tensor:
    """The sequences `[rows, length]`, as the library returns them, greedy or drawn; all rows stay to the end."""
    device = input_ids.device
    pad = None if config._pad_token_tensor is None else config._pad_token_tensor.to(device)
    going_on = torch.ones(input_ids.shape[0], dtype=torch.bool, device=device)
    late_end = LateFlag(device) if step.ends_late else None
    random = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
    logits = step.logits(input_ids)
    with getattr(step.model, "_optimize_model_for_decode", nullcontext)():
        while True:
            scores = step.process(input_ids, logits.clone()) if step.processors else logits
            before = random.get_state() if late_end is not None and config.do_sample else None
            tokens = _drawn(scores) if config.do_sample else scores.argmax(dim=-1)
            if pad is not None:
                tokens = torch.where(going_on, tokens, pad)
            input_ids = torch.cat([input_ids, tokens[:, None]], dim=1)
            going_on = going_on & ~stopping_criteria(input_ids, None)
            has_ended = ~going_on.any()
            if late_end is None:
                if bool(has_ended):
                    return input_ids
            elif late_end.exchange(has_ended):  # this step was one too many
                if before is not None:
                    random.set_state(before)
                return input_ids[:, :-1]
            elif input_ids.shape[1] >= config.max_length:
                return input_ids
            logits = step.logits(input_ids)


def _drawn(scores: Tensor) -> Tensor:
    """Tokens `[rows]`, with the operations of the library's loop."""
    return torch.multinomial(functional.softmax(scores, dim=-1), num_samples=1).squeeze(1)


def greedy(input_ids: Tensor, config: Any, step: DecodeStep, stopping_criteria: Any) -> Tensor:
    """The sequences `[rows, length]`, as the library returns them."""
    pad = config._pad_token_tensor
    places = torch.arange(input_ids.shape[0])
    going_on = torch.ones(input_ids.shape[0], dtype=torch.bool)
    left_behind: list[tuple[Tensor, Tensor]] = []  # before inputs left: the places of all rows, and their tokens
    while True:
        logits = step.logits(input_ids)
        scores = step.process(input_ids, logits.clone()) if step.processors else logits
        tokens = torch.where(going_on, scores.argmax(dim=-1), pad)
        input_ids = torch.cat([input_ids, tokens[:, None]], dim=1)
        going_on &= ~stopping_criteria(input_ids, None)
        if not going_on.any():
            break
        if step.generation.rows and step.steps == 1:
            step.fan_out = step.generation.fan_out
        by_input = going_on.view(-1, step.fan_out).any(dim=1)
        kept = by_input.nonzero().flatten()
        left = config.max_length - input_ids.shape[1]
        if len(kept) < len(by_input) and step.leaving_pays(len(by_input) - len(kept), len(by_input), left):
            left_behind.append((places, input_ids))
            kept_rows = rows_of(kept, step.fan_out)
            step.keep(kept)
            input_ids, going_on, places = input_ids[kept_rows], going_on[kept_rows], places[kept_rows]
    if not left_behind:
        return input_ids
    output = pad.repeat(len(left_behind[0][0]), input_ids.shape[1])
    for rows, found in [*left_behind, (places, input_ids)]:
        output[rows, : found.shape[1]] = found
    return output
