"""PatchSet: applies patches once their host is imported, reverts them, and keeps a state with a reason for each.

Errors here must not break the host: an error is recorded as a state and logged, and the original stays. If
`is_strict()` is true (tests, CI), it is raised.

Tests: tests/patching/test_patching.py, tests/patching/test_patching_conflicts.py, tests/patching/test_fallback.py
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType

from fastgen.patching.import_hooks import LOCK, call_after_import
from fastgen.patching.patch import Patch, PatchState, PatchStates
from fastgen.patching.target import Target, Unmet, find_target, host_version, too_old
from fastgen.provenance import Fallback, SwitchedOff, packages_of

logger = logging.getLogger("fastgen")

# The value of the innermost `switched` of this thread or task; unset outside.
_switch: ContextVar[bool] = ContextVar("fastgen_switch")


@contextmanager
def switched(on: bool) -> Iterator[None]:
    """A context in which calls of this thread or task reach replacements (on) or originals; the innermost counts.

    A thread started inside does not inherit it, an asyncio task does.
    """
    token = _switch.set(on)
    try:
        yield
    finally:
        with suppress(ValueError):  # a generator was started in another context
            _switch.reset(token)


def disabled() -> AbstractContextManager[None]:
    """Disables fastgen in this thread or task; a thread started inside does not inherit it. Also a decorator."""
    return switched(False)


def warn(message: str) -> None:
    """Issues a RuntimeWarning; if user code turns warnings into errors, logs the message instead."""
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    except RuntimeWarning:
        logger.warning(message)


@dataclass
class _Record:
    patch: Patch
    state: str = "pending"
    reason: str = ""
    target: Target | None = None

    def set(self, state: str, reason: str) -> None:
        self.state, self.reason = state, reason


class PatchSet:
    """Applies and reverts `patches`; every method may be called twice, and from any thread.

    notice: returns a line that is logged as a warning when the first patch is applied, or an empty string.
    direct: the patches that replace the host's own function, not one that another library has put there.
    """

    def __init__(
        self,
        patches: Iterable[Patch],
        *,
        is_strict: Callable[[], bool] = lambda: False,
        notice: Callable[[], str] = lambda: "",
    ) -> None:
        self._is_strict = is_strict
        self._notice: Callable[[], str] | None = notice
        self.direct: set[str] = set()
        self._groups: dict[str, list[_Record]] = {}
        self._by_name: dict[str, _Record] = {}
        for patch in patches:
            record = self._by_name[patch.name] = _Record(patch, reason=_waiting_for({patch.module}))
            self._groups.setdefault(patch.group, []).append(record)
        self._modules: dict[str, ModuleType] = {}
        self._hooked: set[str] = set()
        self._warned: set[str] = set()  # groups that do not fit their host, and hosts that are too old
        self._armed = False
        self._everywhere = False  # also outside of `switched`

    def arm(self, everywhere: bool = True, again: bool = False) -> None:
        """Applies the patches of imported hosts, and those of other hosts after their import.

        everywhere: if false, calls reach the replacements only inside `switched(True)`, unless the set was armed
        before. again: whether patches that have failed are tried again.
        """
        with LOCK:
            for record in self._records() if again else ():
                if record.state == "failed":
                    record.set("pending", _waiting_for({record.patch.module}))
            self._armed = True
            self._everywhere |= everywhere
            targets = {record.patch.module for record in self._records()}
            new = targets - self._hooked
            self._hooked |= new
        try:
            for module in sorted(new):
                if module not in sys.modules:
                    call_after_import(module, functools.partial(self._imported, module))
                elif _is_being_imported(sys.modules[module]):
                    importlib.import_module(module)  # waits for another thread's import of it
        except Exception:
            if self._is_strict():
                raise
            logger.warning("fastgen cannot follow the import of its hosts", exc_info=True)
        self.apply()

    def apply(self) -> None:
        """Applies every group whose modules are all imported, if the set is armed."""
        errors = []
        with LOCK:
            if not self._armed:
                return
            for group in self._groups:
                try:
                    self._apply_group(group)
                except Exception as error:
                    self._take_back(group, "failed", f"{type(error).__name__}: {error}")
                    errors.append((group, error))
        for group, failure in errors:
            logger.warning("fastgen leaves %s to the originals: %r", group, failure, exc_info=failure)
        if errors and self._is_strict():
            raise errors[0][1]

    def revert(self, reason: str = "disabled") -> None:
        """Restores the originals; hosts imported later are not patched until `arm` is called again."""
        with LOCK:
            self._armed = self._everywhere = False
            for group, records in self._groups.items():
                if all(record.state in ("applied", "pending") for record in records):
                    self._take_back(group, "reverted", reason)

    def skip(self, reason: str) -> None:
        """Records why nothing is patched; an armed set stays armed."""
        with LOCK:
            for record in () if self._armed else self._records():
                record.set("skipped", reason)

    def fail(self, group: str, reason: str, error: Exception | None = None) -> None:
        """Switches a group off because its results differ from the original's, or might; `arm(again=True)` undoes it.

        reason: what differed, for a warning and the states; or the patch that raised `error`, which is logged instead.
        """
        if group not in self._groups:
            raise ValueError(f"group is {group!r} (accepted: {', '.join(self._groups)})")
        if error is not None:
            reason = f"{reason} raised {type(error).__name__}: {error}"
        if self._take_back(group, "failed", reason):
            if error is None:
                warn(f"fastgen leaves {group} to the originals: {reason}")
            else:
                logger.warning("fastgen leaves %s to the originals: %r", group, error, exc_info=error)

    def load_replacements(self) -> None:
        """Imports the replacements of applied patches, so that the states show failures before the first call."""
        for record in list(self._records()):
            if record.state == "applied":
                try:
                    _load(record.patch.replacement)
                except Exception as error:
                    if self._is_strict():
                        raise
                    self.fail(record.patch.group, record.patch.name, error)

    def states(self) -> PatchStates:
        """Returns the state of every patch, in their order."""
        with LOCK:
            records = self._records()
            return PatchStates(
                PatchState(r.patch.name, r.patch.group, r.state, self._reason(r), r.patch.host) for r in records
            )

    def take_notice(self) -> str:
        """Returns the notice the first time, then an empty string: it is shown once."""
        notice, self._notice = self._notice, None
        return notice() if notice else ""

    def _reason(self, record: _Record) -> str:
        if self._everywhere or record.state != "applied":
            return record.reason
        return "inside fastgen.enabled() only"

    @property
    def switched_off(self) -> dict[str, str]:
        """Returns the groups that have failed, and why."""
        return {group: records[0].reason for group, records in self._groups.items() if records[0].state == "failed"}

    def in_effect(self, name: str) -> bool:
        """Whether calls reach this patch first, and then the host: no other library has patched after or before it."""
        record = self._by_name.get(name)
        return record is not None and record.target is not None and record.target.is_on_top() and name in self.direct

    @property
    def is_on(self) -> bool:
        """Whether calls in this thread or task reach the replacements of applied patches."""
        return _switch.get(self._everywhere)

    def _records(self) -> Iterator[_Record]:
        for records in self._groups.values():
            yield from records

    def _imported(self, name: str, module: ModuleType) -> None:
        with LOCK:
            self._modules[name] = module
        self.apply()

    def _apply_group(self, group: str) -> None:
        records = self._groups[group]
        if any(record.state in ("applied", "failed") for record in records):
            return
        patch = records[0].patch
        if patch.host in sys.modules and (why := too_old(patch)):
            for record in records:
                record.set("skipped", why)
            if why not in self._warned:
                self._warned.add(why)
                logger.warning("fastgen leaves %s alone: %s", patch.host, why)
            return
        missing = {r.patch.module for r in records if not self._is_imported(r.patch.module)}
        if missing:
            for record in records:
                record.set("pending", _waiting_for(missing))
            return
        targets = self._targets_of(group)
        for record, target in targets:
            if target.installed is None:
                target.install(self._wrapper(record, target))
        for record, target in targets:
            target.active = True
            if packages_of(target.function) == {record.patch.host}:
                self.direct.add(record.patch.name)
            else:
                self.direct.discard(record.patch.name)
            record.set("applied", "")
            logger.debug("fastgen applied %s", record.patch.name)
        if text := self.take_notice():
            logger.warning("%s", text)

    def _targets_of(self, group: str) -> list[tuple[_Record, Target]]:
        """Returns the target of each patch; none, with a warning, if one is missing: a group is applied all or none."""
        targets: list[tuple[_Record, Target]] = []
        unmet: dict[str, str] = {}
        records = self._groups[group]
        for record in records:
            try:
                target = record.target
                if target is None or not target.still_buried():
                    target = record.target = find_target(record.patch, self._modules[record.patch.module])
                targets.append((record, target))
            except Unmet as why:
                unmet[record.patch.name] = str(why)
        if not unmet:
            return targets
        for record in records:
            rest = f"{group} is applied all or none, without {', '.join(unmet)}"
            record.set("skipped", unmet.get(record.patch.name, rest))
        if group not in self._warned:
            self._warned.add(group)
            host = records[0].patch.host
            version = host_version(host) or "without a version"
            warn(f"fastgen leaves {group} to {host} {version}: {'; '.join(unmet.values())}")
        return []

    def _is_imported(self, name: str) -> bool:
        module = sys.modules.get(name)
        if module is not None and not _is_being_imported(module):
            self._modules[name] = module
        return name in self._modules

    def _take_back(self, group: str, state: str, reason: str) -> bool:
        """Removes the group's patches and sets its state; returns False if it had failed before."""
        with LOCK:
            if any(record.state == "failed" for record in self._groups[group]):
                return False
            for record in self._groups[group]:
                on_top = record.target.remove() if record.target and record.target.installed is not None else ""
                left = f"; left in place under {on_top}, but inert" if on_top else ""
                record.set(state, reason + left)
            return True

    def _wrapper(self, record: _Record, target: Target) -> Callable:
        """Returns the function in place of the target: it calls the replacement, or the original if fastgen is off."""
        function = target.function
        packages = (record.patch.host, record.patch.replacement.partition(":")[0].partition(".")[0])
        replacement: Callable | None = None

        def call(*args: object, **kwargs: object) -> object:
            if (torch := sys.modules.get("torch")) is not None and torch.compiler.is_compiling():
                return function(*args, **kwargs)  # one graph, which checking the switch would break
            if not (target.active and _switch.get(self._everywhere)):
                return function(*args, **kwargs)
            nonlocal replacement
            called = False

            def original(*args: object, **kwargs: object) -> object:
                nonlocal called
                called = True
                return function(*args, **kwargs)

            try:
                if replacement is None:
                    replacement = _load(record.patch.replacement)
                return replacement(original, *args, **kwargs)
            except Exception as error:
                if not Fallback(*packages, is_callers=called).claims(error):
                    raise
                if not self._is_strict():
                    traceback.clear_frames(error.__traceback__)  # frees what the replacement had allocated
                ours = error
            with disabled():
                result = function(*args, **kwargs)  # if it refuses this call as well, the caller gets its error
            if self._is_strict():
                raise ours
            if not isinstance(ours, SwitchedOff):
                self.fail(record.patch.group, record.patch.name, ours)
            return result

        wrapper = _standing_in_for(function, call)
        vars(wrapper)["__signature__"] = target.signature  # hosts read it, and computing it takes 20 µs
        # User code relies on `generate.__wrapped__` being `generate` without its `no_grad`; it is not changed.
        if hasattr(function, "__wrapped__"):
            vars(wrapper)["__wrapped__"] = function.__wrapped__
        return wrapper


def _standing_in_for(function: Callable, call: Callable) -> Callable:
    """Returns a function that does what `call` does and looks like `function`.

    `torch.jit.script` compiles the source of the original, which it finds by `__wrapped__`, but looks names up in the
    globals of the function that it is called with.
    """

    def wrapper(*args: object, **kwargs: object) -> object:
        return call(*args, **kwargs)

    names = getattr(function, "__globals__", wrapper.__globals__)
    wrapper = types.FunctionType(wrapper.__code__, names, wrapper.__name__, None, wrapper.__closure__)
    return functools.update_wrapper(wrapper, function)


def _load(replacement: str) -> Callable:
    module, _, name = replacement.partition(":")
    return getattr(importlib.import_module(module), name)


def _waiting_for(modules: set[str]) -> str:
    first, *rest = sorted(modules)
    return f"waits for the import of {first}" + (f" and {len(rest)} more" if rest else "")


def _is_being_imported(module: ModuleType) -> bool:
    return getattr(getattr(module, "__spec__", None), "_initializing", False)
