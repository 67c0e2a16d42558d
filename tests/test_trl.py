"""TRL's trainers under fastgen: the same completions, losses and weights, with prompts computed once per group.

They generate in training mode from prompts that they repeat, score the completions, and learn from them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hooks import fresh_trust, proven, refused
from parity import Both, run_both
from peft import LoraConfig, PeftConfig, PromptTuningConfig
from process_group import process_group
from reports import PREFILL, PROMPT, left_alone_because
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
    set_seed,
)

import fastgen
from fastgen.optimizer.decoding.report import STEPS as DECODE_STEPS
from fastgen.optimizer.decoding.report import Report
from fastgen.testing import configured

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

WORDS = ["<pad>", "<s>", "</s>", *(f"w{number}" for number in range(61))]
STEPS, SAMPLES = 8, 8
PLAIN = {"bf16": False, "gradient_checkpointing": False}

pytestmark = pytest.mark.slow
WITH_ADAPTERS = pytest.mark.parametrize("adapters", (False, True), ids=("all weights", "adapters"))


@pytest.fixture(scope="module")
def tokenizer():
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **special)


def model(kind: str = "llama", **options: Any) -> Any:
    set_seed(0)
    special = {"vocab_size": len(WORDS), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "gpt2":
        dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, **special, **dropouts | options))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, **special, **options}
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(num_local_experts=4, output_router_logits=True, **sizes))
    return LlamaForCausalLM(LlamaConfig(**sizes))


def peft_config(adapters: bool | str) -> PeftConfig | None:
    if adapters == "prompt":
        return PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    return LoraConfig(r=4, lora_dropout=0.0, task_type="CAUSAL_LM") if adapters else None


def words(line: int, count: int) -> str:
    return " ".join(f"w{(7 * line + word) % 61}" for word in range(count))


def prompts() -> datasets.Dataset:
    return datasets.Dataset.from_list([{"prompt": words(line, 20 + line % 5)} for line in range(64)])


def pairs() -> datasets.Dataset:
    """Returns prompts with two answers, of different lengths, that begin with 0 to 3 equal words."""
    rows = []
    for line in range(64):
        same, answers = words(line + 9, line % 4), (words(3 * line, 4 + line % 3), words(3 * line + 1, 5 - line % 3))
        chosen, rejected = (f" {same} {answer}" for answer in answers)
        rows.append({"prompt": words(line, 20 + line % 5), "chosen": chosen, "rejected": rejected})
    return datasets.Dataset.from_list(rows)


class Reports(TrainerCallback):
    """Collects the report of each pass with gradients, the last call before the end of a step."""

    def __init__(self) -> None:
        self.of_steps: list[Report | None] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.of_steps.append(fastgen.explain())

    on_substep_end = on_step_end


def configuration(name: str, folder: Any, **options: Any) -> Any:
    always = {"learning_rate": 2e-3, "seed": 3, "logging_steps": 1, "use_cpu": True, "report_to": []}
    always |= {"save_strategy": "no", "disable_tqdm": True, "per_device_train_batch_size": SAMPLES}
    return getattr(trl, f"{name}Config")(output_dir=str(folder), **always | options)


def compared(make: Callable[[], Any], tolerance: float = 1e-4) -> Both:
    """Trains without and with fastgen, and compares losses and weights; returns trainers and reports of both."""

    def train() -> tuple[Any, list[Report | None]]:
        trainer, reports = make(), Reports()
        trainer.add_callback(reports)
        trainer.train()
        return trainer, reports.of_steps

    both = run_both(train)
    (stock, _), (fast, _) = both[:2]
    losses = [[entry["loss"] for entry in one.state.log_history if "loss" in entry] for one in (stock, fast)]
    assert len(losses[0]) == stock.args.max_steps and len(set(losses[0])) > stock.args.max_steps // 2
    assert losses[1] == pytest.approx(losses[0], abs=tolerance)
    for theirs, ours in zip(stock.model.parameters(), fast.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)
    return both


def rollouts(name: str, tokenizer: Any, folder: Any, policy: Any = model, **options: Any) -> Callable[[], Any]:
    """Returns a function that creates a trainer that keeps its `completions`, and the `reports` of their generation."""
    adapters = options.pop("adapters", False)

    def make() -> Any:
        completions: list[Any] = []

        def reward(completion_ids: list[list[int]], **others: Any) -> list[float]:
            completions.append(completion_ids)
            return [sum(token % 2 for token in tokens) / len(tokens) for tokens in completion_ids]

        always = {"max_steps": STEPS, "num_generations": SAMPLES, "gradient_accumulation_steps": 2, "beta": 0.0}
        arguments = configuration(name, folder, **always | {"max_completion_length": 20} | options)
        parts = {"reward_funcs": reward, "train_dataset": prompts(), "processing_class": tokenizer}
        trainer = getattr(trl, f"{name}Trainer")(policy(), args=arguments, peft_config=peft_config(adapters), **parts)
        trainer.completions, trainer.reports, generate = completions, [], trainer._generate

        def generate_and_report(*args: Any) -> Any:
            generated = generate(*args)
            trainer.reports.append(fastgen.explain())
            return generated

        trainer._generate = generate_and_report
        return trainer

    return make


def assert_shared(reports: list[Report | None], rows: int, most_inputs: int) -> None:
    """Asserts that in all calls that score so many rows, prompts went through the model once."""
    assert reports
    for report in reports:
        assert report is not None and not report.has_steps
        assert report.rows == rows and report.inputs <= most_inputs and report.prefix_tokens_saved, report


@WITH_ADAPTERS
@pytest.mark.parametrize("kind", ("llama", "gpt2"))
def test_grpo_is_the_same_with_shared_prompts(tokenizer, tmp_path, kind, adapters):
    """With a reference: the adapters switched off, or a copy of the model. Adapters with gradient checkpointing."""
    model(kind).save_pretrained(tmp_path)
    policy = (lambda: model(kind)) if adapters else (lambda: str(tmp_path))
    options = {"beta": 0.1, "temperature": 0.9, "adapters": adapters, "num_iterations": 2, **PLAIN}
    options["gradient_checkpointing"] = adapters
    with configured(share="always"):
        (stock, _), (fast, reports), _ = compared(rollouts("GRPO", tokenizer, tmp_path, policy, **options))
    assert fast.completions == stock.completions and len(stock.completions) == STEPS // 2
    assert_shared(reports, rows=SAMPLES, most_inputs=2)
    assert fastgen.explain("generate") is fast.reports[-1] and fastgen.explain("scoring") is reports[-1]
    for report in fast.reports:
        assert (report.inputs, report.rows) == (2, 16) and PREFILL in report.shared
        assert any(shared.startswith(PROMPT) for shared in report.shared), report


@WITH_ADAPTERS
def test_rloo_is_the_same_with_shared_prompts(tokenizer, tmp_path, adapters):
    options = {"max_steps": 5, "adapters": adapters, **PLAIN}
    with configured(share="always"):
        (stock, _), (fast, reports), _ = compared(rollouts("RLOO", tokenizer, tmp_path, **options))
    assert fast.completions == stock.completions
    assert_shared(reports, rows=SAMPLES, most_inputs=2)


@WITH_ADAPTERS
@pytest.mark.parametrize("name", ("GRPO", "RLOO"))
def test_training_is_the_same_with_the_trainers_defaults(tokenizer, tmp_path, name, adapters):
    """Among them bf16: accelerate begins autocast inside of the forward. Several rows round otherwise than one."""
    both = compared(rollouts(name, tokenizer, tmp_path, max_completion_length=30, adapters=adapters), tolerance=1e-3)
    (stock, _), (fast, _) = both[:2]
    assert fast.completions == stock.completions
    for report in fast.reports:
        codes = report.codes(DECODE_STEPS)
        assert "AUTOCAST" in codes or (adapters and report.replays)  # the forward around adapters begins it
        assert "CAPTURE_REFUSED" not in codes


@pytest.mark.parametrize("precomputed", (False, True), ids=("reference in each step", "reference before"))
@WITH_ADAPTERS
def test_dpo_is_the_same_with_shared_beginnings(tokenizer, tmp_path, adapters, precomputed):
    def make() -> Any:
        parts = {"peft_config": peft_config(adapters)} if adapters else {"ref_model": model()}
        options = {"per_device_train_batch_size": 4, "max_steps": STEPS, "precompute_ref_log_probs": precomputed}
        arguments = configuration("DPO", tmp_path, **options, **PLAIN)
        data = {"train_dataset": pairs(), "processing_class": tokenizer}
        return trl.DPOTrainer(model(), args=arguments, **data, **parts)

    with configured(share="always"):
        (stock, _), (fast, reports), _ = compared(make)
    assert_shared(reports, rows=8, most_inputs=4)
    assert_same_metrics(stock, fast)


def assert_same_metrics(stock: Any, fast: Any) -> None:
    for name in ("rewards/margins", "logits/chosen", "entropy", "mean_token_accuracy"):
        theirs, ours = ([entry.get(name) for entry in one.state.log_history] for one in (stock, fast))
        assert ours[:-1] == pytest.approx(theirs[:-1], abs=1e-4)


def test_an_unknown_trl_counts_its_first_step_once(tokenizer, tmp_path):
    def make() -> Any:
        arguments = configuration("DPO", tmp_path, per_device_train_batch_size=4, max_steps=3, logging_steps=3, **PLAIN)
        data = {"train_dataset": pairs(), "processing_class": tokenizer}
        return trl.DPOTrainer(model(), ref_model=model(), args=arguments, **data)

    with configured(share="always"), fresh_trust(unknown=("trl.",)):
        trained = []
        for context in (fastgen.disabled, fastgen.enabled):
            with context():
                trained.append(make())
                trained[-1].train()
        assert len(proven()) == 1 and not refused() and fastgen.explain().prefix_tokens_saved
    assert_same_metrics(*trained)


# One pass of GRPO, called as the trainer does.


@pytest.fixture
def trainer(tokenizer, tmp_path):
    return rollouts("GRPO", tokenizer, tmp_path, **PLAIN)()


def rows(groups: int = 2, prompt: int = 12, completion: int = 6) -> dict[str, Any]:
    """Returns the arguments for completions of several prompts in turn, padded at both ends, four of each."""
    generator = torch.Generator().manual_seed(1)
    length = prompt + completion
    tokens = torch.randint(3, len(WORDS), (4 * groups, length), generator=generator)
    mask = torch.ones_like(tokens)
    for row in range(4 * groups):
        tokens[row, :prompt] = tokens[row % groups, :prompt]
        mask[row, : row % groups] = 0
        mask[row, length - row % 3 :] = 0
    return {"input_ids": tokens * mask, "attention_mask": mask, "logits_to_keep": completion}


def scored(trainer: Any, model: Any = None, **arguments: Any) -> tuple[Any, list[torch.Tensor | None]]:
    """Returns what the trainer's method returns, and the gradients of all weights."""
    model = model or trainer.model
    results = trainer._get_per_token_logps_and_entropies(model, **rows(), **arguments)
    trainer.model.zero_grad()
    (results[0].sin().sum() + (0 if results[1] is None else results[1].sum())).backward()
    return results[:2], [weight.grad for weight in trainer.model.parameters()]


