"""Whose an error is: what is restored, what the caller gets, and what is switched off."""

import asyncio
import importlib
import types

import pytest
import torch
from fake_hosts import armed, make_patch, only_state

from fastgen.patching import Fallback, SwitchedOff, disabled

pytest_plugins = ["fake_hosts"]

# The code in this file stands for a host's and fastgen's; user code has the name of another module.
HERE = __name__.partition(".")[0]
USER = """
def processor(scores):
    raise KeyError("user's")

class Streamer:
    put = staticmethod(processor)

def hook(module, inputs):
    processor(inputs)
"""
user = types.ModuleType("user_code")
exec(USER, vars(user))


def call_hook():
    module = torch.nn.Identity()
    module.register_forward_pre_hook(user.hook)
    module(1)


def own_work():
    raise KeyError("ours")


USER_CODE = {
    "a processor": lambda: user.processor(1),
    "a streamer": lambda: user.Streamer().put(1),
    "a hook": call_hook,
}


@pytest.fixture
def undone():
    return []


def inside(fallbacks, work):
    """Runs the work in these contexts, of which the first is the outermost."""
    if not fallbacks:
        return work()
    with fallbacks[0]:
        return inside(fallbacks[1:], work)


@pytest.mark.parametrize("work", USER_CODE.values(), ids=USER_CODE)
def test_an_error_of_user_code_undoes_nothing(undone, work):
    with pytest.raises(KeyError, match="user's") as error:
        inside([Fallback(HERE, undo=undone.append)], work)
    assert not Fallback(HERE, undo=undone.append).claims(error.value) and not undone


def test_an_error_of_fastgen_is_undone_and_passes(undone):
    with pytest.raises(KeyError, match="ours") as error:
        inside([Fallback(HERE, undo=undone.append)], own_work)
    assert undone == [error.value]
    assert Fallback("other_host", is_callers=True).claims(error.value) and not vars(error.value)


def test_after_user_code_has_run_every_error_is_the_callers(undone):
    with pytest.raises(KeyError, match="ours") as error:
        inside([Fallback(HERE, undo=undone.append, is_callers=True)], own_work)
    assert not Fallback().claims(error.value) and not undone


def test_without_packages_every_error_is_fastgens(undone):
    with pytest.raises(KeyError, match="user's"):
        inside([Fallback(undo=undone.append)], USER_CODE["a processor"])
    assert len(undone) == 1


@pytest.mark.parametrize("is_callers", [False, True])
def test_enclosing_contexts_agree_with_the_innermost(undone, is_callers):
    outer, inner = (Fallback(HERE, undo=undone.append, is_callers=value) for value in (not is_callers, is_callers))
    with pytest.raises(KeyError, match="ours"):
        inside([outer, inner], own_work)
    assert len(undone) == (0 if is_callers else 2)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError])
def test_an_interruption_is_nobodys_error(undone, kind):
    def interrupted():
        raise kind

    with pytest.raises(kind):
        inside([Fallback(undo=undone.append)], interrupted)
    assert not undone


def test_after_switching_off_the_original_works_whatever_has_run(undone):
    def switched_off():
        raise SwitchedOff

    with pytest.raises(SwitchedOff) as error:
        inside([Fallback(HERE, undo=undone.append, is_callers=True)], switched_off)
    assert undone == [error.value]


def test_a_context_in_a_generator_or_a_task_is_its_own(undone):
    def steps():
        with Fallback(HERE, undo=undone.append):
            yield 1
            own_work()

    async def awaited(fails):
        with Fallback(HERE, undo=undone.append):
            await asyncio.sleep(0)
            return own_work() if fails else "done"

    async def both():
        return await asyncio.gather(awaited(True), awaited(False), return_exceptions=True)

    generator = steps()
    assert next(generator) == 1
    with Fallback(HERE, undo=undone.append):
        generator.close()
    assert not undone
    with pytest.raises(KeyError):
        list(steps())
    assert len(undone) == 1
    error, answer = asyncio.run(both())
    assert undone[1:] == [error] and answer == "done"


# What the wrapper of a patch makes of it.

