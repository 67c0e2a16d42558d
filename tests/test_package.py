"""`import fastgen` works in every order, in threads and workers, twice, switched off, and quickly.

Most processes here import a stand-in for transformers, and stand-ins for fastgen's replacements.
"""

import importlib.metadata
import multiprocessing
import sys

import pytest
from python_process import REPOSITORY, run_code, run_python

import fastgen
from fastgen.optimizer import PATCHES

UTILS = """
class GenerationMixin:
    def generate(self, inputs=None, **kwargs):
        return self._prefill(inputs, None, {})

    def _prefill(self, input_ids, generation_config, model_kwargs, is_first_iteration=True):
        return ["original", input_ids]

PRISTINE = dict(vars(GenerationMixin))
"""

# The steps of a program by their names, and at its end the states, the result of `generate`, and if it is pristine.
STEPS = """
import contextlib, importlib, sys, types

def stand_in(name, module):
    module = types.ModuleType(f"fastgen.optimizer.transformers.{module}")
    def replacement(original, *args, **kwargs):
        return ["fast " + name, *original(*args, **kwargs)]
    setattr(module, name, replacement)
    sys.modules[module.__name__] = module

stand_in("generate", "call")
stand_in("prefill", "prefill")

def step(name):
    if name == "host":
        importlib.import_module("transformers.generation.utils")
    elif name == "package":
        importlib.import_module("transformers")
    elif name == "fastgen":
        importlib.import_module("fastgen")
    elif name == "reload":
        importlib.reload(sys.modules["fastgen"])
    elif name == "enabled":
        with sys.modules["fastgen"].enabled():
            pass
    else:
        getattr(sys.modules["fastgen"], name)()

def generated(*contexts):
    with contextlib.ExitStack() as stack:
        for name in contexts:
            stack.enter_context(getattr(sys.modules["fastgen"], name)())
        return sys.modules["transformers.generation.utils"].GenerationMixin().generate(7)

def patch_states():
    states = sys.modules["fastgen"].status()
    return [state for state in states if state.group == "transformers.shared_caches"]

def outcome():
    utils = sys.modules.get("transformers.generation.utils")
    states = {state.state for state in patch_states()}
    called = utils.GenerationMixin().generate(7) if utils else None
    pristine = dict(vars(utils.GenerationMixin)) == utils.PRISTINE if utils else None
    return states, called, pristine
"""

FAST = ({"applied"}, ["fast generate", "fast prefill", "original", 7], False)
ORIGINAL = ({"reverted"}, ["original", 7], True)
WAITING = ({"pending"}, None, None)
LAST_ENABLED = ("", "enable enable", "disable enable", "reload reload")
LAST_DISABLED = ("disable disable", "disable enable disable", "reload disable")


@pytest.fixture
def host(tmp_path):
    """A folder with a stand-in for transformers of the newest tested version."""
    package = tmp_path / "transformers"
    (package / "generation").mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '5.23.0'\n")
    (package / "generation" / "__init__.py").write_text("")
    (package / "generation" / "utils.py").write_text(UTILS)
    return tmp_path


def set_host(host, old, new):
    utils = host / "transformers" / "generation" / "utils.py"
    assert old in utils.read_text()
    utils.write_text(utils.read_text().replace(old, new))


def run_steps(order, host, more="outcome()", **env):
    """Runs the steps of `order` in a process, and returns the value of the expression `more` at its end."""
    code = f"{STEPS}\nfor name in {order.split()}:\n    step(name)\nprint('value:', repr({more}))"
    return eval(run_code(code, path=host, **env).rpartition("value: ")[2])


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        *((f"{first} {rest}", FAST) for first in ("host fastgen", "fastgen host") for rest in LAST_ENABLED),
        *((f"{first} {rest}", ORIGINAL) for first in ("host fastgen", "fastgen host") for rest in LAST_DISABLED),
        *((order, FAST) for order in ("fastgen package host", "package fastgen host", "fastgen reload host")),
        *((f"fastgen {rest}", FAST) for rest in ("enable host", "disable enable host", "disable host enable")),
        ("fastgen", WAITING),
        ("fastgen disable enable", WAITING),
        ("fastgen disable", ({"reverted"}, None, None)),
        ("fastgen disable host", ORIGINAL),
    ],
)
def test_after_imports_in_any_order_the_last_switch_counts(host, order, expected):
    assert run_steps(order, host, FASTGEN_STRICT="1") == expected


