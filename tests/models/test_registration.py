"""transformers finds the models of fastgen once it is imported, in either order, and imports nothing for them."""

import json

import pytest
from python_process import run_code
from transformers import AutoTokenizer, BertTokenizer
from unilm_slow import SIZES, tiny_unilm

import fastgen  # noqa: F401


@pytest.mark.parametrize("imports", ("import fastgen, transformers", "import transformers, fastgen"))
def test_a_model_is_imported_with_its_first_config(imports):
    code = f"""{imports}
import sys
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
def modules():
    return {{name for name in ("transformers.modeling_utils", "fastgen.models.unilm.modeling") if name in sys.modules}}
before = modules()
unilm = AutoConfig.for_model("unilm", **{SIZES})
mqa = AutoConfig.for_model("mqa_transformer", d_model=16, d_ff=16, head_dim=4, vocab_size=9)
models = AutoModelForCausalLM.from_config(unilm), AutoModelForSeq2SeqLM.from_config(mqa)
print(len(before), *(type(item).__name__ for item in (unilm, mqa, *models)))
"""
    names = ["UniLMConfig", "MQATransformerConfig"]
    names += ["UniLMForConditionalGeneration", "MQATransformerForConditionalGeneration"]
    assert run_code(code).split() == ["0", *names]


def test_imports_of_the_packages_of_models_stay_light():
    code = "import sys, fastgen, fastgen.models.unilm, fastgen.models.mqa, fastgen.models.demo\n"
    assert run_code(code + "print({'torch', 'transformers'} & set(sys.modules))").strip() == "set()"


def test_the_tokenizer_of_unilm_is_that_of_bert(tmp_path):
    words = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", "a", "small", "cat", "##s"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unilm"}))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True, padding_side="left")
    assert isinstance(tokenizer, BertTokenizer)
    inputs = tokenizer(["a small cats", "cat"], padding=True, return_tensors="pt")
    assert inputs["input_ids"].tolist() == [[1, 5, 6, 7, 8, 2], [0, 0, 0, 1, 7, 2]]
    output = tiny_unilm(vocab_size=9).generate(**inputs, num_beams=2, max_new_tokens=3)
    assert output[:, :6].tolist() == inputs["input_ids"].tolist()