HOST = """
calls = []

def function(x):
    calls.append(x)
    if x == "refused":
        raise ValueError("theirs")
    return ("original", x)

def outer(x):
    return ("outer", function(x))
"""
FAST = """
from fastgen.patching import Fallback, SwitchedOff

def fast(original, x):
    raise KeyError("ours")

def interrupted(original, x):
    raise KeyboardInterrupt

def user_code_ran(original, x):
    with Fallback(is_callers=True):
        raise KeyError("ours")

def after_original(original, x):
    original(x)
    raise KeyError("ours")

def undone_after_original(original, x):
    original(x)
    with Fallback():
        raise KeyError("ours")

def switched_off(original, x):
    raise SwitchedOff

def passes(original, x):
    return ("fast", original(x))

def yields(original, x):
    yield x
    raise KeyError("ours")

async def awaited(original, x):
    raise KeyError("ours")
"""


@pytest.fixture
def host(write):
    return importlib.import_module(write(HOST))


@pytest.fixture
def patched(host, write):
    """Patches functions of the host, each in a group of its own, with functions of `FAST`; returns the patch set."""
    names = write(FAST, "fast")

    def patch(is_strict=False, **replacements):
        patches = [
            make_patch(f"{host.__name__}:{name}", f"{names}:{fast}", group=name) for name, fast in replacements.items()
        ]
        return armed(*patches, is_strict=lambda: is_strict)

    return patch


@pytest.mark.parametrize("name", ["user_code_ran", "after_original"])
def test_an_error_that_is_the_callers_switches_nothing_off(host, patched, name):
    patch_set = patched(function=name)
    with pytest.raises(KeyError, match="ours"):
        host.function(1)
    assert only_state(patch_set).state == "applied" and len(host.calls) == (name == "after_original")


def test_what_was_undone_is_repeated_after_the_original(host, patched):
    patch_set = patched(function="undone_after_original")
    assert host.function(1) == ("original", 1) and host.calls == [1, 1]
    assert only_state(patch_set).state == "failed"


def test_an_error_of_the_original_reaches_the_caller_once(host, patched):
    patch_set = patched(function="passes")
    with pytest.raises(ValueError, match="theirs"):
        host.function("refused")
    assert host.calls == ["refused"] and only_state(patch_set).state == "applied"


@pytest.mark.parametrize("is_strict", [False, True])
def test_an_error_of_the_original_comes_before_one_of_fastgen(host, patched, is_strict):
    patch_set = patched(is_strict, function="fast")
    with pytest.raises(ValueError, match="theirs"):
        host.function("refused")
    assert only_state(patch_set).state == "applied"


def test_an_interruption_is_no_reason_to_work_again(host, patched):
    patch_set = patched(function="interrupted")
    with pytest.raises(KeyboardInterrupt):
        host.function(1)
    assert not host.calls and only_state(patch_set).state == "applied"


def test_a_call_that_was_switched_off_fails_nothing(host, patched, caplog):
    patch_set = patched(function="switched_off")
    assert host.function(1) == ("original", 1)
    assert only_state(patch_set).state == "applied" and not caplog.records


@pytest.mark.parametrize("outer", ["passes", "fast"])
def test_nested_replacements_are_switched_off_if_they_fail(host, patched, outer):
    patch_set = patched(outer=outer, function="fast")
    with disabled():
        expected = host.outer(1)
    assert host.outer(1) == (("fast", expected) if outer == "passes" else expected)
    # After an error of the outer one, the original reaches no replacement.
    states = ["applied", "failed"] if outer == "passes" else ["failed", "applied"]
    assert [state.state for state in patch_set.states()] == states


def test_strict_raises_the_error_of_a_nested_replacement_once(host, patched):
    patch_set = patched(True, outer="passes", function="undone_after_original")
    with pytest.raises(KeyError, match="ours") as error:
        host.outer(1)
    assert host.calls == [1, 1] and not vars(error.value)
    assert {state.state for state in patch_set.states()} == {"applied"}


def test_errors_of_generators_and_coroutines_are_the_callers(host, patched):
    patch_set = patched(function="yields", outer="awaited")
    with pytest.raises(KeyError, match="ours"):
        list(host.function(1))
    with pytest.raises(KeyError, match="ours"):
        asyncio.run(host.outer(1))
    assert {state.state for state in patch_set.states()} == {"applied"} and not host.calls
