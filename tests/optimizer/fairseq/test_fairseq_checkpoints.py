"""fairseq's checkpoints load under torch's safe loader; contents that fairseq does not write are refused by name."""

import argparse
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.logging.meters import AverageMeter
from omegaconf import OmegaConf

import fastgen

SAFE_LOADER = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6)
pytestmark = pytest.mark.skipif(not SAFE_LOADER, reason="torch before 2.6 loads everything")


def checkpoint(path: Path, **more: Any) -> str:
    """Writes a checkpoint in the form of fairseq 0.12, with `more` in it."""
    state = {
        "args": None,
        "cfg": {"model": argparse.Namespace(arch="transformer"), "task": {"_name": "translation"}},
        "model": {"weight": torch.ones(2)},
        "optimizer_history": [{"optimizer_name": "FairseqAdam", "lr_scheduler_state": {}, "num_updates": 3}],
        "extra_state": {"train_iterator": {"epoch": 1}},
    }
    torch.save(state | more, path)
    return str(path)


class RunsCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def test_checkpoints_load_only_with_fastgen(tmp_path):
    path = checkpoint(tmp_path / "model.pt")
    with fastgen.disabled(), pytest.raises(pickle.UnpicklingError):
        checkpoint_utils.load_checkpoint_to_cpu(path)
    state = checkpoint_utils.load_checkpoint_to_cpu(path)
    assert state["cfg"].model.arch == "transformer"
    assert torch.equal(state["model"]["weight"], torch.ones(2))


CONTENTS = {
    "the arrays of --eval-bleu": {"metrics": [(0, "_bleu_counts", {"val": np.array([3, 2]), "sum": np.array([3.5])})]},
    "a numpy scalar as best score": {"best": np.float64(1.25), "val_loss": np.float32(2.5)},
    "the vocabulary of HuBERT": {"dictionaries": [Dictionary()]},
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_contents_that_fairseq_writes_load_unchanged(tmp_path, content):
    path = checkpoint(tmp_path / "model.pt", task_state=content)
    state = checkpoint_utils.load_checkpoint_to_cpu(path)["task_state"]
    expected = torch.load(path, weights_only=False)["task_state"]  # written by this test
    assert repr(state).partition(" object")[0] == repr(expected).partition(" object")[0]
    if "dictionaries" in content:
        assert state["dictionaries"][0].indices == Dictionary().indices


def test_the_meters_of_old_versions_load(tmp_path, monkeypatch):
    meter = AverageMeter()
    meter.update(2.5)
    monkeypatch.setattr(AverageMeter, "__module__", "fairseq.meters")
    path = checkpoint(tmp_path / "model.pt", train_meters=OrderedDict(loss=meter))
    monkeypatch.undo()
    assert checkpoint_utils.load_checkpoint_to_cpu(path)["train_meters"]["loss"].avg == 2.5


def test_a_configuration_of_objects_loads(tmp_path):
    cfg = {"task": {"_name": "translation", "data": ["a", 1, 2.5, None, True]}, "model": {"_name": "transformer"}}
    path = checkpoint(tmp_path / "model.pt", cfg=OmegaConf.create(cfg))
    assert OmegaConf.to_container(checkpoint_utils.load_checkpoint_to_cpu(path)["cfg"]) == cfg


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (RunsCode(), "mkdir"),
        (Path("somewhere"), "pathlib"),
        (np.array([RunsCode()], dtype=object), "holds numpy.dtypes.ObjectDType,"),
        (np.array(["text"]), "holds numpy.dtypes.StrDType,"),
    ],
)
def test_other_contents_are_refused_by_name(tmp_path, monkeypatch, value, named):
    monkeypatch.chdir(tmp_path)
    path = checkpoint(tmp_path / "evil.pt", value=value)
    with pytest.raises(pickle.UnpicklingError) as raised:
        checkpoint_utils.load_checkpoint_to_cpu(path)
    message = str(raised.value)
    assert message.startswith(f"{path}: holds ") and named in message and "\n" not in message
    assert not (tmp_path / "ran").exists()


def test_classes_that_user_code_allowed_stay_allowed(tmp_path):
    path = checkpoint(tmp_path / "model.pt")
    before = set(torch.serialization.get_safe_globals())  # torch keeps them in no order
    checkpoint_utils.load_checkpoint_to_cpu(path)
    assert set(torch.serialization.get_safe_globals()) == before
    with torch.serialization.safe_globals([argparse.Namespace]):
        checkpoint_utils.load_checkpoint_to_cpu(path)
        assert argparse.Namespace in torch.serialization.get_safe_globals()


def test_a_file_that_is_no_checkpoint_has_an_error(tmp_path):
    path = tmp_path / "text.pt"
    path.write_text("not a checkpoint")
    with pytest.raises(pickle.UnpicklingError, match=r"text\.pt: "):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))
