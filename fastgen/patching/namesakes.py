"""Finds other projects whose module is also called fastgen, so that a user does not take one for the other.

facebookresearch/fastgen, NVlabs/FastGen and the `fastgen` of the package index install a module of this name.

Tests: tests/patching/test_namesakes.py
"""

from __future__ import annotations

import os
import sys

_OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))  # .../fastgen
_OWN_FILE = os.path.join("patching", "patch_set.py")  # that no other fastgen has


def notice() -> str:
    """Returns a line that names another project's fastgen on `sys.path`, or an empty string.

    Takes less than a millisecond, because the first patch calls it: it reads no metadata, and lists folders of
    installed packages only.
    """
    for folder in sys.path:
        if isinstance(folder, str) and (other := _distribution_in(folder) or _module_in(folder)):
            return (
                f"{other} is another project whose module is also called fastgen; this is fastgen-generate, in "
                f"{_OWN_FOLDER}. Install the two in separate virtual environments"
            )
    return ""


def _distribution_in(folder: str) -> str:
    """Returns "fastgen 1.0 in FOLDER" if a distribution called fastgen is installed there; ours is fastgen_generate."""
    if not folder.rstrip(os.sep).endswith(("site-packages", "dist-packages")):
        return ""
    try:
        names = os.listdir(folder)
    except OSError:
        return ""
    for name in names:
        if not name.lower().startswith("fastgen"):
            continue
        stem, ending = os.path.splitext(name)
        project, _, version = stem.lower().partition("-")
        if ending in (".dist-info", ".egg-info") and project == "fastgen":
            return f"fastgen {version} in {folder}".replace("  ", " ")
    return ""


def _module_in(folder: str) -> str:
    """Returns the folder of another project's module `fastgen`, if there is one."""
    module = os.path.join(folder, "fastgen")
    try:
        is_other = os.path.isfile(os.path.join(module, "__init__.py")) and not os.path.isfile(
            os.path.join(module, _OWN_FILE)
        )
    except ValueError:  # an entry of sys.path with a null character
        return ""
    return module if is_other else ""
