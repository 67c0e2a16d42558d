"""Trainers of TRL: what rows of a batch have in common at their beginning goes through the model once.

    TRL's method, with the scored columns alone ──> model(…), in its wrappers ──> backbone ──> head
                                                                                     ↑
                                        TokenScorer, with all columns: the states of the scored ones

GRPO and RLOO score several completions of a prompt, DPO two answers. The methods stay TRL's. While they run,
`TokenScorer` of token_log_probs.py, which shares beginnings forward and backward, is in place of the model's backbone.
All else is as without fastgen: wrappers (DDP, adapters that are switched off for the reference), the head in tiles, its
precision and temperature, entropies and metrics.

Left to TRL: inputs other than text, the auxiliary loss of experts, logits for `compute_metrics`, and models that cannot
be shared. Generation, by vLLM or not, is not concerned.

Tests: tests/test_trl.py
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from fastgen.models.cache_names import CACHE
from fastgen.optimizer.decoding.call import GenerateCall
from fastgen.optimizer.decoding.report import PREFILL, LeaveAlone, Reason, check, leave_alone_for, that_hold
from fastgen.optimizer.transformers import prefix_groups
from fastgen.optimizer.transformers.checks import generate_call
from fastgen.optimizer.transformers.prefix_groups import Bucket
from fastgen.optimizer.transformers.sources import shared_scores
from fastgen.optimizer.transformers.token_log_probs import Scores, TokenScorer, visible_columns

TOKENS, MASK, COMPLETIONS = "input_ids", "attention_mask", "completion_mask"

# The items of DPO's batches of texts, and the arguments of a backbone that say nothing about tokens.
_OF_TEXTS = {TOKENS, MASK, COMPLETIONS, "ref_chosen_logps", "ref_rejected_logps"}
_OF_OUTPUTS = {"use_cache", "return_dict"}

# Log-probabilities, entropies or None, and an auxiliary loss or None.
Results = tuple[Tensor, "Tensor | None", "Tensor | None"]
Result = TypeVar("Result")


def token_scores(
    original: Callable[..., Results],
    self: Any,
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    batch_size: int | None = None,
    compute_entropy: bool = False,
    compute_aux_loss: bool = False,
    **inputs: Any,
) -> Results:
    """Replaces `_get_per_token_logps_and_entropies` of `GRPOTrainer` and `RLOOTrainer`.

    Batches have no more tokens than TRL's of `batch_size` rows, and therefore more rows: a prompt's completions stay
    together.
    """
    options = {"logits_to_keep": logits_to_keep, "compute_entropy": compute_entropy}
    requested = [name for name, value in inputs.items() if value is not None] + ["compute_aux_loss"] * compute_aux_loss

    def shared(scorers: list[StateScorer]) -> Results:
        leave_alone_for(unsupported_reasons(self, scorers, input_ids.shape[1], requested))
        buckets = scorers[0].buckets_sync(input_ids, attention_mask)
        parts_of_rows = [*batches(buckets, input_ids.shape[1], input_ids[:batch_size].numel())]
        is_each_alone = len(parts_of_rows) == len(input_ids)
        leave_alone_for(that_hold(("ONE_ROW_PER_INPUT", "batches of batch_size hold one row", is_each_alone)))
        scored = slice(-logits_to_keep - 1, None)
        order = []
        parts = []
        for batch in parts_of_rows:
            tokens, mask = input_ids[batch], attention_mask[batch]
            with scorers[0].in_place_of_backbone(tokens, mask):
                parts.append(original(self, model, tokens[:, scored], mask[:, scored], **options))
            order += batch
        inverse = torch.tensor(order, device=input_ids.device).argsort()
        log_probs, entropies, _ = zip(*parts)
        return torch.cat(log_probs)[inverse], torch.cat(entropies)[inverse] if compute_entropy else None, None

    options_of_all = {"batch_size": batch_size, "compute_aux_loss": compute_aux_loss, **options, **inputs}
    theirs = partial(original, self, model, input_ids, attention_mask, **options_of_all)
    visible = visible_columns(attention_mask, logits_to_keep)
    return share_or(shared, theirs, self, [model], "_get_per_token_logps_and_entropies", visible)


def preference_loss(
    original: Callable[..., Tensor], self: Any, model: nn.Module, inputs: dict[str, Any], return_outputs: bool
) -> Any:
    """Replaces `DPOTrainer._compute_loss`, which scores answers by the model and, unless precomputed, the reference."""
    models = [model] if self.ref_model is None or self.precompute_ref_logps else [model, self.ref_model]
    requested = ["the auxiliary loss"] * self.aux_loss_enabled + ["return_outputs"] * return_outputs
    score = lambda scored: original(self, model, scored, return_outputs)  # noqa: E731
    return of_answers(score, self, models, inputs, requested, "_compute_loss")


def reference_scores(original: Callable[..., Any], self: Any, model: nn.Module, inputs: dict[str, Any]) -> Any:
    """Replaces `DPOTrainer.compute_ref_log_probs`, which scores answers by the reference before the training."""
    return of_answers(partial(original, self, model), self, [model], inputs, [], "compute_ref_log_probs")


def of_answers(
    score: Callable[[dict[str, Any]], Result],
    trainer: Any,
    models: list[Any],
    inputs: dict[str, Any],
    requested: list[str],
    method: str,
) -> Result:
    """Returns the score of a batch of answers, with what they have in common computed once by each of these models."""
    tokens, mask, answers = inputs[TOKENS], inputs[MASK], inputs[COMPLETIONS]

    def shared(scorers: list[StateScorer]) -> Result:
        leave_alone_for(
            unsupported_reasons(trainer, scorers, tokens.shape[1], [*requested, *(inputs.keys() - _OF_TEXTS)])
        )
        scorers[0].buckets_sync(tokens, mask)
        first = max(int(answers.any(dim=0).long().argmax()) - 1, 0)
        with ExitStack() as stack:
            for scorer in scorers:
                stack.enter_context(scorer.in_place_of_backbone(tokens, mask))
            # The mask stays, because TRL counts its tokens.
            return score({**inputs, TOKENS: tokens[:, first:], COMPLETIONS: answers[:, first:]})

    return share_or(shared, partial(score, inputs), trainer, models, method)


def share_or(
    shared: Callable[[list[StateScorer]], Result],
    original: Callable[[], Result],
    trainer: Any,
    models: list[nn.Module],
    method: str,
    visible: Tensor | None = None,
) -> Result:
    """Returns the result of `shared`, or of the original if `shared` leaves the call alone; reports why.

    method: of TRL's trainer. visible: see `shared_scores`.
    """
    bases = [base_of(trainer, model) for model in models]
    kinds = [kind for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.") and method in vars(kind)]
    sources = [f"{kind.__module__}:{kind.__qualname__}.{method}" for kind in kinds]
    metrics: list[Any] = []

    def plain() -> Result:
        result = original()
        if hasattr(trainer, "_metrics"):  # to which a trial would add
            metrics[:] = [copy.deepcopy(trainer._metrics)]
        return result

    with generate_call(bases[0], has_steps=False) as call:
        scorers = [StateScorer(call, base) for base in bases]
        try:
            result = shared_scores(bases, partial(shared, scorers), plain, sources, visible)
            if metrics:
                trainer._metrics = metrics[0]
            return result
        except LeaveAlone as left_alone:
            reasons = left_alone.reasons
            call.is_accelerated = False
            call.report.shared.clear()
        call.report.add_reasons(PREFILL, reasons)
        return original()


def base_of(trainer: Any, model: nn.Module) -> Any:
    """Returns the model inside the wrappers of accelerate and PEFT, whose `forward` TRL has replaced."""
    unwrapped = trainer.accelerator.unwrap_model(model)
    return unwrapped.get_base_model() if hasattr(unwrapped, "get_base_model") else unwrapped


def unsupported_reasons(trainer: Any, scorers: list[StateScorer], columns: int, requested: list[str]) -> list[Reason]:
    """Returns why these models cannot share beginnings; for the first model, `buckets_sync` finds further reasons.

    requested: what the trainer passes to the models besides texts, or expects besides scores.
    """
    configs = getattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config", {})
    reads_tokens = ("is_prompt_learning", "alora_invocation_tokens")
    virtual = [
        str(config.peft_type)
        for config in configs.values()
        if any(getattr(config, name, None) for name in reads_tokens)
    ]
    is_split = getattr(trainer.accelerator, "parallelism_config", None) is not None
    return that_hold(
        ("TRAINER", "the trainer uses {}", sorted(requested)[:1]),
        ("TRAINER", "the rows or columns of a batch are split among devices", is_split),
        ("VIRTUAL_TOKENS", "{} puts tokens of its own before the prompt, or looks for some in it", virtual[:1]),
        *(scorer.reasons_in_backbone or scorer.unsupported_reasons(columns) for scorer in scorers[1:]),
        scorers[0].reasons_in_backbone,
    )


def batches(buckets: Iterable[Bucket], columns: int, limit: int) -> Iterator[list[int]]:
    """Yields rows in batches of at most `limit` tokens, or of one row; rows of a group are next to each other."""
    batch: list[int] = []
    left = limit
    for bucket in buckets:
        for number, row in enumerate(bucket.rows):
            needed = columns - (bucket.split if number % bucket.rows_per_group else 0)
            if batch and needed > left:
                yield batch
                batch = []
                left = limit
                needed = columns
            batch.append(row)
            left -= needed
    yield batch


class StateScorer(TokenScorer):
    """The forwards of a model's backbone, whose hidden states are in place of scores."""

    def __init__(self, call: GenerateCall, base: Any) -> None:
        super().__init__(call, base, temperature=1.0, entropy=False)
        self.backbone = base.base_model
        self.forward = self.backbone.forward

    @property
    def reasons_in_backbone(self) -> list[Reason]:
        """The reasons why another forward cannot be in place of the backbone's."""
        config = self.model.config.get_text_config()
        return that_hold(
            ("METHOD_REPLACED", "the backbone's forward is not that of its class", "forward" in vars(self.backbone)),
            ("TRAINER", "the model returns router logits", bool(getattr(config, "output_router_logits", False))),
        )

    @contextmanager
    def in_place_of_backbone(self, tokens: Tensor, mask: Tensor) -> Iterator[None]:
        """A context in which the backbone returns the states of these rows' last columns, as many as it is passed."""
        vars(self.backbone)["forward"] = partial(self._states_sync, tokens, mask)
        try:
            yield
        finally:
            del vars(self.backbone)["forward"]

    @check(PREFILL)
    def _states_sync(self, tokens: Tensor, mask: Tensor, *args: Any, **kwargs: Any) -> BaseModelOutputWithPast:
        passed = {name for name, value in kwargs.items() if value is not None} - _OF_OUTPUTS
        if args or passed != {TOKENS, MASK}:
            names = ", ".join(sorted(passed))
            raise LeaveAlone([Reason("ARGUMENT_COLUMNS", f"the backbone is passed {names or 'unnamed arguments'}")])
        columns = kwargs[TOKENS].shape[1] - 1
        try:
            buckets = prefix_groups.buckets_sync(tokens, mask, self.gains)
        except LeaveAlone:  # a batch may have less in common than all rows
            (states,) = self.plain(tokens, mask, columns)
        else:
            (states,) = self.of_buckets(buckets, tokens, mask, columns)
        last = states.new_zeros(len(states), 1, states.shape[2])  # it would predict a token after the last
        return BaseModelOutputWithPast(last_hidden_state=torch.cat([states, last], dim=1))

    def logits(self, columns: int, tokens: Tensor, mask: Tensor | None, node: Any = None) -> Tensor:
        outputs = self.forward(tokens, attention_mask=mask, use_cache=node is not None, **{CACHE: node})
        return outputs.last_hidden_state[:, -columns:]

    def scores(self, tokens: Tensor, logits: Tensor) -> Scores:
        return [logits]
