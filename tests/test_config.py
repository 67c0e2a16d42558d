"""What the FASTGEN_* variables mean, and what a typing error in one of them does."""

from dataclasses import fields

import pytest
from python_process import run_code, run_python

from fastgen.config import Config, read


def test_nothing_set_means_the_defaults():
    assert Config.from_environ({}) == Config(
        disable=False, auto=True, strict=False, share="auto", pack=True, cuda_graphs="auto", cache=None, log=None
    )
    empty = dict.fromkeys(("FASTGEN_DISABLE", "FASTGEN_AUTO", "FASTGEN_SHARE", "FASTGEN_CACHE", "FASTGEN_LOG"), "")
    assert Config.from_environ(empty) == Config()


def test_each_variable_sets_its_own_field():
    assert Config.from_environ({"FASTGEN_DISABLE": "1"}) == Config(disable=True)
    assert Config.from_environ({"FASTGEN_AUTO": "0"}) == Config(auto=False)
    assert Config.from_environ({"FASTGEN_STRICT": "True"}) == Config(strict=True)
    assert Config.from_environ({"FASTGEN_SHARE": "Never"}) == Config(share="never")
    assert Config.from_environ({"FASTGEN_PACK": "0"}) == Config(pack=False)
    assert Config.from_environ({"FASTGEN_CUDA_GRAPHS": "off"}) == Config(cuda_graphs="off")
    assert Config.from_environ({"FASTGEN_CACHE": "/tmp/a"}) == Config(cache="/tmp/a")
    assert Config.from_environ({"FASTGEN_LOG": "DEBUG"}) == Config(log="debug")
    assert Config.from_environ({"FASTGEN_DISABLE": "0", "FASTGEN_STRICT": "off"}) == Config()


@pytest.mark.parametrize(
    ("variable", "value", "accepted"),
    [
        ("FASTGEN_DISABLE", "perhaps", "1 or 0"),
        ("FASTGEN_AUTO", "never", "1 or 0"),
        ("FASTGEN_STRICT", "2", "1 or 0"),
        ("FASTGEN_SHARE", "1", "auto, always, never"),
        ("FASTGEN_PACK", "half", "1 or 0"),
        ("FASTGEN_CUDA_GRAPHS", "1", "auto, off, on"),
        ("FASTGEN_LOG", "loud", "debug, info, warning, error"),
    ],
)
def test_an_error_names_the_variable_the_value_and_what_is_accepted(variable, value, accepted):
    with pytest.raises(ValueError) as error:
        Config.from_environ({variable: value})
    assert str(error.value) == f"{variable}={value!r} (accepted: {accepted})"


def test_every_variable_is_read():
    environ = {f"FASTGEN_{field.name.upper()}": "1" for field in fields(Config)}
    environ |= {"FASTGEN_SHARE": "never", "FASTGEN_CUDA_GRAPHS": "on", "FASTGEN_LOG": "info", "FASTGEN_CACHE": "/tmp/a"}
    assert read(environ) == Config.from_environ(environ)
    assert read({"FASTGEN_CACHE": "/tmp/a", "HOME": "/tmp/b"}) == Config(cache="/tmp/a")


def test_an_unreadable_variable_warns_and_leaves_the_others_in_effect():
    with pytest.warns(RuntimeWarning, match="ignores FASTGEN_LOG='loud'"):
        config = read({"FASTGEN_LOG": "loud", "FASTGEN_DISABLE": "1"})
    assert config == Config(disable=True)


def test_an_unreadable_variable_does_not_stop_the_import():
    done = run_python("-c", "import fastgen; print(len(fastgen.status()))", FASTGEN_STRICT="perhaps")
    assert done.returncode == 0 and int(done.stdout) > 0
    assert "RuntimeWarning: fastgen ignores FASTGEN_STRICT='perhaps'" in done.stderr


def test_the_log_goes_to_stderr_once_and_only_when_asked_for():
    code = """
import importlib, logging, fastgen
importlib.reload(fastgen)
logging.basicConfig(level="DEBUG")  # as fairseq does when it is imported
logging.getLogger("fastgen").debug("heard")
"""
    assert run_python("-c", code, FASTGEN_LOG="debug").stderr.count("heard") == 1
    assert "heard" not in run_python("-c", code, FASTGEN_LOG="info").stderr
    assert run_code("import fastgen, logging; print(logging.getLogger('fastgen').handlers)").strip() == "[]"