def test_fastgen_disable_wins_over_everything(host):
    reasons = "(*outcome(), {state.reason for state in patch_states()})"
    expected = ({"skipped"}, ["original", 7], True, {"FASTGEN_DISABLE=1"})
    assert run_steps("fastgen host enable reload enabled enable", host, reasons, FASTGEN_DISABLE="1") == expected
    steps = ("fastgen host", host, "(*generated('enabled'), outcome()[2])")
    assert run_steps(*steps, FASTGEN_DISABLE="1", FASTGEN_AUTO="1") == ("original", 7, True)


ARMED = ({"applied"}, ["original", 7], False)
OFF = ({"skipped"}, ["original", 7], True)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("host fastgen", OFF),
        *((f"fastgen host {rest}", OFF) for rest in ("", "reload", "disable")),
        *((f"fastgen {rest}", FAST) for rest in ("host enable", "enable host reload", "host enabled enable")),
        *((f"fastgen host {rest}", ORIGINAL) for rest in ("enable disable", "enabled disable")),
        *((f"fastgen {rest}", ARMED) for rest in ("host enabled", "enabled host reload", "host disable enabled")),
    ],
)
def test_without_auto_only_enable_and_enabled_arm_patches(host, order, expected):
    """A step "enabled" enters the block and leaves it."""
    assert run_steps(order, host, FASTGEN_STRICT="1", FASTGEN_AUTO="0") == expected


@pytest.mark.parametrize("order", ["fastgen host", "fastgen host disable", "host fastgen enabled"])
@pytest.mark.parametrize("auto", ["0", "1"])
def test_inside_enabled_calls_go_to_fastgen(host, order, auto):
    calls = "[generated(*names.split()) for names in ('enabled', 'disabled', 'enabled disabled', 'disabled enabled')]"
    fast, original = FAST[1], ORIGINAL[1]
    assert run_steps(order, host, calls, FASTGEN_STRICT="1", FASTGEN_AUTO=auto) == [fast, original, original, fast]


def test_importing_and_configuring_loads_few_modules():
    """A program pays for them at its start, whether it uses fastgen or not."""
    common = "import dataclasses, functools, importlib.util, logging"
    code = f"{common}, sys; before = set(sys.modules); import fastgen; fastgen.configure(share='never')"
    loaded = run_code(f"{code}; print(*(set(sys.modules) - before))").split()
    assert {name.partition(".")[0] for name in loaded} <= sys.stdlib_module_names | {"fastgen"}
    assert len(loaded) < 50, sorted(loaded)


NO_CALL = "call: no call of `generate` in this thread has gone through fastgen"
TOO_OLD = "wanted transformers 5.0.0 or newer, found 4.57.1"


@pytest.fixture
def old_host(host):
    """A folder with a stand-in for transformers 4.57, installed as pip installs it, and its model registries."""
    (host / "transformers" / "__init__.py").write_text("__version__ = '4.57.1'\nclass AutoConfig: pass\n")
    (host / "transformers" / "models" / "auto").mkdir(parents=True)
    for name in ("__init__", "auto/__init__", *(f"auto/{kind}_auto" for kind in ("configuration", "modeling"))):
        (host / "transformers" / "models" / f"{name}.py").write_text("")
    (host / "transformers-4.57.1.dist-info").mkdir()
    (host / "transformers-4.57.1.dist-info" / "METADATA").write_text("Name: transformers\nVersion: 4.57.1\n")
    return host


@pytest.mark.parametrize("first", ["", "import transformers.generation.utils"])
def test_a_script_with_an_old_host_gets_one_line(old_host, first):
    script = f"""
{first}
import fastgen
import transformers.generation.utils, transformers.models.auto.configuration_auto
import transformers.models.auto.modeling_auto
print(transformers.generation.utils.GenerationMixin().generate(7))
print(fastgen.explain())
print(fastgen.status())
"""
    done = run_python("-c", script, path=old_host)
    assert done.stderr == f"fastgen leaves transformers alone: {TOO_OLD}\n"
    called, verdict, _, row, *others = done.stdout.splitlines()
    assert called == "['original', 7]"
    assert verdict == f"patches: no patch is active: {TOO_OLD}; {NO_CALL}"
    assert row.split(maxsplit=2) == ["transformers", "skipped", f"{TOO_OLD}"]
    assert not any("transformers." in line for line in others if not line.strip().startswith("fairseq"))


