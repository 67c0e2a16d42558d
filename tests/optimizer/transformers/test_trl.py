"""TRL's trainers, which generate in training mode from prompts that they repeat: the same training under fastgen."""

from typing import Any

import pytest
import torch
from parity import Both, run_both
from peft import LoraConfig
from reports import PREFILL, PROMPT
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

import fastgen
from fastgen.optimizer.decoding.report import STEPS as DECODE_STEPS
from fastgen.optimizer.decoding.report import Report
from fastgen.testing import configured

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

WORDS = ["<pad>", "<s>", "</s>", *(f"w{number}" for number in range(61))]
STEPS, SAMPLES = 20, 8

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer():
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **special)


def model() -> LlamaForCausalLM:
    set_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"vocab_size": len(WORDS), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **sizes, **special))


def prompts() -> datasets.Dataset:
    lines = [" ".join(f"w{(7 * line + word) % 61}" for word in range(20 + line % 5)) for line in range(64)]
    return datasets.Dataset.from_list([{"prompt": line} for line in lines])


def trained(name: str, tokenizer: Any, folder: Any, adapters: bool, options: dict[str, Any]) -> Both:
    """Compares training without fastgen and with it; returns completions, losses, weights, and reports of both."""

    def train() -> tuple[list[Any], list[float], list[torch.Tensor], list[Report | None]]:
        completions: list[Any] = []
        reports: list[Report | None] = []

        def reward(completion_ids: list[list[int]], **others: Any) -> list[float]:
            completions.append(completion_ids)
            reports.append(fastgen.explain())
            return [sum(token % 2 for token in tokens) / len(tokens) for tokens in completion_ids]

        arguments = getattr(trl, f"{name}Config")(
            output_dir=str(folder),
            max_steps=STEPS,
            num_generations=SAMPLES,
            per_device_train_batch_size=SAMPLES,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            beta=0.0,
            seed=3,
            logging_steps=1,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            **options,
        )
        parts: dict[str, Any] = {"reward_funcs": reward, "train_dataset": prompts(), "processing_class": tokenizer}
        if adapters:
            parts["peft_config"] = LoraConfig(r=4, lora_dropout=0.0, task_type="CAUSAL_LM")
        trainer = getattr(trl, f"{name}Trainer")(model(), args=arguments, **parts)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return completions, losses, [parameter.detach() for parameter in trainer.model.parameters()], reports

    both = run_both(train)
    (stock, stock_losses, stock_weights, _), (fast, losses, weights, _) = both[:2]
    assert len(stock) == len(stock_losses) == STEPS and len(set(stock_losses)) > STEPS // 2
    assert fast == stock
    assert losses == pytest.approx(stock_losses, abs=1e-5)
    for theirs, ours in zip(stock_weights, weights, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    return both


@pytest.mark.parametrize("adapters", (False, True), ids=("all weights", "adapters"))
def test_training_is_the_same_with_shared_prompts(tokenizer, tmp_path, adapters):
    options = {"bf16": False, "gradient_checkpointing": adapters, "max_completion_length": 20}
    with configured(share="always"):
        both = trained("GRPO", tokenizer, tmp_path, adapters, options)
    assert (both.report.inputs, both.report.rows) == (2, 16) and PREFILL in both.report.shared
    for report in both.fast[-1]:
        assert any(shared.startswith(PROMPT) for shared in report.shared), report


@pytest.mark.parametrize("adapters", (False, True), ids=("all weights", "adapters"))
@pytest.mark.parametrize("name", ("GRPO", "RLOO"))
def test_training_is_the_same_with_the_trainers_defaults(tokenizer, tmp_path, name, adapters):
    """Among them bf16: accelerate begins autocast inside of the forward."""
    reports = trained(name, tokenizer, tmp_path, adapters, {"max_completion_length": 30}).fast[-1]
    for report in reports:
        codes = report.codes(DECODE_STEPS)
        assert "AUTOCAST" in codes or (adapters and report.replays)  # the forward around adapters begins it
        assert "CAPTURE_REFUSED" not in codes
