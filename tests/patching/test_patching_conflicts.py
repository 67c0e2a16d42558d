"""The patch layer under difficulties: failing replacements, other libraries that patch, threads."""

import functools
import importlib
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_hosts import HOST, armed, make_patch, only_state

from fastgen.patching import PatchSet

pytest_plugins = ["fake_hosts"]


def test_a_replacement_that_cannot_be_imported_is_switched_off(host, write, fast, caplog):
    broken = write("import no_such_module", "broken")
    patches = [
        make_patch(f"{host.__name__}:function", f"{broken}:fast"),
        make_patch(f"{host.__name__}:Base.method", fast),
    ]
    patch_set = armed(*patches)
    assert host.function(2, scale=3) == 6
    reason = f"{host.__name__}:function raised ModuleNotFoundError: No module named 'no_such_module'"
    assert {(state.state, state.reason) for state in patch_set.states()} == {("failed", reason)}
    assert host.Base().method(1) == ("original", 1)
    assert host.function(1) == 1 and len(caplog.records) == 1
    patch_set.arm()
    assert {state.state for state in patch_set.states()} == {"failed"} and host.function(1) == 1


def test_loading_replacements_has_the_errors_of_a_call(host, write):
    patch_set = armed(make_patch(f"{host.__name__}:function", write("import no_such_module", "broken") + ":fast"))
    patch_set.load_replacements()
    assert only_state(patch_set).state == "failed" and host.function(1) == 1


def test_a_replacement_that_raises_fails_once_for_all(host, write, caplog):
    raising = write("def fast(original, x):\n    raise KeyError('ours')", "raising")
    patch_set = armed(make_patch(f"{host.__name__}:function", f"{raising}:fast"))
    assert [host.function(1), host.function(2)] == [1, 2]
    assert only_state(patch_set).state == "failed" and only_state(patch_set).reason.endswith("raised KeyError: 'ours'")
    assert len(caplog.records) == 1


def test_a_call_that_the_original_refuses_fails_no_patch(host, write, caplog):
    strict_arguments = write("def fast(original, x):\n    return ('fast', original(x))", "fast")
    patch_set = armed(make_patch(f"{host.__name__}:function", f"{strict_arguments}:fast"))
    with pytest.raises(TypeError, match=r"function\(\) got an unexpected keyword argument 'typo'"):
        host.function(1, typo=2)
    assert only_state(patch_set).state == "applied" and not caplog.records
    assert host.function(1) == ("fast", 1)


def test_errors_that_the_original_shares_fail_no_patch(write, caplog):
    host = importlib.import_module(write("def function(x):\n    raise ValueError('theirs')"))
    raising = write("def fast(original, x):\n    raise KeyError('ours')", "raising")
    patch_set = armed(make_patch(f"{host.__name__}:function", f"{raising}:fast"))
    with pytest.raises(ValueError, match="theirs") as error:
        host.function(1)
    assert only_state(patch_set).state == "applied" and not caplog.records and error.value.__context__ is None


def test_a_failed_group_is_tried_again_if_asked_for(write):
    host = importlib.import_module(write("def function(x):\n    return x"))
    name = write("broken = True\ndef fast(original, x):\n    return 1 / (not broken), original(x)", "raising")
    patch_set = armed(make_patch(f"{host.__name__}:function", f"{name}:fast"))
    assert host.function(2) == 2
    reason = f"{host.__name__}:function raised ZeroDivisionError: division by zero"
    assert patch_set.switched_off == {"group": reason}
    patch_set.arm()
    assert host.function(2) == 2 and only_state(patch_set).state == "failed"
    sys.modules[name].broken = False
    patch_set.arm(again=True)
    assert host.function(2) == (1.0, 2) and only_state(patch_set).state == "applied" and not patch_set.switched_off


def test_a_mismatch_reverts_the_group_and_warns_once(host, fast):
    patch_set = armed(make_patch(f"{host.__name__}:function", fast), make_patch(f"{host.__name__}:Base.method", fast))
    with pytest.warns(RuntimeWarning, match="group to the originals: token 3 differs") as warned:
        patch_set.fail("group", "token 3 differs")
        patch_set.fail("group", "token 4 differs")
    assert len(warned) == 1
    assert {(state.state, state.reason) for state in patch_set.states()} == {("failed", "token 3 differs")}
    patch_set.revert()
    patch_set.arm()
    assert {state.state for state in patch_set.states()} == {"failed"}
    assert host.function(1) == 1 and host.Base().method(1) == ("original", 1)
    with pytest.raises(ValueError, match=r"group is 'typo' \(accepted: group\)"):
        patch_set.fail("typo", "")


