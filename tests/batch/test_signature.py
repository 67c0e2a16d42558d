"""The signature of a run changes with everything that can change its output, and with nothing else."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from cli_models import save_bart

from fastgen.batch import signature as module
from fastgen.batch.config import BatchConfig
from fastgen.batch.files import Survey
from fastgen.batch.signature import differences, signature, with_commit

SURVEY = Survey(3, "0" * 64)


def sign(bart: Path | str, survey: Survey | None = SURVEY, **flags: object) -> dict:
    return signature(replace(BatchConfig(str(bart), "in.txt", "out.txt"), **flags), survey)


def changes(before: dict, now: dict) -> list[str]:
    """Returns the changes that --resume would name for a signature read from its file."""
    return differences(json.loads(json.dumps(before)), now)


def test_the_same_model_in_another_folder_has_the_same_signature(bart, tmp_path):
    copy = shutil.copytree(bart, tmp_path / "copy")
    (copy / "README.md").write_text("about it")
    assert changes(sign(bart), sign(copy)) == []


def test_flags_that_change_no_output_do_not_count(bart):
    other = dict.fromkeys(("input", "output", "reference_path", "reference_field", "score_path"), "other")
    other |= dict.fromkeys(("resume", "overwrite", "quiet"), True)
    other |= dict.fromkeys(("preprocess_workers", "postprocess_workers"), 4)
    assert changes(sign(bart), sign(bart, **other)) == []


def test_every_other_flag_counts(bart):
    beams = [("num_beams", 4)]
    before = sign(bart, gen=beams)
    assert changes(before, sign(bart, gen=[("num_beams", 5)])) == ["num_beams was 4 and is 5 now"]
    assert changes(before, sign(bart, gen=beams, causal_lm=True)) == ["causal_lm was not given and is given now"]
    assert changes(before, sign(bart, gen=[*beams, ("length_penalty", 5)])) == [
        "length_penalty was not given and is 5.0 now"
    ]
    assert changes(before, sign(bart, gen=[*beams, ("task", "x")])) == ['task was not given and is "x" now']
    assert changes(before, sign(bart, gen=beams, dtype="float16")) == ['dtype was not given and is "float16" now']
    config = {"top_k": 5, "top_p": 0.5}
    before = sign(bart, generation_config=config)
    assert changes(before, sign(bart, generation_config=config | {"top_k": 6})) == [
        "generation_config: top_k was 5 and is 6 now"
    ]


def test_the_input_counts_by_its_content(bart):
    expected = ["INPUT's content changed", "INPUT's number of lines was 3 and is 4 now"]
    assert changes(sign(bart), sign(bart, Survey(4, "1" * 64))) == expected
    assert changes(sign(bart, None), sign(bart, None)) == []


@pytest.mark.parametrize("size", [module.LARGE_FILE, 4096])
def test_a_change_of_the_model_is_named_by_its_file(bart, tmp_path, monkeypatch, size):
    """Only samples of large files are hashed."""
    monkeypatch.setattr(module, "LARGE_FILE", size)
    monkeypatch.setattr(module, "SAMPLES", 8)
    before = sign(bart)
    shutil.copytree(bart, tmp_path / "config")
    (tmp_path / "config" / "generation_config.json").write_text("{}")
    assert changes(before, sign(tmp_path / "config")) == ["MODEL's generation_config.json changed"]
    other = save_bart(tmp_path / "weights", init_std=0.4)
    changed = changes(before, sign(other))
    assert "MODEL's model.safetensors changed" in changed and "MODEL's tokenizer.json changed" not in changed
    tokenizer = transformers.AutoTokenizer.from_pretrained(bart)
    tokenizer.add_tokens(["word60"])
    shutil.copytree(bart, tmp_path / "tokenizer")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert "MODEL's tokenizer.json changed" in changes(before, sign(tmp_path / "tokenizer"))


def test_a_model_of_the_hub_counts_by_its_known_commit():
    early = sign("facebook/bart-base")
    first, other = (with_commit(early, SimpleNamespace(_commit_hash=each)) for each in ("a1", "b2"))
    assert changes(first, early) == [] == changes(first, dict(first))
    assert changes(first, other) == ['MODEL\'s commit was "a1" and is "b2" now']
    assert '"facebook/bart-base" and is "facebook/bart-large" now' in changes(first, sign("facebook/bart-large"))[0]
