"""All patches, and the one set that applies them. Imports no host library and no torch."""

from fastgen.config import CONFIG
from fastgen.optimizer import fairseq, transformers
from fastgen.patching import PatchSet

PATCHES = (*transformers.PATCHES, *fairseq.PATCHES)

PATCH_SET = PatchSet(PATCHES, is_strict=lambda: CONFIG.strict)
