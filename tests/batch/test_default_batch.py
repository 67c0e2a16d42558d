"""Without --bs and --batch_tokens, batches are as large as is worthwhile and as memory allows."""

import os
from pathlib import Path

import pytest
import torch
import transformers
from cli_loop import command, write_lines
from cli_models import save_bart, save_gpt2, save_llama, save_t5, sentences
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from fastgen.batch import planner
from fastgen.batch.planner import key_value_bytes, total_memory
from fastgen.batch.task import task_for
from fastgen.cli.transformers.args import parse_arguments

CPU = torch.device("cpu")


def chosen(folder: Path, *flags: object) -> tuple[int | None, int | None]:
    """Returns the chosen --bs and --batch_tokens."""
    task = task_for(parse_arguments([str(folder), "in", "out", *map(str, flags)]))
    task.load()
    return task.args.bs, task.args.batch_tokens


@pytest.mark.parametrize(
    ("flags", "inputs", "tokens"),
    [
        ((), 256, 16384),
        (("--beam", 4), 64, 4 * 16384),  # as many rows of generate, and inputs as long
        (("--do_sample", "--num_return_sequences", 100, "--join_outputs"), 8, 100 * 16384),
        (("--bs", 3), 3, None),
        (("--batch_tokens", 99), None, 99),
    ],
)
def test_a_small_model_has_the_largest_worthwhile_batches(bart, flags, inputs, tokens):
    assert chosen(bart, *flags) == (inputs, tokens)


def test_total_memory_limits_batches_and_free_memory_does_not(bart, monkeypatch):
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(bart)
    weights = 4 * sum(weight.numel() for weight in model.parameters())
    token = 2 * 16 * 4  # one layer of keys and values
    output = 8 * 64 * 4 + 9 * token  # scores for 64 tokens; an output has up to 9
    for memory, inputs, tokens in (
        (0, 1, 4),
        (weights, 1, 4),
        (weights + 4 * 4 * 10 * output, 10, 4 * (10 * output // token)),
        (1 << 40, 64, 4 * 16384),
    ):
        monkeypatch.setattr(planner, "total_memory", lambda device, memory=memory: memory)
        assert chosen(bart, "--beam", 4) == (inputs, tokens)


def test_a_run_is_resumed_with_its_batches_on_any_machine(tmp_path, bart, monkeypatch, capsys):
    arguments = (bart, write_lines(tmp_path / "in", sentences(300, longest=3)), tmp_path / "out", "--resume")
    assert command(*arguments) == 0
    said = "batches, chosen for MODEL and this machine: --bs 256 --batch_tokens 16384"
    assert said in capsys.readouterr().err.splitlines()
    monkeypatch.setattr(planner, "total_memory", lambda device: 1_000_000)
    assert command(*arguments) == command(*arguments, "--bs", 256, "--batch_tokens", 16384) == 0
    assert "batches, chosen" not in capsys.readouterr().err
    assert command(*arguments, "--bs", 9) == 2
    assert "--bs was 256 and is 9 now" in capsys.readouterr().err


def test_sounds_have_no_limit_of_tokens(whisper):
    assert chosen(whisper, "--task", "automatic-speech-recognition") == (8, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("save", [save_bart, save_t5, save_gpt2, save_llama])
def test_the_bytes_of_a_token_are_those_in_the_cache(tmp_path, save, dtype):
    folder = save(tmp_path / "model")
    kind = transformers.AutoModelForCausalLM if save in (save_gpt2, save_llama) else transformers.AutoModelForSeq2SeqLM
    model = kind.from_pretrained(folder, dtype=dtype).eval()
    decoder = {"decoder_input_ids": torch.full((1, 7), 5)} if model.config.is_encoder_decoder else {}
    cache = model(torch.full((1, 7), 5), use_cache=True, **decoder).past_key_values
    layers = getattr(cache, "self_attention_cache", cache).layers
    held = sum(part.numel() * part.element_size() for layer in layers for part in (layer.keys, layer.values))
    assert key_value_bytes(model.config.get_text_config(decoder=True), dtype) == held / 7


@pytest.mark.parametrize("mapping", [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES])
def test_every_architecture_has_a_size_of_tokens(mapping):
    for name in mapping:
        try:
            config = transformers.AutoConfig.for_model(name)
        except Exception:  # it has no defaults
            continue
        assert key_value_bytes(config.get_text_config(decoder=True), torch.float32) > 0, name


def test_a_container_has_the_memory_of_its_limit(tmp_path, monkeypatch):
    machine = total_memory(CPU)
    assert machine > 1 << 28
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "limit").write_text("268435456\n")
    names = (str(tmp_path / "max"), str(tmp_path / "none"), str(tmp_path / "limit"))
    monkeypatch.setattr(planner, "LIMITS_OF_CONTAINERS", names[:2])
    assert total_memory(CPU) >= machine
    monkeypatch.setattr(planner, "LIMITS_OF_CONTAINERS", names)
    assert total_memory(CPU) == 1 << 28
    monkeypatch.delattr(os, "sysconf")
    monkeypatch.setattr(planner, "LIMITS_OF_CONTAINERS", ())
    assert total_memory(CPU) == 8 << 30
