"""transformers' own `generate_batch`, its continuous batching: decoder-only models, and prompts that begin alike."""

from __future__ import annotations

import torch
from answer import Call, Task, Tokens, answer
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

PAGE_TOKENS, BATCH_TOKENS = 64, 2048


def load(task: Task) -> Call:
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=getattr(torch, task.dtype)).eval()
    prompts, arguments = task.prompts(), task.arguments
    samples = arguments["num_return_sequences"]
    generation = GenerationConfig(
        max_new_tokens=arguments["max_new_tokens"],
        do_sample=arguments["do_sample"],
        top_k=arguments["top_k"],
        num_return_sequences=samples,
        eos_token_id=-1,  # none of them ends
        pad_token_id=model.config.pad_token_id,
    )
    longest = max(map(len, prompts)) + arguments["max_new_tokens"]
    pages = len(prompts) * samples * (longest // PAGE_TOKENS + 2)  # for all rows at once
    batching = ContinuousBatchingConfig(page_size=PAGE_TOKENS, num_blocks=pages, max_batch_tokens=BATCH_TOKENS)

    def call() -> Tokens:
        outputs = model.generate_batch(prompts, generation_config=generation, continuous_batching_config=batching)
        return [output.generated_tokens for output in outputs.values()]

    return call


if __name__ == "__main__":
    answer(load, "transformers")
