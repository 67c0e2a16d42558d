"""What fastgen changes in lm-evaluation-harness, as data; the replacement is imported when it is first called."""

from fastgen.patching import Patch

TESTED = ("0.4.13", "0.4.13")  # the lowest and the newest version, by tests/test_lm_eval.py

PATCHES = (
    Patch(
        "lm_eval.log_likelihoods",
        "lm_eval.models.huggingface:HFLM._loglikelihood_tokens",
        "fastgen.optimizer.lm_eval.log_likelihoods:log_likelihoods",
        tested=TESTED,
        parameters=("self", "requests", "disable_tqdm", "override_bs"),
        group="lm_eval.log_likelihoods",
    ),
)
