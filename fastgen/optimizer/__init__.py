"""All patches, and the set that applies them. Imports no host library and no torch."""

from fastgen.config import CONFIG
from fastgen.optimizer import fairseq, transformers
from fastgen.patching import Patch, PatchSet

_LM_EVAL = Patch(
    "lm_eval.log_likelihoods",
    "lm_eval.models.huggingface:HFLM._loglikelihood_tokens",
    "fastgen.optimizer.lm_eval:log_likelihoods",
    tested=("0.4.13", "0.4.13"),  # by tests/test_lm_eval.py
    parameters=("self", "requests", "disable_tqdm", "override_bs"),
    group="lm_eval.log_likelihoods",
    needs=(("transformers", transformers.TESTED[0]),),
)

PATCHES = (*transformers.PATCHES, *fairseq.PATCHES, _LM_EVAL)

PATCH_SET = PatchSet(PATCHES, is_strict=lambda: CONFIG.strict)