def counting(trainer: Any) -> list[None]:
    """Returns a list that gets an item for each of the trainer's batches."""
    batches: list[None] = []
    autocast = trainer.accelerator.autocast

    def counted() -> Any:
        batches.append(None)
        return autocast()

    trainer.accelerator.autocast = counted
    return batches


@pytest.mark.parametrize(("size", "batches_of_trl", "ours"), ((None, 1, 1), (3, 3, 2)))
def test_batches_keep_the_rows_of_a_prompt_together(trainer, size, batches_of_trl, ours):
    batches = counting(trainer)
    with configured(share="always"):
        stock, fast, report = run_both(lambda: scored(trainer, batch_size=size, compute_entropy=True))
    torch.testing.assert_close(fast, stock, rtol=0, atol=1e-5)
    assert len(batches) == batches_of_trl + ours
    assert (report.inputs, report.rows, report.prefix_length) == (2, 8, 11)


def test_scores_of_an_unknown_trl_are_compared_once(trainer):
    with fastgen.disabled():
        expected, _ = scored(trainer)
    visible = rows()["attention_mask"][:, -6:] != 0
    with configured(share="always"), fresh_trust(unknown=("trl.",)):
        for is_shared in (False, True):
            (log_probs, _), _ = scored(trainer)
            torch.testing.assert_close(log_probs[visible], expected[0][visible], atol=1e-4, rtol=0)
            assert bool(fastgen.explain().prefix_tokens_saved) or not is_shared
            assert ("FIRST_USE" in fastgen.explain().codes()) != is_shared
        assert len(proven()) == 1 and not refused()


