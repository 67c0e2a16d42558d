"""fastgen-generate-for-transformers on a GPU: a plain loop's outputs, too little memory, resumed runs, dead devices."""

from pathlib import Path

import pytest
import torch
import transformers
from cli_loop import generate
from cli_models import save_bart, save_gpt2, sentences
from python_process import run_python

import fastgen
from fastgen.cli.transformers.command import main

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LINES = sentences(60)


def plain_loop(folder: Path, bs: int, **settings: object) -> list[str]:
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).cuda()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = []
    with fastgen.disabled():
        for start in range(0, len(LINES), bs):
            batch = tokenizer(LINES[start : start + bs], padding=True, return_tensors="pt").to("cuda")
            sequences = model.generate(input_ids=batch.input_ids, attention_mask=batch.attention_mask, **settings)
            texts += tokenizer.batch_decode(sequences, skip_special_tokens=True)
    return texts


@pytest.mark.parametrize("size", [("--bs", 4), ("--batch_tokens", 200), ("--bs", 60)])
def test_output_on_a_gpu_is_that_of_a_plain_loop(tmp_path, size):
    bart = save_bart(tmp_path / "bart")
    expected = plain_loop(bart, 4, num_beams=3)
    assert generate(tmp_path, bart, LINES, "--device", "cuda", "--beam", 3, *size) == expected


def test_a_batch_larger_than_the_memory_is_halved(tmp_path, capsys):
    bart = save_bart(tmp_path / "bart", d_model=512, decoder_ffn_dim=16384)
    expected = plain_loop(bart, 4, num_beams=4)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + 2**27) / total))
    try:
        lines = generate(tmp_path, bart, LINES * 40, "--device", "cuda", "--beam", 4, "--bs", 2400)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert lines == expected * 40
    assert "out of memory with 2400 inputs" in capsys.readouterr().err


def test_a_resumed_run_draws_the_same_samples(tmp_path, monkeypatch):
    gpt2 = save_gpt2(tmp_path / "gpt2")
    flags = ["--causal_lm", "--do_sample", "--max_new_tokens", "5", "--seed", "3", "--bs", "4", "--device", "cuda"]
    expected = generate(tmp_path, gpt2, LINES, *flags)
    output = tmp_path / "output.txt"
    output.unlink()
    command = [str(gpt2), str(tmp_path / "input.txt"), str(output), *flags, "--resume"]
    original, left = transformers.GPT2LMHeadModel.generate, [5]

    def crashing(self: object, **inputs: object) -> object:
        left[0] -= 1
        if left[0] < 0:
            raise KeyError("a crash")
        return original(self, **inputs)

    with monkeypatch.context() as patch:
        patch.setattr(transformers.GPT2LMHeadModel, "generate", crashing)
        assert main(command) == 1
    torch.manual_seed(99)
    assert main(command) == 0
    assert output.read_text().split("\n")[:-1] == expected


def test_a_device_that_an_error_leaves_dead_ends_the_run(tmp_path):
    """A token that the embedding does not have, with the check for it left out, in a process of its own."""
    model, source, output = save_bart(tmp_path / "bart"), tmp_path / "input.txt", tmp_path / "output.txt"
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["unknown"])
    tokenizer.save_pretrained(model)
    source.write_text("\n".join([*LINES[:20], "unknown", *LINES[20:]]))
    code = (
        "import sys\nfrom fastgen.batch import text\ntext.embedded_tokens = lambda model: None\n"
        "from fastgen.cli.transformers.command import main\nsys.exit(main(sys.argv[1:]))"
    )
    flags = ["--device", "cuda", "--bs", "4", "--window", "0"]
    done = run_python("-c", code, str(model), str(source), str(output), *flags)
    assert done.returncode == 1 and "failed at lines 21 to 24" in done.stderr, done.stderr
    assert output.with_name("output.txt.part").read_text().count('"]\n') == 20
