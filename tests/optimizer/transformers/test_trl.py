"""TRL's GRPOTrainer, which generates in training mode from prompts that it repeats: the same training under fastgen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity import PREFILL, PROMPT, run_both
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

import fastgen

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

WORDS = ["<pad>", "<s>", "</s>", *(f"w{number}" for number in range(61))]
STEPS, SAMPLES = 20, 8

pytestmark = [pytest.mark.usefixtures("share_always"), pytest.mark.slow]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **special)


def model() -> LlamaForCausalLM:
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def prompts() -> datasets.Dataset:
    lines = [" ".join(f"w{(7 * line + word) % 61}" for word in range(20 + line % 5)) for line in range(64)]
    return datasets.Dataset.from_list([{"prompt": line} for line in lines])


@pytest.mark.parametrize(
    "adapters, checkpointing", ((False, False), (True, True)), ids=("all weights", "adapters, gradient checkpointing")
)
def test_training_is_the_same(tokenizer, tmp_path, adapters, checkpointing):
    reports = []

    def train() -> tuple[list[Any], list[float], list[torch.Tensor]]:
        completions: list[Any] = []

        def reward(completion_ids: list[list[int]], **others: Any) -> list[float]:
            completions.append(completion_ids)
            reports.append(fastgen.explain())
            return [sum(token % 2 for token in tokens) / len(tokens) for tokens in completion_ids]

        arguments = trl.GRPOConfig(
            output_dir=str(tmp_path),
            max_steps=STEPS,
            num_generations=SAMPLES,
            per_device_train_batch_size=SAMPLES,
            gradient_accumulation_steps=2,
            gradient_checkpointing=checkpointing,
            max_completion_length=20,
            learning_rate=1e-2,
            seed=3,
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        extra = {"peft_config": LoraConfig(r=4, lora_dropout=0.0, task_type="CAUSAL_LM")} if adapters else {}
        trainer = trl.GRPOTrainer(model(), reward, arguments, prompts(), processing_class=tokenizer, **extra)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return completions, losses, [parameter.detach() for parameter in trainer.model.parameters()]

    (stock, stock_losses, stock_weights), (fast, losses, weights), report = run_both(train)
    assert len(stock) == len(stock_losses) == STEPS and len(set(stock_losses)) > STEPS // 2
    assert fast == stock
    assert losses == pytest.approx(stock_losses, abs=1e-5)
    for theirs, ours in zip(stock_weights, weights, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert (report.inputs, report.rows) == (2, 16) and PREFILL in report.shared
    for report in reports[STEPS:]:
        assert any(shared.startswith(PROMPT) for shared in report.shared), report