def test_batches_of_one_row_share_nothing(trainer):
    batches = counting(trainer)
    with configured(share="always"):
        report = run_both(lambda: scored(trainer, batch_size=1)).report
    assert len(batches) == 16 and left_alone_because(report, "ONE_ROW_PER_INPUT", "batch_size")


def test_gradients_reach_models_inside_ddp(trainer):
    def scored_in_ddp() -> Any:
        return scored(trainer, torch.nn.parallel.DistributedDataParallel(trainer.model))

    with process_group(), configured(share="always"):
        stock, fast, report = run_both(scored_in_ddp)
    torch.testing.assert_close(fast, stock, rtol=0, atol=1e-5)
    assert report.prefix_tokens_saved


def test_autocast_shares_with_gradients(tokenizer, tmp_path):
    trainer = rollouts("GRPO", tokenizer, tmp_path, bf16=True, gradient_checkpointing=False)()
    with configured(share="always"):
        stock, fast, report = run_both(lambda: scored(trainer, compute_entropy=True))
    torch.testing.assert_close(fast[0], stock[0], rtol=0, atol=1e-2)
    for theirs, ours in zip(stock[1], fast[1], strict=True):
        assert (ours - theirs).norm() <= 0.02 * theirs.norm()
    assert report.prefix_tokens_saved