def test_a_harness_on_an_old_host_is_left_alone(old_host):
    (old_host / "lm_eval" / "models").mkdir(parents=True)
    (old_host / "lm_eval" / "__init__.py").write_text("__version__ = '0.4.13'\n")
    (old_host / "lm_eval" / "models" / "__init__.py").write_text("")
    harness = "class HFLM:\n    def _loglikelihood_tokens(self, requests, disable_tqdm, override_bs): pass\n"
    (old_host / "lm_eval" / "models" / "huggingface.py").write_text(harness)
    done = run_python("-c", "import fastgen, lm_eval.models.huggingface; print(fastgen.status())", path=old_host)
    assert done.stderr == f"fastgen leaves lm_eval alone: {TOO_OLD}\n"
    assert ["lm_eval", "skipped", TOO_OLD] in [line.split(maxsplit=2) for line in done.stdout.splitlines()]


def test_functions_that_need_a_newer_host_name_versions(old_host):
    code = """
import fastgen
for call in (
    lambda: fastgen.verify(type('Model', (), {'generate': print})(), None),
    lambda: fastgen.log_likelihoods(None, [], []),
    lambda: fastgen.reusing_prefix(None).__enter__(),
):
    try:
        call()
    except Exception as error:
        print(error)
"""
    assert run_code(code, path=old_host).count(TOO_OLD) == 3


def test_the_command_refuses_an_old_host_in_one_line(old_host):
    (old_host / "in.txt").write_text("a\n")
    command = ("-m", "fastgen.cli.transformers.command", "demo")
    done = run_python(*command, str(old_host / "in.txt"), str(old_host / "out.txt"), path=old_host)
    assert (done.returncode, done.stdout) == (2, "")
    prog = "fastgen-generate-for-transformers"
    assert done.stderr == f"{prog}: error: {TOO_OLD}: pip install 'transformers>=5.0.0'\n"


@pytest.mark.parametrize(
    ("env", "call", "reason"),
    [
        ({"FASTGEN_DISABLE": "1"}, "status", "FASTGEN_DISABLE=1"),
        ({"FASTGEN_AUTO": "0"}, "status", "FASTGEN_AUTO=0"),
        ({}, "disable", "fastgen.disable()"),
    ],
)
def test_explain_and_status_tell_why_nothing_is_patched(host, env, call, reason):
    code = f"import fastgen; fastgen.{call}(); print(fastgen.status()); import transformers.generation.utils"
    status, report = run_code(f"{code}; print(fastgen.explain().as_dict())", path=host, **env).splitlines()
    assert status == f"Nothing is patched: {reason}."
    report = eval(report)
    assert report["verdict"].startswith("patches: no patch is active: ") and reason in report["verdict"]
    assert [reason["code"] for reason in report["reasons"]] == ["NO_PATCH", "NO_CALL"]


def test_explain_before_a_call_tells_that_there_was_none(host):
    code = "import transformers.generation.utils, fastgen; r = fastgen.explain(); print(r, r is fastgen.explain())"
    verdict, rest = run_code(code, path=host).splitlines()
    assert verdict.endswith(NO_CALL) and "no patch is active" not in verdict
    assert rest == "  no call True"


def test_strict_raises_an_error_that_else_is_the_originals(host):
    code = "broken = eval('lambda *args, **kwargs: {}[\"ours\"]', {'__name__': 'fastgen.broken'})\n"
    code += "sys.modules['fastgen.optimizer.transformers.prefill'].prefill = broken\n"
    code += "step('fastgen'); step('host'); print(outcome())"
    done = run_python("-c", STEPS + code, path=host)
    assert eval(done.stdout) == ({"applied"}, ["fast generate", "original", 7], True)  # reverted by the call
    assert "\nfastgen leaves transformers.shared_caches to the originals: KeyError('ours')" in done.stderr
    done = run_python("-c", STEPS + code, path=host, FASTGEN_STRICT="1")
    assert done.returncode == 1 and done.stderr.endswith("KeyError: 'ours'\n")


def test_a_host_that_fails_to_import_has_its_own_error(host):
    set_host(host, "class GenerationMixin:", "import no_such_module\nclass GenerationMixin:")
    code = "import {}sys\nimport transformers.generation.utils"
    with_fastgen, without = (run_python("-c", code.format(name), path=host) for name in ("fastgen, ", ""))
    assert with_fastgen.returncode == without.returncode == 1
    error = "ModuleNotFoundError: No module named 'no_such_module'"
    assert with_fastgen.stderr.splitlines()[-1] == without.stderr.splitlines()[-1] == error