def put_on_top(owner, name):
    function = getattr(owner, name)

    @functools.wraps(function)
    def on_top(*args, **kwargs):
        return ("top", function(*args, **kwargs))

    setattr(owner, name, on_top)
    return on_top


def test_a_patch_on_top_stays_and_ours_passes_through(host, fast):
    patch_set = armed(make_patch(f"{host.__name__}:function", fast))
    on_top = put_on_top(host, "function")
    assert host.function(1) == ("top", ("fast", 1))
    patch_set.revert()
    assert host.function is on_top and host.function(1) == ("top", 1)
    assert only_state(patch_set).state == "reverted" and "left in place under" in only_state(patch_set).reason
    patch_set.arm()
    assert host.function is on_top and host.function(1) == ("top", ("fast", 1))
    patch_set.revert()
    put_on_top(host, "function")
    patch_set.arm()
    assert host.function(1) == ("top", ("top", ("fast", 1)))


def test_a_patch_on_top_that_hides_ours_is_recognized(host, fast):
    patch_set = armed(make_patch(f"{host.__name__}:function", fast))
    ours = host.function
    host.function = lambda *args: ("top", ours(*args))
    patch_set.arm()
    assert only_state(patch_set).state == "applied" and host.function(1) == ("top", ("fast", 1))
    patch_set.revert()
    assert host.function(1) == ("top", 1)
    patch_set.arm()
    assert only_state(patch_set).state == "applied" and host.function(1) == ("top", ("fast", 1))
    patch_set.revert()
    host.function = ours
    patch_set.arm()
    assert host.function is ours and host.function(1) == ("fast", 1)


def test_an_earlier_patch_of_another_library_is_kept(host, fast):
    on_top = put_on_top(host, "function")
    patch_set = armed(make_patch(f"{host.__name__}:function", fast))
    assert host.function(1) == ("fast", ("top", 1))
    patch_set.revert()
    assert host.function is on_top


def test_an_original_that_was_restored_is_patched_anew(host, fast):
    original = host.function
    patch_set = armed(make_patch(f"{host.__name__}:function", fast))
    put_on_top(host, "function")
    patch_set.revert()
    host.function = original
    patch_set.arm()
    assert host.function(1) == ("fast", 1)
    host.function = original
    patch_set.revert()
    assert host.function is original and only_state(patch_set).reason == "disabled"


@pytest.fixture
def switch_often():
    """Makes threads take turns a thousand times as often as usual."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(interval / 1000)
    yield
    sys.setswitchinterval(interval)


def test_many_threads_may_enable_disable_and_call_together(host, fast, switch_often):
    before = host.Base.method
    patch_set = armed(make_patch(f"{host.__name__}:Base.method", fast))
    seen = set()

    def work(step):
        calls = 0
        while calls < 200 or len(seen) < 2:
            step()
            seen.add(host.Base().method(1))
            calls += 1

    steps = [patch_set.arm, patch_set.revert, patch_set.states, lambda: None] * 2
    with ThreadPoolExecutor(len(steps)) as threads:
        assert [*threads.map(work, steps)] == [None] * len(steps)
    assert seen == {("original", 1), ("fast", ("original", 1))}
    patch_set.revert()
    assert host.Base.method is before


def test_a_host_that_another_thread_imports_is_patched(write, fast):
    name = write("import time\nstarted = True\ntime.sleep(0.3)\n" + HOST)
    thread = threading.Thread(target=importlib.import_module, args=(name,))
    thread.start()
    while not hasattr(sys.modules.get(name), "started"):
        time.sleep(0.01)
    patch_set = armed(make_patch(f"{name}:function", fast))
    thread.join()
    assert only_state(patch_set).state == "applied"


def test_a_host_that_arms_in_its_import_is_patched_afterwards(write, fast):
    name = write("arm()\n" + HOST)
    patch_set = PatchSet([make_patch(f"{name}:function", fast)])
    sys.modules["builtins"].arm = patch_set.arm
    try:
        importlib.import_module(name)
    finally:
        del sys.modules["builtins"].arm
    assert only_state(patch_set).state == "pending"
    patch_set.arm()
    assert only_state(patch_set).state == "applied"


def test_the_original_runs_with_the_memory_of_the_replacement(write):
    host = importlib.import_module(write("def function(x):\n    return list(x.alive)"))
    raising = write(
        """
class Buffer:
    alive = []
    def __init__(self):
        self.alive.append(1)
    def __del__(self):
        self.alive.clear()

def fast(original, x):
    buffer = Buffer()
    raise MemoryError
""",
        "raising",
    )
    armed(make_patch(f"{host.__name__}:function", f"{raising}:fast"))
    buffer = importlib.import_module(raising).Buffer
    assert host.function(buffer) == []