def replace_forward(trainer: Any) -> None:
    backbone = trainer.model.model
    forward = backbone.forward
    backbone.forward = lambda *args, **kwargs: forward(*args, **kwargs)


LEFT_ALONE = {
    "dropout": ({"policy": lambda: model(attention_dropout=0.5)}, None, {}, "TRAINING", "attention_dropout"),
    "experts": ({"policy": lambda: model("mixtral")}, None, {"compute_aux_loss": True}, "TRAINER", "compute_aux_loss"),
    "router logits": ({"policy": lambda: model("mixtral")}, None, {}, "TRAINER", "router logits"),
    "other inputs": ({}, None, {"token_type_ids": torch.zeros(8, 18, dtype=torch.long)}, "TRAINER", "token_type_ids"),
    "another forward": ({}, replace_forward, {}, "METHOD_REPLACED", "backbone"),
    "a hook": ({}, lambda trainer: trainer.model.model.layers[0].register_forward_hook(print_nothing), {}, "HOOKS", ""),
    "a prompt of its own": ({"adapters": "prompt"}, None, {}, "VIRTUAL_TOKENS", "PROMPT_TUNING"),
}


def print_nothing(*args: Any) -> None:
    return None


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_what_cannot_be_shared_is_left_to_trl(tokenizer, tmp_path, case):
    options, change, arguments, code, text = LEFT_ALONE[case]
    trainer = rollouts("GRPO", tokenizer, tmp_path, **options, **PLAIN)()
    if change is not None:
        change(trainer)
    with configured(share="always"):
        stock, fast, report = run_both(lambda: scored(trainer, **arguments))
    torch.testing.assert_close(fast, stock, rtol=0, atol=0)
    assert left_alone_because(report, code, text), report


def test_methods_of_subclasses_are_called(tokenizer, tmp_path, monkeypatch):
    class Own(trl.GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            return "own"

    monkeypatch.setattr(trl, "GRPOTrainer", Own)
    trainer = rollouts("GRPO", tokenizer, tmp_path, **PLAIN)()
    assert trainer._get_per_token_logps_and_entropies(trainer.model, **rows()) == "own"
