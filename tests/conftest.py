"""Hooks of pytest, and fixtures that several test files use."""

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Keeps measurements and the hub's files out of the user's folders, which are read when libraries are imported.

    No test reads the hub, and none waits for it on a machine without a network.
    Shells start jobs in the background with Ctrl-C ignored; the commands that tests interrupt would inherit that."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for name in ("FASTGEN_CACHE", "HF_HOME"):
        if name not in os.environ:
            os.environ[name] = tempfile.mkdtemp(prefix="fastgen-tests-")
            config.add_cleanup(partial(shutil.rmtree, os.environ[name], ignore_errors=True))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-contracts", action="store_true", help="accept the hosts' sources that the tests use, if all pass"
    )


HOSTS = ("transformers.", "fairseq.", "trl.", "lm_eval.")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """With --write-contracts, all sources of the hosts count as accepted, and those that are asked for are noted."""
    if session.config.option.write_contracts:
        from fastgen.optimizer import trust

        noted: set[str] = set()
        unknown_sources = trust.unknown_sources

        def unknown_of_tests(sources: Iterable[str]) -> dict[str, str | None]:
            sources = {*sources}
            noted.update(source for source in sources if source.startswith(HOSTS))
            return unknown_sources(sources - noted)

        trust.unknown_sources = unknown_of_tests
        session.config.sources = noted  # type: ignore[attr-defined]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == 0 and (sources := getattr(session.config, "sources", set())):
        from hooks import accept

        accept(sources)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Freezes libraries and tests, which stay until the end, so that no collection of garbage walks through them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


class _FairseqModule(pytest.Module):
    """Tests that import fairseq; they are skipped, and listed as such, if it is not installed."""

    def collect(self) -> Any:
        pytest.importorskip("fairseq")
        return super().collect()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    is_fairseq = module_path.parent.name == "fairseq" and module_path.stem != "test_fairseq_installation"
    return _FairseqModule.from_parent(parent, path=module_path) if is_fairseq else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sorts groups, which one worker of pytest-xdist runs in turn, to the front: others fill the other workers."""
    items.sort(key=lambda item: not _has_group(item))
    if items and getattr(config.option, "loadgroup", False) and _has_group(items[0]) and "@" not in items[0].nodeid:
        raise pytest.UsageError(f"pytest {pytest.__version__} and this pytest-xdist run a group on several workers")


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Prints failures on a worker of pytest-xdist immediately as well, for runs that are ended from outside."""
    if report.failed and hasattr(report, "node"):
        print(f"\n{report.nodeid}: {report.when} failed\n{report.longreprtext[-2000:]}", flush=True)


def _has_group(item: pytest.Item) -> bool:
    return item.get_closest_marker("xdist_group") is not None


@pytest.fixture(autouse=True)
def _patches():
    """Loads all replacements before a test, and checks that no patch failed in it for the rest of the process.

    A module that is imported while a test has replaced something would keep the replacement.
    """
    optimizer = sys.modules.get("fastgen.optimizer")
    if optimizer is None:  # no test file of this process needs it
        yield
        return
    optimizer.PATCH_SET.load_replacements()
    before = _switched_off(optimizer)
    yield
    assert _switched_off(optimizer) == before


def _switched_off(optimizer: Any) -> list[str]:
    return [str(state) for state in optimizer.PATCH_SET.states() if state.state not in ("applied", "pending")]


@pytest.fixture(autouse=True)
def _seeded_torch():
    """Gives torch the same random numbers in any order of the tests, as pytest-randomly does for random and numpy."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def share_always():
    """Shares whatever can be shared: with models this tiny it would not pay."""
    from fastgen.testing import configured

    with configured(share="always"):
        yield


@pytest.fixture(params=("copied", "in place"))
def repeated(request):
    """Computes prompts once, and repeats their keys for each row: as plain layers, or written in place."""
    from hooks import costs

    from fastgen.testing import configured

    in_place = {"min_elements_in_place": 0} if request.param == "in place" else {}
    with configured(share="auto"), costs(prefill_overhead=0.0, **in_place):
        yield


@pytest.fixture
def rows(monkeypatch):
    """The numbers of rows that the embedding of tokens sees, one for each forward."""
    from torch.nn import functional

    rows, embedding = [], functional.embedding

    def counting(input_ids, *args, **kwargs):
        rows.append(len(input_ids))
        return embedding(input_ids, *args, **kwargs)

    # Named like torch's own function: user code in a forward would be given all rows.
    names = {"__name__": "torch.nn.functional"}
    monkeypatch.setattr(functional, "embedding", FunctionType(counting.__code__, names, closure=counting.__closure__))
    return rows


@pytest.fixture(scope="session")
def bart(tmp_path_factory):
    """The folder of a tiny model for the commands; no test changes it."""
    from cli_models import save_bart

    return save_bart(tmp_path_factory.mktemp("models") / "bart")


@pytest.fixture(scope="module")
def one_thread():
    """Gives torch one thread: several only get in each other's way in models and sounds that are small."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
