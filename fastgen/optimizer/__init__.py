"""All patches, and the one set that applies them. Imports no host library and no torch."""

from fastgen.config import CONFIG
from fastgen.optimizer import fairseq, lm_eval, transformers
from fastgen.patching import PatchSet

PATCHES = (*transformers.PATCHES, *fairseq.PATCHES, *lm_eval.PATCHES)

PATCH_SET = PatchSet(PATCHES, is_strict=lambda: CONFIG.strict)
