"""The hooks of the tests, and fastgen.testing, name existing parts, change what they promise, and restore it."""

import subprocess
import sys
from pathlib import Path

import hooks
import pytest
import torch
from hooks import LIMITS, PARTS, broken, errors_noted, place_of, watched
from tiny_models import tiny, token_ids

import fastgen
from fastgen.config import CONFIG
from fastgen.testing import configured

BEAMS = {"num_beams": 3, "max_new_tokens": 6}


@pytest.mark.parametrize("path", [*PARTS.values(), *LIMITS.values()])
def test_hooks_name_existing_parts(path):
    if ".fairseq" in path:
        pytest.importorskip("fairseq")
    owner, name = place_of(path)
    assert hasattr(owner, name)


def test_each_part_and_limit_serves_a_test():
    files = {*Path(__file__).parent.rglob("*.py")} - {Path(__file__), Path(hooks.__file__)}
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    assert [part for part in PARTS if f'"{part}"' not in text] == []
    assert [limit for limit in LIMITS if f"{limit}=" not in text] == []


def test_a_watched_part_is_restored():
    before = place_of(PARTS["decode step"])[0].logits
    with watched("decode step") as calls:
        tiny("llama").generate(token_ids(2, 9), **BEAMS)
    assert calls and all(len(call.result) == 6 for call in calls)
    assert place_of(PARTS["decode step"])[0].logits is before


def test_a_broken_part_is_an_error_of_fastgen():
    model = tiny("llama")
    with fastgen.disabled():
        expected = model.generate(token_ids(2, 9), **BEAMS)
    with broken("decode step", KeyError("ours"), after=2) as calls, errors_noted() as errors:
        assert torch.equal(model.generate(token_ids(2, 9), **BEAMS), expected)
    assert errors == ["'ours'"] and len(calls) == 3


def test_settings_hold_inside_of_a_block():
    before = vars(CONFIG).copy()
    with configured(share="never", cuda_kernels=False), pytest.raises(LookupError):
        assert (CONFIG.share, CONFIG.cuda_kernels) == ("never", False)
        raise LookupError
    assert vars(CONFIG) == before


def test_the_hooks_import_no_torch():
    code = "import sys, fastgen.testing; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
