"""transformers finds UniLM and its tokenizer once fastgen is imported, in either order, and imports nothing for it."""

from __future__ import annotations

import json

import pytest
from python_process import run_code
from unilm_slow import SIZES, tiny_unilm

LOADED = "import sys; print(any('unilm.modeling' in name for name in sys.modules), 'torch' in sys.modules)"


@pytest.mark.parametrize("imports", ("import fastgen, transformers", "import transformers, fastgen"))
def test_config_is_known_and_the_model_is_imported_with_the_first_config(imports):
    code = f"""{imports}
import sys
from transformers import AutoConfig, AutoModelForCausalLM
before = "fastgen.models.unilm.modeling" in sys.modules
config = AutoConfig.for_model("unilm", **{SIZES})
print(before, type(AutoModelForCausalLM.from_config(config)).__name__)
"""
    assert run_code(code).split() == ["False", "UniLMForConditionalGeneration"]


def test_import_of_fastgen_stays_light():
    assert run_code(f"import fastgen; {LOADED}").split() == ["False", "False"]
    assert run_code(f"import fastgen.models.unilm; {LOADED}").split() == ["False", "False"]


def test_auto_tokenizer_is_that_of_bert(tmp_path):
    words = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", "a", "small", "cat", "##s"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unilm"}))
    from transformers import AutoTokenizer, BertTokenizer

    import fastgen  # noqa: F401

    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True, padding_side="left")
    assert isinstance(tokenizer, BertTokenizer)
    inputs = tokenizer(["a small cats", "cat"], padding=True, return_tensors="pt")
    assert inputs["input_ids"].tolist() == [[1, 5, 6, 7, 8, 2], [0, 0, 0, 1, 7, 2]]
    output = tiny_unilm(vocab_size=9).generate(**inputs, num_beams=2, max_new_tokens=3)
    assert output[:, :6].tolist() == inputs["input_ids"].tolist()
