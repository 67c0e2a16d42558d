"""The patch layer applies, skips and reverts patches of host libraries that each test writes."""

import asyncio
import contextvars
import importlib
import inspect
import re
import sys
import threading
import types

import pytest
from fake_hosts import FAST, HOST, armed, make_patch, module_name, only_state

from fastgen.patching import PatchSet, PatchState, PatchStates, disabled, switched

pytest_plugins = ["fake_hosts"]


def test_a_patch_waits_for_its_host_and_imports_nothing(write):
    host, fast = write(HOST), write(FAST, "fast")
    patch_set = armed(make_patch(f"{host}:function", f"{fast}:fast"))
    assert str(only_state(patch_set)) == f"{host}:function: pending (waits for the import of {host})"
    assert host not in sys.modules
    module = importlib.import_module(host)
    assert only_state(patch_set).state == "applied"
    assert fast not in sys.modules
    assert module.function(2) == ("fast", 2)


def test_a_module_imported_before_is_patched_immediately(host, fast):
    patch_set = armed(make_patch(f"{host.__name__}:function", fast))
    assert only_state(patch_set).state == "applied" and host.function(2, scale=3) == ("fast", 6)


def test_a_submodule_is_patched_when_it_is_imported(tmp_path, write, fast):
    package = module_name("package")
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("__version__ = '1.1'")
    (tmp_path / package / "deep.py").write_text(HOST)
    patch_set = armed(make_patch(f"{package}.deep:function", fast))
    importlib.import_module(package)
    assert only_state(patch_set).state == "pending"
    assert importlib.import_module(f"{package}.deep").function(1) == ("fast", 1)


@pytest.mark.parametrize(
    ("path", "call", "original"),
    [
        ("function", lambda host: host.function(2), 2),
        ("Base.method", lambda host: host.Base().method(2), ("original", 2)),
        ("Base.of_class", lambda host: host.Child.of_class(2), ("Child", 2)),
        ("Base.static", lambda host: host.Base().static(2), ("static", 2)),
        ("Child.method", lambda host: host.Child().method(2), ("original", 2)),
        ("Child.of_class", lambda host: host.Child.of_class(2), ("Child", 2)),
    ],
)
def test_every_kind_of_function_is_patched_and_restored(host, fast, path, call, original):
    owner = getattr(host, path.split(".")[0]) if "." in path else host
    before = dict(vars(owner))
    patch_set = armed(make_patch(f"{host.__name__}:{path}", fast))
    assert call(host) == ("fast", original)
    assert vars(owner) != before
    patch_set.revert()
    assert only_state(patch_set).state == "reverted"
    assert dict(vars(owner)) == before
    assert call(host) == original


def test_a_patched_child_leaves_its_base_alone(host, fast):
    early = host.Child()
    armed(make_patch(f"{host.__name__}:Child.method", fast))
    assert host.Base().method(1) == ("original", 1) and early.method(1) == ("fast", ("original", 1))


def test_the_patched_function_looks_like_the_original(host, fast):
    original = host.Base.method
    armed(make_patch(f"{host.__name__}:Base.method", fast))
    assert host.Base.method is not original
    assert inspect.signature(host.Base.method) == inspect.signature(original)
    assert (host.Base.method.__doc__, host.Base.method.__name__) == ("Returns x.", "method")


def test_arming_or_reverting_twice_is_as_good_as_once(host, fast):
    patch_set = armed(make_patch(f"{host.__name__}:function", fast))
    patch_set.arm()
    patch_set.apply()
    assert host.function(1) == ("fast", 1)
    patch_set.revert()
    patch_set.revert()
    assert host.function(1) == 1
    patch_set.arm()
    assert host.function(1) == ("fast", 1)


def test_torch_compiles_the_original_in_one_graph(host, fast):
    torch = pytest.importorskip("torch")
    armed(make_patch(f"{host.__name__}:function", fast))
    compiled = torch.compile(host.function, backend="eager", fullgraph=True)
    assert host.function(2) == ("fast", 2)
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2))


def test_a_reverted_set_leaves_a_host_imported_later_alone(write, fast):
    name = write(HOST)
    patch_set = armed(make_patch(f"{name}:function", fast))
    patch_set.revert("because")
    host = importlib.import_module(name)
    assert host.function(1) == 1 and (only_state(patch_set).state, only_state(patch_set).reason) == (
        "reverted",
        "because",
    )
    patch_set.arm()
    assert host.function(1) == ("fast", 1)


