"""fastgen-generate-for-transformers on a GPU: outputs, too little memory, resumed runs, a device that fails."""

import pytest
import torch
import transformers
from cli_loop import command, generate, interrupted_after, plain_loop
from cli_models import save_bart, save_gpt2, sentences
from python_process import run_python
from versions import needs_gpu

pytestmark = needs_gpu

LINES = sentences(60)


@pytest.mark.parametrize("size", [("--bs", 4), ("--batch_tokens", 200), ("--bs", 60)])
def test_output_on_a_gpu_is_that_of_a_plain_loop(tmp_path, size):
    bart = save_bart(tmp_path / "bart")
    expected = plain_loop(bart, LINES, 4, device="cuda", num_beams=3)
    assert generate(tmp_path, bart, LINES, "--device", "cuda", "--beam", 3, *size) == expected


def test_a_batch_larger_than_the_memory_is_halved(tmp_path, capsys):
    bart = save_bart(tmp_path / "bart", d_model=512, decoder_ffn_dim=16384)
    expected = plain_loop(bart, LINES, 4, device="cuda", num_beams=4)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + 2**27) / total))
    try:
        lines = generate(tmp_path, bart, LINES * 40, "--device", "cuda", "--beam", 4, "--bs", 2400)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert lines == expected * 40
    assert "out of memory with 2400 inputs" in capsys.readouterr().err


def test_a_resumed_run_on_a_gpu_draws_the_same_samples(tmp_path):
    gpt2 = save_gpt2(tmp_path / "gpt2")
    flags = ["--causal_lm", "--do_sample", "--max_new_tokens", "5", "--seed", "3", "--bs", "4", "--device", "cuda"]
    expected = generate(tmp_path, gpt2, LINES, *flags)
    output = tmp_path / "resumed.txt"
    with interrupted_after(5):
        assert command(gpt2, tmp_path / "input.txt", output, *flags) == 130
    torch.manual_seed(99)
    assert command(gpt2, tmp_path / "input.txt", output, *flags, "--resume") == 0
    assert output.read_text().split("\n")[:-1] == expected


def test_a_device_that_fails_for_good_ends_the_run(tmp_path):
    """The device fails at a token beyond the embedding, without the check for it, in a process of its own."""
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
