"""The FASTGEN_* variables and `fastgen.configure` set the configuration, and name their own errors."""

from dataclasses import asdict
from pathlib import Path

import pytest
from python_process import run_code, run_python
from tiny_models import token_ids, unchanged

import fastgen
from fastgen.config import CONFIG, Config, read


@pytest.fixture
def restored():
    """Restores the configuration after a test that changes it."""
    before = dict(vars(CONFIG))
    yield
    vars(CONFIG).update(before)


DEFAULTS = {"disable": False, "auto": True, "strict": False, "share": "auto", "cuda_graphs": "auto"}
DEFAULTS |= {"cuda_kernels": True, "repeatable": False}


@pytest.mark.parametrize(
    ("environ", "settings"),
    [
        ({}, DEFAULTS),
        (dict.fromkeys(("FASTGEN_DISABLE", "FASTGEN_AUTO", "FASTGEN_SHARE", "FASTGEN_CACHE", "FASTGEN_LOG"), ""), {}),
        ({"FASTGEN_DISABLE": "0", "FASTGEN_STRICT": "off"}, {}),
        ({"FASTGEN_DISABLE": "1"}, {"disable": True}),
        ({"FASTGEN_AUTO": "0"}, {"auto": False}),
        ({"FASTGEN_STRICT": "True"}, {"strict": True}),
        ({"FASTGEN_SHARE": "Never"}, {"share": "never"}),
        ({"FASTGEN_CUDA_GRAPHS": "off"}, {"cuda_graphs": "off"}),
        ({"FASTGEN_CUDA_KERNELS": "off"}, {"cuda_kernels": False}),
        ({"FASTGEN_REPEATABLE": "1"}, {"repeatable": True}),
        ({"FASTGEN_CACHE": "/tmp/a", "HOME": "/tmp/b"}, {"cache": "/tmp/a"}),
        ({"FASTGEN_LOG": "DEBUG"}, {"log": "debug"}),
    ],
)
def test_each_variable_sets_its_own_field(environ, settings):
    assert Config.from_environ(environ) == read(environ) == Config(**settings)


UNREADABLE = [
    ("DISABLE", "perhaps", "1, 0"),
    ("AUTO", "never", "1, 0"),
    ("STRICT", "2", "1, 0"),
    ("SHARE", "1", "auto, always, never"),
    ("CUDA_GRAPHS", "1", "auto, off, on"),
    ("CUDA_KERNELS", "auto", "1, 0"),
    ("LOG", "loud", "debug, info, warning, error"),
]


@pytest.mark.parametrize(("name", "value", "accepted"), UNREADABLE)
def test_an_error_names_the_variable_and_what_is_accepted(name, value, accepted):
    with pytest.raises(ValueError) as error:
        Config.from_environ({f"FASTGEN_{name}": value})
    assert str(error.value) == f"FASTGEN_{name}={value!r} (accepted: {accepted})"


def test_an_unreadable_variable_warns_and_the_others_count():
    with pytest.warns(RuntimeWarning, match="ignores FASTGEN_LOG='loud'"):
        config = read({"FASTGEN_LOG": "loud", "FASTGEN_DISABLE": "1"})
    assert config == Config(disable=True)


def test_a_misspelt_variable_warns():
    with pytest.warns(RuntimeWarning, match=r"ignores FASTGEN_SHRAE, .* \(accepted: .*FASTGEN_SHARE.*\)"):
        assert read({"FASTGEN_SHRAE": "never", "FASTGEN_STRICT": "1"}) == Config(strict=True)


def test_an_unreadable_variable_does_not_stop_the_import():
    done = run_python("-c", "import fastgen; print(len(fastgen.status()))", FASTGEN_STRICT="perhaps")
    assert done.returncode == 0 and int(done.stdout) > 0
    assert "RuntimeWarning: fastgen ignores FASTGEN_STRICT='perhaps'" in done.stderr


def test_the_log_goes_to_stderr_once_and_only_when_asked_for():
    code = """
import importlib, logging, sys, fastgen
importlib.reload(fastgen)
logging.basicConfig(level="DEBUG")  # like fairseq at its import
fastgen.configure(**eval(sys.argv[1]))
logging.getLogger("fastgen").debug("heard")
"""
    for settings, environ, times in (
        ({}, {"FASTGEN_LOG": "debug"}, 1),
        ({}, {"FASTGEN_LOG": "info"}, 0),
        ({"log": "debug"}, {"FASTGEN_LOG": "info"}, 1),
    ):
        assert run_python("-c", code, repr(settings), **environ).stderr.count("heard") == times
    assert run_code("import fastgen, logging; print(logging.getLogger('fastgen').handlers)").strip() == "[]"


@pytest.mark.usefixtures("restored")
def test_configure_sets_what_the_environment_sets():
    graphs = {"FASTGEN_CUDA_KERNELS": "1", "FASTGEN_CUDA_GRAPHS": "off"}
    environ = {"FASTGEN_SHARE": "never", "FASTGEN_CACHE": "/tmp/a", **graphs}
    vars(CONFIG).update(asdict(Config()))
    fastgen.configure(share="never", cuda_kernels=True)
    fastgen.configure(cuda_graphs="off", cache=Path("/tmp/a"))
    assert Config.from_environ(environ) == CONFIG


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"share": "sometimes"}, "configure(share='sometimes') (accepted: 'auto', 'always', 'never')"),
        ({"share": True}, "configure(share=True) (accepted: 'auto', 'always', 'never')"),
        ({"cuda_kernels": "0"}, "configure(cuda_kernels='0') (accepted: True, False)"),
        ({"cuda_graphs": None}, "configure(cuda_graphs=None) (accepted: 'auto', 'off', 'on')"),
        ({"cache": 3}, "configure(cache=3) (accepted: the path of a folder)"),
        ({"share": ["never"]}, "configure(share=['never']) (accepted: 'auto', 'always', 'never')"),
    ],
)
def test_configure_names_the_argument_and_what_is_accepted(settings, message):
    before = dict(vars(CONFIG))
    with pytest.raises(ValueError) as error:
        fastgen.configure(strict=not CONFIG.strict, **settings)
    assert str(error.value) == message and vars(CONFIG) == before


@pytest.mark.parametrize("name", ["shares", "auto", "disable"])
def test_configure_refuses_a_name_and_lists_the_accepted(name):
    with pytest.raises(TypeError) as error:
        fastgen.configure(**{name: True})
    assert str(error.value).startswith(f"configure() takes no argument {name}=True (accepted: strict, share, ")


@pytest.mark.usefixtures("restored")
def test_configure_counts_from_the_next_call_of_generate_on():
    for share in ("always", "never", "always"):
        fastgen.configure(share=share)
        unchanged("gpt2").generate(token_ids(2, 8), num_beams=3, max_new_tokens=3)
        assert bool(fastgen.explain().shared) == (share == "always")
