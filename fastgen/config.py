"""The configuration: environment variables of fastgen, read here and nowhere else, and `configure`, which changes it.

FASTGEN_DISABLE=1  patch nothing, whatever user code asks for.
FASTGEN_AUTO=0     importing fastgen patches nothing; `fastgen.enable()` and `with fastgen.enabled():` do.
FASTGEN_STRICT=1   raise errors that fastgen would otherwise log before it calls the original (tests, CI).
FASTGEN_SHARE=auto share prompts and keys between rows if worthwhile (the default); or always, or never.
FASTGEN_CUDA_GRAPHS=auto  capture decode steps if worthwhile, on a GPU as CUDA graphs (the default); or off; or on:
                   whenever the model allows it.
FASTGEN_DRAFTS=auto  check guesses of the next tokens together if worthwhile (the default); or off.
FASTGEN_CUDA_KERNELS=0  use torch's operations on a GPU instead of fastgen's CUDA and Triton kernels.
FASTGEN_REPEATABLE=1  a call's scores do not depend on earlier calls, not even in their last bits.
FASTGEN_CACHE=DIR  the folder of measurements on this machine (default ~/.cache/fastgen).
FASTGEN_LOG=debug  log to stderr, and nowhere else, from this level on: debug (a line for each `generate`), info,
                   warning or error.

All modules hold the one object `CONFIG` and read its fields when they decide; none copies a field.

Tests: tests/test_config.py
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields

_ON = ("1", "true", "yes", "on")
_OFF = ("0", "false", "no", "off")
_CHOICES = {
    "share": ("auto", "always", "never"),
    "cuda_graphs": ("auto", "off", "on"),
    "drafts": ("auto", "off"),
    "log": ("debug", "info", "warning", "error"),
}
_ONLY_AT_IMPORT = ("disable", "auto")
_HANDLER_NAME = "fastgen"


@dataclass
class Config:
    """The user's settings; the fields are named after the variables, in lower case and without prefix."""

    disable: bool = False
    auto: bool = True
    strict: bool = False
    share: str = "auto"
    cuda_graphs: str = "auto"
    drafts: str = "auto"
    cuda_kernels: bool = True
    repeatable: bool = False
    cache: str | None = None
    log: str | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Config:
        """Returns the settings in environment variables. Raises ValueError with name, value and what is accepted."""
        texts = {name: text for name in _names() if (text := environ.get(_variable(name), "").strip())}
        return cls(**{name: _parsed(name, text) for name, text in texts.items()})  # type: ignore[arg-type]


def _names() -> list[str]:
    return [field.name for field in fields(Config)]


def _variable(name: str) -> str:
    return f"FASTGEN_{name.upper()}"


def _parsed(name: str, text: str) -> bool | str:
    """Returns the value of an environment variable in the field's type."""
    if name == "cache":
        return text
    accepted = _CHOICES.get(name)
    value = text.lower()
    if value not in (accepted or _ON + _OFF):
        raise ValueError(f"{_variable(name)}={text!r} (accepted: {', '.join(accepted or ('1', '0'))})")
    return value if accepted else value in _ON


def configure(**settings: bool | str | os.PathLike[str]) -> None:
    """Sets switches of the environment from Python, for all threads, from the next `generate` on.

        fastgen.configure(share="never", cuda_graphs="off", strict=True)

    The names are those of the variables in lower case, without FASTGEN_; on-off switches take True or False. A later
    call overrides an earlier one and the environment. Raises TypeError for a name and ValueError for a value that is
    not accepted, and then changes nothing. DISABLE and AUTO are read when fastgen is imported, so they are not
    arguments here: see `disable()`, `enable()` and `enabled()`.
    """
    names = [name for name in _names() if name not in _ONLY_AT_IMPORT]
    for name, value in settings.items():
        if name not in names:
            raise TypeError(f"configure() takes no argument {name}={value!r} (accepted: {', '.join(names)})")
        if name == "cache":
            is_accepted = isinstance(value, (str, os.PathLike))
            accepted = "the path of a folder"
        elif name in _CHOICES:
            is_accepted = value in _CHOICES[name]
            accepted = ", ".join(map(repr, _CHOICES[name]))
        else:
            is_accepted = isinstance(value, bool)
            accepted = "True, False"
        if not is_accepted:
            raise ValueError(f"configure({name}={value!r}) (accepted: {accepted})")
    for name, value in settings.items():
        setattr(CONFIG, name, os.fspath(value) if isinstance(value, os.PathLike) else value)
    if "log" in settings:
        start_logging(CONFIG.log)


def read(environ: Mapping[str, str]) -> Config:
    """Returns the settings; a variable that is misspelt or has an invalid value is ignored with a warning.

    A typing error in a shell profile must not stop a program that only imports fastgen.
    """
    variables = [_variable(name) for name in _names()]
    readable: dict[str, str] = {}
    for variable in sorted(name for name in environ if name.startswith(_variable(""))):
        setting = {variable: environ[variable]}
        try:
            if variable not in variables:
                raise ValueError(f"{variable}, which it does not know (accepted: {', '.join(variables)})")
            Config.from_environ(setting)
        except ValueError as error:
            warnings.warn(f"fastgen ignores {error}", RuntimeWarning, stacklevel=2)
        else:
            readable |= setting
    return Config.from_environ(readable)


def start_logging(level: str | None) -> None:
    """Sets the level of the logger "fastgen" and a handler for stderr, once; None: warnings, to the user's handlers.

    The logger needs its own level, because importing fairseq makes all loggers without one log from debug on.
    """
    logger = logging.getLogger("fastgen")
    if level is None:
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.WARNING)
        return
    logger.setLevel(level.upper())
    if any(handler.get_name() == _HANDLER_NAME for handler in logger.handlers):
        return
    handler = logging.StreamHandler()
    handler.set_name(_HANDLER_NAME)
    handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False  # the root logger, which importing fairseq gives a handler for stderr, would repeat it


CONFIG = read(os.environ)