@pytest.mark.filterwarnings("ignore:fastgen leaves")
def test_a_second_set_does_not_stack_on_the_first(host, fast):
    patch = make_patch(f"{host.__name__}:function", fast)
    armed(patch)
    second = armed(patch)
    assert host.function(1) == ("fast", 1)
    assert only_state(second).state == "skipped" and "another copy of fastgen" in only_state(second).reason


FAST_ONE = ("fast", 1)


@pytest.fixture
def off_by_default(host, fast):
    """A patch set, and a call of its host that returns 1 without fastgen and FAST_ONE with it."""
    patch_set = PatchSet([make_patch(f"{host.__name__}:function", fast)])
    patch_set.arm(everywhere=False)
    return patch_set, lambda: host.function(1)


@pytest.mark.parametrize("on", [True, False])
def test_a_switch_concerns_its_thread_only(off_by_default, on):
    patch_set, call = off_by_default
    assert (only_state(patch_set).state, only_state(patch_set).reason) == ("applied", "inside fastgen.enabled() only")
    inside, outside = (FAST_ONE, 1) if on else (1, FAST_ONE)
    if not on:
        patch_set.arm()
    elsewhere = []
    with switched(on):
        thread = threading.Thread(target=lambda: elsewhere.append(call()))
        thread.start()
        thread.join()
        assert call() == inside
    assert elsewhere == [outside] and call() == outside and switched(on)(call)() == inside


def test_the_innermost_of_nested_switches_counts(off_by_default):
    _, call = off_by_default
    seen = []
    with switched(True):
        with disabled():
            with switched(True):
                seen.append(call())
            seen.append(call())
        seen.append(call())
    with disabled(), switched(True):
        seen.append(call())
    assert seen == [FAST_ONE, 1, FAST_ONE, FAST_ONE] and call() == 1


def test_a_set_armed_everywhere_stays_so_until_reverted(off_by_default):
    patch_set, call = off_by_default
    patch_set.arm()
    patch_set.arm(everywhere=False)
    assert call() == FAST_ONE and only_state(patch_set).reason == ""
    with switched(True):
        patch_set.revert()
        assert call() == 1
        patch_set.arm(everywhere=False)
        assert call() == FAST_ONE
    assert call() == 1


def test_asyncio_tasks_inherit_switches_and_keep_their_own(off_by_default):
    _, call = off_by_default

    async def steps(turn, other):
        seen = []
        for _ in range(3):
            await turn.wait()
            turn.clear()
            seen.append(call())
            other.set()
        return seen

    async def switched_steps(on, *turns):
        with switched(on):
            return await asyncio.create_task(steps(*turns))

    async def both():
        first, second = asyncio.Event(), asyncio.Event()
        first.set()
        return await asyncio.gather(switched_steps(True, first, second), steps(second, first))

    assert asyncio.run(both()) == [[FAST_ONE] * 3, [1] * 3]


def test_a_generator_holds_its_switch_until_it_ends(off_by_default):
    _, call = off_by_default

    def generator():
        with switched(True):
            yield call()
            yield call()

    assert list(generator()) == [FAST_ONE] * 2 and call() == 1
    begun = generator()
    assert contextvars.copy_context().run(next, begun) == FAST_ONE
    assert call() == 1
    begun.close()
    assert call() == 1


@pytest.mark.filterwarnings("ignore:fastgen leaves")
@pytest.mark.parametrize(
    ("path", "changes", "reason"),
    [
        ("Base.gone", {}, "wanted {host}:Base.gone, found no 'gone' in class Base"),
        ("Gone.method", {}, "wanted {host}:Gone.method, found no 'Gone' in module {host}"),
        ("function.method", {}, "wanted {host}:function.method, found that function is a function, not a class"),
        ("Child.attribute", {}, "found a int"),
        ("function", {"parameters": ("x", "factor")}, "wanted the parameters (x, factor) .*found (x, scale)"),
        ("function", {"lowest": "1.6"}, "wanted {host} 1.6 or newer, found 1.5"),
    ],
)
def test_a_patch_that_does_not_fit_is_skipped_with_a_reason(host, fast, path, changes, reason):
    state = only_state(armed(make_patch(f"{host.__name__}:{path}", fast, **changes)))
    assert state.state == "skipped"
    words = map(re.escape, reason.format(host=host.__name__).split(".*"))
    assert re.search(".*".join(words), state.reason), state.reason
    assert host.function(1) == 1 and host.Child.attribute == 3


@pytest.mark.parametrize("version", ["1.0", "1.0.0", "2.0", "1.9.dev0", "1.10.1", "2.0+cu130", "2.0rc1", "9.9.0", None])
def test_a_patch_is_applied_from_its_lowest_version_on(host, fast, version):
    host.__version__ = version
    if version is None:
        del host.__version__
    state = only_state(armed(make_patch(f"{host.__name__}:function", fast)))
    assert (state.state, state.reason) == ("applied", "")


