"""The environment variables of fastgen, read once into a dataclass; no other file reads them.

FASTGEN_DISABLE=1  patch nothing, whatever the program asks for.
FASTGEN_AUTO=0     importing fastgen patches nothing; `fastgen.enable()` and `with fastgen.enabled():` do.
FASTGEN_STRICT=1   raise where fastgen would otherwise log an error and leave the call to the original (tests, CI).
FASTGEN_SHARE=auto share prompts and keys between rows where that pays (as without it); or always, or never.
FASTGEN_PACK=0     make no packed copies of weights on a CPU.
FASTGEN_CUDA_GRAPHS=auto  record decode steps where that pays, on a GPU as CUDA graphs (as without it; not yet run on a
                   GPU); or off; or on: wherever the model allows it.
FASTGEN_CACHE=DIR  the folder that keeps what was measured on this machine (~/.cache/fastgen without it).
FASTGEN_LOG=debug  log to stderr, and nowhere else, from this level on: debug (a line for each `generate`), info,
                   warning or error.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields

_ON = ("1", "true", "yes", "on")
_OFF = ("0", "false", "no", "off")
_SHARING = ("auto", "always", "never")
_RECORDING = ("auto", "off", "on")
_LEVELS = ("debug", "info", "warning", "error")
_HANDLER_NAME = "fastgen"


@dataclass(frozen=True)
class Config:
    """What the user asked for through the environment."""

    disable: bool = False
    auto: bool = True
    strict: bool = False
    share: str = "auto"
    pack: bool = True
    cuda_graphs: str = "auto"
    cache: str | None = None
    log: str | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Config:
        """The variables as given; ValueError names a variable that cannot be read, its value and what is accepted."""
        return cls(
            disable=_flag(environ, "FASTGEN_DISABLE", default=False),
            auto=_flag(environ, "FASTGEN_AUTO", default=True),
            strict=_flag(environ, "FASTGEN_STRICT", default=False),
            share=_one_of(_SHARING, environ, "FASTGEN_SHARE") or "auto",
            pack=_flag(environ, "FASTGEN_PACK", default=True),
            cuda_graphs=_one_of(_RECORDING, environ, "FASTGEN_CUDA_GRAPHS") or "auto",
            cache=environ.get("FASTGEN_CACHE") or None,
            log=_one_of(_LEVELS, environ, "FASTGEN_LOG"),
        )


def _flag(environ: Mapping[str, str], variable: str, default: bool) -> bool:
    value = environ.get(variable, "").strip().lower()
    if value and value not in _ON + _OFF:
        raise ValueError(f"{variable}={environ[variable]!r} (accepted: 1 or 0)")
    return value in _ON if value else default


def _one_of(accepted: tuple[str, ...], environ: Mapping[str, str], variable: str) -> str | None:
    value = environ.get(variable, "").strip().lower()
    if value and value not in accepted:
        raise ValueError(f"{variable}={environ[variable]!r} (accepted: {', '.join(accepted)})")
    return value or None


def read(environ: Mapping[str, str]) -> Config:
    """The configuration; a variable that cannot be read is left at its default with a warning.

    A typing error in a shell profile must not stop a program that only imports fastgen.
    """
    readable: dict[str, str] = {}
    for variable in sorted(environ.keys() & {f"FASTGEN_{field.name.upper()}" for field in fields(Config)}):
        one = {variable: environ[variable]}
        try:
            Config.from_environ(one)
        except ValueError as error:
            warnings.warn(f"fastgen ignores {error}", RuntimeWarning, stacklevel=2)
        else:
            readable |= one
    return Config.from_environ(readable)


def start_logging(level: str | None) -> None:
    """Gives the logger "fastgen" this level and a handler for stderr, once; None: warnings, to the program's handlers.

    A level of its own, because importing fairseq lets every logger that has none write from debug on.
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
