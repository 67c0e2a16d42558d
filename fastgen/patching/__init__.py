"""Patches as data, and the code that applies and reverts them; knows no host library and imports none.

patch.py          Patch and PatchState, the data
target.py         finds the target of a patch, checks that it fits, installs and removes the replacement
patch_set.py      PatchSet: applies groups of patches when their host has been imported, reverts them, keeps states
import_hooks.py   calls back after a host was imported, without importing anything before
"""

from fastgen.patching.patch import Patch, PatchState, PatchStates, patch_group, table
from fastgen.patching.patch_set import PatchSet, disabled, switched, warn
from fastgen.provenance import Fallback, SwitchedOff

__all__ = [
    "Fallback",
    "Patch",
    "PatchSet",
    "PatchState",
    "PatchStates",
    "SwitchedOff",
    "disabled",
    "patch_group",
    "switched",
    "table",
    "warn",
]
