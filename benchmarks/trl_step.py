"""A whole step of TRL's GRPO: generate, score by the reference, learn; transformers and TRL against fastgen.

Losses are compared to 1e-4, and gradients to a thousandth of their norms, which needs the same completions and so
float32. Needs `pip install trl`.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calls import MODELS
from measure import Options, compare, with_and_without
from transformers import TrainerCallback
from word_tokenizer import word_tokenizer


@dataclass(frozen=True)
class GrpoStep:
    """A step with completions of several prompts. Lengths are in tokens, and a word is one.

    has_defaults: whether TRL's own settings hold, and the model has an adapter (LoRA): mixed precision in bfloat16 by
    accelerate, gradient checkpointing, no reference. Otherwise all is computed in the dtype of the run.
    """

    prompts: int = 4
    length: int = 512
    completions: int = 8
    completion_length: int = 64
    model: str = "llama-like"
    has_defaults: bool = False

    @property
    def workload(self) -> str:
        """Returns the case in words."""
        each = f"{self.completions} completions of {self.completion_length} each"
        settings = ", TRL's defaults (bf16, gradient checkpointing) with LoRA" if self.has_defaults else ""
        title = f"{MODELS[self.model].title}{settings}"
        return f"a GRPO step of TRL, {title}, {self.prompts} prompts of {self.length} tokens, {each}"


class Gradients(TrainerCallback):
    """Copies the gradients of a step."""

    def on_pre_optimizer_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
        self.copies = [weight.grad.clone() for weight in model.parameters() if weight.requires_grad]


class Training:
    """A trainer whose model begins each step with the same weights."""

    def __init__(self, case: GrpoStep, options: Options, folder: Path) -> None:
        from datasets import Dataset
        from peft import LoraConfig
        from trl import GRPOConfig, GRPOTrainer

        model = MODELS[case.model].make().to(options.torch_dtype)
        model.save_pretrained(folder)  # where the reference is loaded from
        tokenizer = word_tokenizer(model.config.vocab_size)
        lines = [
            " ".join(f"w{(31 * row + word**2) % 997}" for word in range(case.length)) for row in range(case.prompts)
        ]
        precise = {"beta": 0.04, "bf16": False, "gradient_checkpointing": False}
        precise["model_init_kwargs"] = {"dtype": options.dtype}
        arguments = GRPOConfig(
            output_dir=str(folder / "out"),
            max_steps=1,
            per_device_train_batch_size=case.prompts * case.completions,
            num_generations=case.completions,
            max_completion_length=case.completion_length,
            use_cpu=options.device == "cpu",
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            **({} if case.has_defaults else precise),
        )
        self.trainer = GRPOTrainer(
            str(folder),
            reward,
            arguments,
            Dataset.from_dict({"prompt": lines}),
            processing_class=tokenizer,
            peft_config=LoraConfig() if case.has_defaults else None,
        )
        self.gradients = Gradients()
        self.trainer.add_callback(self.gradients)
        self.weights = {name: weight.clone() for name, weight in self.trainer.model.state_dict().items()}

    def step(self) -> list[Any]:
        """Returns the loss of a step, and its gradients."""
        trainer = self.trainer
        trainer.model.load_state_dict(self.weights)
        trainer.optimizer = trainer.lr_scheduler = None
        loss = trainer.train().training_loss
        return [loss, *self.gradients.copies]


def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [sum(tokens) / len(tokens) / 1000 for tokens in completion_ids]


def are_equal(stock: list[Any], fast: list[Any]) -> bool:
    (stock_loss, *expected), (loss, *gradients) = stock, fast
    is_close = [float((ours - theirs).norm()) <= 1e-3 * theirs.norm() for ours, theirs in zip(gradients, expected)]
    return abs(loss - stock_loss) <= 1e-4 and all(is_close)


def measure_step(case: GrpoStep, options: Options) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        training = Training(case, options, Path(folder))
        return compare(with_and_without(training.step), options, are_equal)[0]