def test_explain_and_status_work_without_a_host():
    """The table has one line for a host that is not installed."""
    code = """
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *package: None if name == "fairseq" else find_spec(name, *package)
import fastgen
print(fastgen.disabled()(fastgen.explain)().verdict)
print(*fastgen.status(), sep="\\n")
print(repr(fastgen.status()))
"""
    first, *lines = run_code(code).splitlines()
    assert first == f"patches: no patch is active: no library is imported that fastgen patches; {NO_CALL}"
    states, table = lines[: len(PATCHES)], [line.split(maxsplit=2) for line in lines[len(PATCHES) :]]
    waits = "waits for the import of transformers.generation.utils"
    assert states[0] == f"transformers.generate: pending ({waits})"
    assert table[0] == ["transformers.shared_caches", "pending", waits]
    groups = dict.fromkeys(patch.group for patch in PATCHES if patch.host != "fairseq")
    assert [row[0] for row in table if row[0] != "fairseq"] == list(groups)
    assert [row for row in table if "fairseq" in row[0]] == [["fairseq", "not", "installed"]]
    pending = {line.index("pending") for line in lines[len(PATCHES) :] if "pending" in line}
    assert len(pending) == 1, "columns stand below each other"


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this system")
def test_forked_workers_are_patched_and_find_the_lock_free(host):
    """Two threads hold the lock of the patch layer most of the time while the workers are forked."""
    code = """
import os, threading
step("fastgen"); step("host")
fastgen = sys.modules["fastgen"]
first = outcome()
stop = threading.Event()

def toggle():
    while not stop.is_set():
        fastgen.disable(); fastgen.enable(); fastgen.status()

threads = [threading.Thread(target=toggle) for _ in range(2)]
for thread in threads: thread.start()
statuses = []
for _ in range(20):
    child = os.fork()
    if child == 0:
        import signal
        signal.alarm(600)
        fastgen.disable(); fastgen.enable()
        os._exit(0 if outcome() == first else 1)
    statuses.append(os.waitpid(child, 0)[1])
stop.set()
for thread in threads: thread.join()
print(first, set(statuses), sep="|")
"""
    first, statuses = run_code(STEPS + code, path=host).split("|")
    assert eval(first) == FAST and eval(statuses) == {0}


def test_threads_that_import_together_end_up_patched(host):
    set_host(host, "class GenerationMixin:", "import time; time.sleep(0.2)\n\nclass GenerationMixin:")
    code = """
import threading
for order in (["host"], ["fastgen"], ["host"], ["fastgen"]):
    threading.Thread(target=lambda names=order: [step(name) for name in names]).start()
for thread in threading.enumerate()[1:]: thread.join()
print(outcome())
"""
    assert eval(run_code(STEPS + code, path=host)) == FAST


def test_the_installed_transformers_keeps_its_signatures():
    pytest.importorskip("transformers")
    code = """
import inspect, fastgen
from transformers import GenerationMixin, activations
names = ("generate", "_prefill", "_sample", "_beam_search")
patched = [inspect.signature(getattr(GenerationMixin, name)) for name in names]
patches = [state for state in fastgen.status() if state.name.startswith("transformers.")]
names_of_models = ("stages", "positions", "vocoder", "prophetnet")  # pending until those models are imported
states = {patch.state for patch in patches if not any(name in patch.name for name in names_of_models)}
print(states, end=" ")
wrappers = [vars(GenerationMixin)[name] for name in names]
fastgen.disable()
print([inspect.signature(getattr(GenerationMixin, name)) for name in names] == patched, end=" ")
print([vars(GenerationMixin)[name] is not wrapper for name, wrapper in zip(names, wrappers)])
"""
    assert run_code(code, FASTGEN_STRICT="1").strip() == "{'applied'} True [True, True, True, True]"


def test_the_distribution_is_called_fastgen_generate():
    assert importlib.metadata.version("fastgen-generate") == fastgen.__version__


def test_no_text_installs_another_project():
    texts = [*REPOSITORY.glob("*.*"), *REPOSITORY.glob("docs/*.md"), *REPOSITORY.glob("fastgen/**/*.py")]
    texts = [path for path in [REPOSITORY / "Makefile", *texts] if path.is_file()]
    assert len(texts) > 100
    assert [path for path in texts if "fastgen[" in path.read_text(encoding="utf-8")] == []
