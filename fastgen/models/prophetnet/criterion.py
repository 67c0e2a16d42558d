"""The loss of ProphetNet: every predict stream predicts the same targets, from a context that ends earlier.

Tests: tests/models/prophetnet/test_prophetnet.py
"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

import torch
from fairseq import metrics, utils
from fairseq.criterions import FairseqCriterion, register_criterion
from torch import Tensor
from torch.nn import functional


@register_criterion("ngram_language_loss")
class NgramLanguageLoss(FairseqCriterion):
    """The mean negative log-likelihood over all predict streams (Qi et al., 2020, eq. 2, with equal weights).

    eps: label smoothing. disable_ngram_loss: whether only the first stream counts. Like in the authors' code, the loss
    is summed over streams, and the sample size counts the targets of each.
    """

    def __init__(self, task: Any, eps: float = 0.0, disable_ngram_loss: bool = False) -> None:
        super().__init__(task)
        self.eps, self.disable_ngram_loss = eps, disable_ngram_loss

    @staticmethod
    def add_args(parser: ArgumentParser) -> None:
        parser.add_argument("--eps", default=0.0, type=float, metavar="E", help="label smoothing")
        parser.add_argument("--disable-ngram-loss", action="store_true", help="only the next token counts")

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """Returns the summed loss, the number of targets, and values to log."""
        logits, extra = model(**sample["net_input"])
        streams = [logits] if self.disable_ngram_loss else [logits, *extra["ngram_logits"]]
        targets = sample["target"].flatten()
        losses = [self._loss(stream.flatten(0, 1), targets) for stream in streams]
        loss = torch.stack(losses).sum()
        sample_size = len(streams) * int(targets.ne(self.padding_idx).sum())
        logged = {
            "loss": loss.detach(),
            "ntokens": sample["ntokens"],
            "nsentences": sample["target"].size(0),
            "sample_size": sample_size,
        }
        return loss, sample_size, logged

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(
            logits.float(), targets, ignore_index=self.padding_idx, reduction="sum", label_smoothing=self.eps
        )

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        total, size = (sum(output[name] for output in logging_outputs) for name in ("loss", "sample_size"))
        metrics.log_scalar("loss", total / size / torch.log(torch.tensor(2.0)), size, round=3)
        metrics.log_derived("ppl", lambda meters: utils.get_perplexity(meters["loss"].avg))

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True