def test_a_group_that_does_not_fit_is_a_warning_once(host, fast):
    name = host.__name__
    patches = [make_patch(f"{name}:{target}", fast, group="vocoder") for target in ("gone", "Gone.method", "function")]
    with pytest.warns(RuntimeWarning) as warned:
        patch_set = armed(*patches, make_patch(f"{name}:Base.gone", fast, group="loops"))
        patch_set.revert()
        patch_set.arm()
    assert [str(warning.message) for warning in warned] == [
        f"fastgen leaves vocoder to {name} 1.5: wanted {name}:gone, found no 'gone' in module {name}; "
        f"wanted {name}:Gone.method, found no 'Gone' in module {name}",
        f"fastgen leaves loops to {name} 1.5: wanted {name}:Base.gone, found no 'gone' in class Base",
    ]
    assert {state.state for state in patch_set.states()} == {"skipped"}


@pytest.mark.filterwarnings("error")
def test_a_warning_that_is_an_error_breaks_no_import(write, fast, caplog):
    name = write(HOST)
    armed(make_patch(f"{name}:gone", fast), is_strict=lambda: True)
    assert importlib.import_module(name).function(1) == 1
    assert f"fastgen leaves group to {name} 1.5: wanted {name}:gone" in caplog.text


def test_a_host_that_is_too_old_is_no_warning(host, fast, recwarn):
    armed(make_patch(f"{host.__name__}:gone", fast, lowest="1.6"))
    assert not recwarn


def test_a_reason_of_several_groups_is_printed_once():
    newer = "host 9 is newer than the newest tested 8"
    states = [PatchState(f"host.{name}", f"host.{name}", "applied", newer, "os") for name in "ab"]
    states.append(PatchState("host.c", "host.c", "pending", "waits for the import of host.c", "os"))
    lines = repr(PatchStates(states)).splitlines()
    assert lines[-1] == newer and [line.split()[1] for line in lines[:-1]] == ["applied", "applied", "pending"]
    assert repr(PatchStates(states)).count(newer) == 1


@pytest.mark.filterwarnings("ignore:fastgen leaves")
def test_a_group_is_applied_all_or_none(host, fast):
    good, bad = f"{host.__name__}:function", f"{host.__name__}:gone"
    patch_set = armed(make_patch(good, fast), make_patch(bad, fast), make_patch(f"{good}", fast, group="other"))
    assert [state.state for state in patch_set.states()] == ["skipped", "skipped", "applied"]
    assert patch_set.states()[0].reason == f"group is applied all or none, without {bad}"
    patch_set = armed(make_patch(f"{host.__name__}:Base.method", fast), make_patch(bad, fast))
    assert host.Base().method(1) == ("original", 1)


def test_a_group_waits_for_the_last_of_its_modules(write, fast):
    names = write(HOST), write(HOST)
    patch_set = armed(*(make_patch(f"{name}:function", fast) for name in names))
    first = importlib.import_module(names[0])
    assert first.function(1) == 1 and names[1] not in sys.modules
    assert {state.reason for state in patch_set.states()} == {f"waits for the import of {names[1]}"}
    second = importlib.import_module(names[1])
    assert first.function(1) == second.function(1) == ("fast", 1)


def test_an_assignment_that_fails_reverts_the_whole_group(write, fast, caplog):
    name = write(
        HOST
        + """
class Meta(type):
    def __setattr__(cls, name, value):
        raise TypeError("no attribute may be set")

class Locked(metaclass=Meta):
    def method(self, x):
        return x
"""
    )
    patch_set = armed(make_patch(f"{name}:function", fast), make_patch(f"{name}:Locked.method", fast))
    host = importlib.import_module(name)
    assert host.function(1) == 1 and host.Locked().method(1) == 1
    assert {(s.state, s.reason) for s in patch_set.states()} == {("failed", "TypeError: no attribute may be set")}
    patch_set.arm()
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1

    del sys.modules[name]
    armed(make_patch(f"{name}:Locked.method", fast), is_strict=lambda: True)
    with pytest.raises(TypeError, match="no attribute may be set"):
        importlib.import_module(name)


def test_a_module_that_no_finder_knows_is_patched_too(fast):
    module = types.ModuleType("written_by_hand")
    exec(HOST, module.__dict__)
    sys.modules["written_by_hand"] = module
    try:
        assert only_state(armed(make_patch("written_by_hand:function", fast))).state == "applied"
    finally:
        del sys.modules["written_by_hand"]
