"""A patch and its state, as data.

Tests: tests/patching/test_patching.py, tests/patching/test_patching_conflicts.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Patch:
    """An attribute of a host library, and the function that replaces it.

    name: a readable name, "transformers.prefill".
    target: "package.module:function" or "package.module:Class.method".
    replacement: "package.module:function", imported when the target is first called, so that neither `import fastgen`
        nor the import of the host grows. It is called as `replacement(original, *args, **kwargs)`; for a method
        `args[0]` is the instance, or the class, and `original` is the unbound function.
    lowest: the lowest version of the host that it was tested with; on a lower one the patch is skipped.
    parameters: names that the signature of the target must have; "cache|past_key_values" means one of both.
    group: patches of one group are applied all or none.
    needs: the lowest versions of other packages that the replacement imports.
    """

    name: str
    target: str
    replacement: str
    lowest: str
    parameters: tuple[str, ...]
    group: str
    needs: tuple[tuple[str, str], ...] = ()

    @cached_property
    def module(self) -> str:
        """The module of the target, "transformers.generation.utils"."""
        return self.target.partition(":")[0]

    @cached_property
    def path(self) -> list[str]:
        """The attributes from the module to the target, ["GenerationMixin", "_prefill"]."""
        return self.target.partition(":")[2].split(".")

    @cached_property
    def host(self) -> str:
        """The top-level package of the target, "transformers"."""
        return self.module.partition(".")[0]


def patch_group(host: str, lowest: str, group: str, *patches: tuple[str, str, str]) -> list[Patch]:
    """Returns patches of one group from the name, the target with its required parameters, and the replacement of each.

    Names, groups and targets are relative to the host, "generation.utils:GenerationMixin.generate(self)", and
    replacements to the host's folder, "generate:generate".
    """
    return [
        Patch(
            f"{host}.{name}",
            f"{host}.{target.partition('(')[0]}",
            f"fastgen.optimizer.{host}.{replacement}",
            lowest,
            tuple(target.partition("(")[2].rstrip(")").split(", ")),
            f"{host}.{group}",
        )
        for name, target, replacement in patches
    ]


@dataclass(frozen=True, repr=False)
class PatchState:
    """The state of a patch (pending, applied, skipped, failed or reverted), and the reason."""

    name: str
    group: str
    state: str
    reason: str
    host: str

    def __repr__(self) -> str:
        return f"{self.name}: {self.state}" + (f" ({self.reason})" if self.reason else "")


class PatchStates(list[PatchState]):
    """A list that prints one line per group, and a single line for a host that is not installed or too old."""

    def __repr__(self) -> str:
        """Returns a table, followed by the reasons that several groups share.

        If nothing is patched for one common reason, such as FASTGEN_DISABLE=1, returns a sentence instead.
        """
        if {patch.state for patch in self} <= {"skipped", "reverted"} and len({patch.reason for patch in self}) == 1:
            return f"Nothing is patched: {self[0].reason}."
        names = dict.fromkeys(patch.host for patch in self)
        hosts = {host: {(patch.state, patch.reason) for patch in self if patch.host == host} for host in names}
        missing = {host for host in hosts if not _is_installed(host)}
        alike = {host for host, states in hosts.items() if len(states) == 1 and next(iter(states))[0] == "skipped"}
        groups: dict[str, list[PatchState]] = {}
        for patch in self:
            groups.setdefault(patch.host if patch.host in missing | alike else patch.group, []).append(patch)
        rows = []
        shared = self._reasons_of_many_groups()
        for name, states in groups.items():
            reasons = "; ".join(dict.fromkeys(patch.reason for patch in states if patch.reason not in ("", *shared)))
            rows.append((name, "not installed", "") if name in missing else (name, states[0].state, reasons))
        return "\n".join([table(rows), *shared])

    def _refused(self) -> dict[str, list[str]]:
        """Returns the hosts of patches that are not active although their host is imported, by the reason."""
        refused: dict[str, list[str]] = {}
        for patch in self:
            if patch.state in ("skipped", "failed", "reverted"):
                refused.setdefault(patch.reason, []).append(patch.host)
        return refused

    @property
    def why_none(self) -> str:
        """Why no patch is active; empty if one is."""
        if any(patch.state == "applied" for patch in self):
            return ""
        return "; ".join(self._refused()) or "no library is imported that fastgen patches"

    def not_active(self) -> tuple[tuple[str, str], ...]:
        """Returns which patches are not active although their host is imported, and why."""
        if why := self.why_none:
            return (("no patch is active", why),)
        return tuple(
            (f"some patches of {' and '.join(dict.fromkeys(hosts))} are not active", reason)
            for reason, hosts in self._refused().items()
        )

    def _reasons_of_many_groups(self) -> list[str]:
        """Returns the reasons that several groups share, such as `fastgen.enabled()`: printed once, below the table."""
        groups: dict[str, set[str]] = {}
        for patch in self:
            if patch.state == "applied" and patch.reason:
                groups.setdefault(patch.reason, set()).add(patch.group)
        return [reason for reason, names in groups.items() if len(names) > 1]


def _is_installed(host: str) -> bool:
    from importlib.util import find_spec  # not imported by `import fastgen`

    return host in sys.modules or find_spec(host) is not None


def table(rows: Iterable[tuple[str, str, str]]) -> str:
    """Returns a text with one row per line and aligned columns."""
    rows = list(rows)
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
    return "\n".join(f"  {a:{widths[0]}}  {b:{widths[1]}}  {c}".rstrip() for a, b, c in rows)
