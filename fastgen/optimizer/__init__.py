"""All patches, and the set that applies them. Imports no host library and no torch.

Tests: tests/test_package.py, tests/test_lm_eval.py, tests/test_trl.py
"""

from fastgen.config import CONFIG
from fastgen.models import LOWEST
from fastgen.optimizer import fairseq, transformers
from fastgen.patching import Patch, PatchSet
from fastgen.patching.namesakes import notice

_LM_EVAL = Patch(
    "lm_eval.log_likelihoods",
    "lm_eval.models.huggingface:HFLM._loglikelihood_tokens",
    "fastgen.optimizer.lm_eval:log_likelihoods",
    lowest="0.4.13",
    parameters=("self", "requests", "disable_tqdm", "override_bs"),
    group="lm_eval.log_likelihoods",
    needs=(("transformers", LOWEST["transformers"]),),
)


def _of_trainer(name: str, method: str, parameters: tuple[str, ...], replacement: str) -> Patch:
    return Patch(
        f"trl.{name.lower()}.{replacement}",
        f"trl.trainer.{name.lower()}_trainer:{name}Trainer.{method}",
        f"fastgen.optimizer.trl:{replacement}",
        lowest="1.16.0",
        parameters=("self", "model", *parameters),
        group=f"trl.{name.lower()}",
        needs=(("transformers", LOWEST["transformers"]),),
    )


_SCORED = ("input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy", "compute_aux_loss")
_TRL = (
    _of_trainer("GRPO", "_get_per_token_logps_and_entropies", _SCORED, "token_scores"),
    _of_trainer("RLOO", "_get_per_token_logps_and_entropies", _SCORED, "token_scores"),
    _of_trainer("DPO", "_compute_loss", ("inputs", "return_outputs"), "preference_loss"),
    _of_trainer("DPO", "compute_ref_log_probs", ("inputs",), "reference_scores"),
)

PATCHES = (*transformers.PATCHES, *fairseq.PATCHES, _LM_EVAL, *_TRL)

PATCH_SET = PatchSet(PATCHES, is_strict=lambda: CONFIG.strict, notice=notice)
