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
    """One attribute of a host library, and the function that takes its place.

    name: for people, "transformers.prefill".
    target: "package.module:function" or "package.module:Class.method".
    replacement: "package.module:function", imported when the target is first called, so that neither `import fastgen`
        nor the import of the host grows. It is called as `replacement(original, *args, **kwargs)`; for a method
        `args[0]` is the instance, or the class, and `original` is the unbound function.
    tested: the lowest and the newest version of the host that it was tested with. On a lower one the patch is
        skipped, on a newer one it is applied and `PatchSet.untested_hosts` says so.
    parameters: names that the signature of the target must have; of "cache|past_key_values" one.
    group: patches of one group are applied all or none.
    needs: the lowest versions of other packages that the replacement imports.
    """

    name: str
    target: str
    replacement: str
    tested: tuple[str, str]
    parameters: tuple[str, ...]
    group: str
    needs: tuple[tuple[str, str], ...] = ()

    @cached_property
    def module(self) -> str:
        """The module of the target, "transformers.generation.utils"."""
        return self.target.partition(":")[0]

    @cached_property
    def path(self) -> list[str]:
        """The attributes that lead from the module to the target, ["GenerationMixin", "_prefill"]."""
        return self.target.partition(":")[2].split(".")

    @cached_property
    def host(self) -> str:
        """The top-level package of the target, "transformers"."""
        return self.module.partition(".")[0]


def patch_group(host: str, tested: tuple[str, str], group: str, *patches: tuple[str, str, str]) -> list[Patch]:
    """Patches of one group: name, target with the parameters it must have, and replacement of each.

    Names, groups and targets are the host's, "generation.utils:GenerationMixin.generate(self)"; replacements are in
    the host's folder, "generate:generate".
    """
    return [
        Patch(
            f"{host}.{name}",
            f"{host}.{target.partition('(')[0]}",
            f"fastgen.optimizer.{host}.{replacement}",
            tested,
            tuple(target.partition("(")[2].rstrip(")").split(", ")),
            f"{host}.{group}",
        )
        for name, target, replacement in patches
    ]


@dataclass(frozen=True, repr=False)
class PatchState:
    """What became of a patch (pending, applied, skipped, failed or reverted), and why."""

    name: str
    group: str
    state: str
    reason: str
    host: str

    def __repr__(self) -> str:
        return f"{self.name}: {self.state}" + (f" ({self.reason})" if self.reason else "")


class PatchStates(list[PatchState]):
    """A list that is shown with one line for each group, and one for a host that is not installed or too old."""

    def __repr__(self) -> str:
        """A table, and below it what is so for several groups.

        A sentence where nothing is patched for one reason, such as FASTGEN_DISABLE=1.
        """
        if {one.state for one in self} <= {"skipped", "reverted"} and len({one.reason for one in self}) == 1:
            return f"Nothing is patched: {self[0].reason}."
        hosts = {one.host: {(other.state, other.reason) for other in self if other.host == one.host} for one in self}
        missing = {host for host in hosts if not _is_installed(host)}
        alike = {host for host, states in hosts.items() if len(states) == 1 and next(iter(states))[0] == "skipped"}
        groups: dict[str, list[PatchState]] = {}
        for one in self:
            groups.setdefault(one.host if one.host in missing | alike else one.group, []).append(one)
        rows, of_many = [], self._reasons_of_many_groups()
        for name, states in groups.items():
            reasons = "; ".join(dict.fromkeys(one.reason for one in states if one.reason not in ("", *of_many)))
            rows.append((name, "not installed", "") if name in missing else (name, states[0].state, reasons))
        return "\n".join([table(rows), *of_many])

    def not_active(self) -> tuple[tuple[str, str], ...]:
        """What is not active, and why, of patches that were to be applied; nothing where they only wait for a host."""
        refused: dict[str, list[str]] = {}
        for one in self:
            if one.state in ("skipped", "failed", "reverted"):
                refused.setdefault(one.reason, []).append(one.host)
        if any(one.state == "applied" for one in self):
            return tuple(
                (f"some patches of {' and '.join(dict.fromkeys(hosts))} are not active", reason)
                for reason, hosts in refused.items()
            )
        return (("no patch is active", "; ".join(refused) or "no library is imported that fastgen patches"),)

    def _reasons_of_many_groups(self) -> list[str]:
        """Returns the reasons that several groups share, such as a host's version: printed once, below the table."""
        groups: dict[str, set[str]] = {}
        for one in self:
            if one.state == "applied" and one.reason:
                groups.setdefault(one.reason, set()).add(one.group)
        return [reason for reason, names in groups.items() if len(names) > 1]


def _is_installed(host: str) -> bool:
    from importlib.util import find_spec  # which `import fastgen` does without

    return host in sys.modules or find_spec(host) is not None


def table(rows: Iterable[tuple[str, str, str]]) -> str:
    """One row a line, the columns below each other."""
    rows = list(rows)
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
    return "\n".join(f"  {a:{widths[0]}}  {b:{widths[1]}}  {c}".rstrip() for a, b, c in rows)
