"""Prints as JSON what the steps of decoding loops launch on a GPU, and how often the host waits, counted on the twin.

`python cuda_twin_steps.py LIBRARY`, the compiled cuda_twin.cpp. For each loop: the library alone, fastgen with captured
steps switched off, with them, both with shared prompts, and captured ones with one kernel for attention. The numbers
are those of a step: the difference of a longer call and a shorter one. "forwards before a capture" says how many a new
model computes by the default costs.

Tests: tests/optimizer/test_cuda_twin.py
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import cuda_twin
import torch
from hooks import replaced
from reports import capturing
from tiny_models import tiny

import fastgen
from fastgen.optimizer.decoding import graph_cache
from fastgen.testing import configured

SHORT, LONG = 40, 60
WAYS: dict[str, Callable[[], AbstractContextManager]] = {
    "stock": fastgen.disabled,
    "off": lambda: steps_with("off"),
    "on": lambda: steps_with("on"),
    "off, shared": lambda: steps_with("off", share="always"),
    "on, shared": lambda: steps_with("on", share="always"),
    "kernel": lambda: attending_in_one_kernel(),
}


@contextmanager
def steps_with(cuda_graphs: str, share: str = "auto") -> Iterator[None]:
    """Captures steps, or does not; no call outgrows its buffers. share: whether prompts are shared."""
    with capturing(cuda_graphs, smallest_capacity=128), configured(share=share):
        yield


@contextmanager
def attending_in_one_kernel() -> Iterator[None]:
    """Captures steps anew, with one kernel in the place of fastgen's attention in Triton."""
    graph_cache._graph_caches.clear()
    cuda_twin.attend_in_one_kernel(True)
    try:
        with steps_with("on"):
            yield
    finally:
        cuda_twin.attend_in_one_kernel(False)


LOOPS = {
    "BART, beam 4": ("bart", "seq2seq", {"num_beams": 4}),
    "Llama, beam 4": ("llama", "causal", {"num_beams": 4}),
    "Llama, beam 4, no 3-gram twice": ("llama", "causal", {"num_beams": 4, "no_repeat_ngram_size": 3}),
    "Llama, 16 samples": ("llama", "causal", {"do_sample": True, "num_return_sequences": 16}),
    "Llama, greedy": ("llama", "causal", {"do_sample": False}),
}


def main() -> None:
    """Counts all loops in all ways."""
    cuda_twin.install(sys.argv[1])
    calls: dict[str, Callable[[int], Any]] = {name: transformers_call(*loop) for name, loop in LOOPS.items()}
    if find_spec("fairseq"):
        calls["fairseq, beam 4"] = fairseq_call()
    steps = {name: {way: counts(call, way) for way in WAYS} for name, call in calls.items()}
    others = {"forwards before a capture": forwards_before_a_capture(), "a Llama layer": launches_of_a_layer()}
    print(json.dumps({**steps, **others}))


def forwards_before_a_capture() -> float:
    """Returns how many forwards a new model computes before its first graph, counted by the `silu` of its layers."""
    launches: list[int] = []

    def noting(capture: Callable, *arguments: Any) -> Any:
        launches.append(cuda_twin.counts("launches")["silu"])
        return capture(*arguments)

    model, before = tiny("llama").cuda(), cuda_twin.counts("launches")["silu"]
    with replaced("capture a step", noting):
        model.generate(torch.ones(1, 9).long().cuda(), max_new_tokens=LONG, do_sample=False, eos_token_id=None)
    return (launches[0] - before) / model.config.num_hidden_layers


def launches_of_a_layer() -> dict[str, float]:
    """Returns how many kernels a layer of a captured step launches, with torch's kernels and with Liger's."""
    launches = {}
    for name, context in {"torch": nullcontext(), "Liger": cuda_twin.with_liger()}.items():
        with context, attending_in_one_kernel():
            few, many = (_launches_of_capture(layers) for layers in (1, 3))
        launches[name] = (many - few) / 2 / 2  # a capture runs the step twice
    return launches


def _launches_of_capture(layers: int) -> int:
    launches = []

    def noting(capture: Callable, *arguments: Any) -> Any:
        before = cuda_twin.counts("launches").total()
        outputs = capture(*arguments)
        launches.append(cuda_twin.counts("launches").total() - before)
        return outputs

    model = tiny("llama", num_hidden_layers=layers).cuda()
    with replaced("capture a step", noting):
        transformers_call("llama", "causal", LOOPS["Llama, 16 samples"][2], model)(LONG)
    return launches[0]


def transformers_call(name: str, kind: str, arguments: dict[str, Any], model: Any = None) -> Callable[[int], Any]:
    """Returns a call that generates so many tokens for three prompts of one length. model: by default a tiny one."""
    model = tiny(name).cuda() if model is None else model
    input_ids = torch.randint(5, 90, (3, 24), generator=torch.Generator().manual_seed(1)).cuda()
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    return lambda steps: model.generate(**inputs, **arguments, max_new_tokens=steps, eos_token_id=None)


def fairseq_call() -> Callable[[int], Any]:
    """Returns the same call for a batch of fairseq's transformer."""
    from fairseq.utils import move_to_cuda
    from fairseq_generation import generate
    from fairseq_models import CASES

    case = CASES["transformer"]()
    for model in case.models:
        model.cuda()
    sample = move_to_cuda(case.sample)
    return lambda steps: generate(case, sample, beam=4, min_len=steps - 1, max_len_a=0, max_len_b=steps)


def counts(call: Callable[[int], Any], way: str) -> dict[str, float]:
    """Returns launches and waits of a step, captured ones not included; what a call replays, and whether it shares."""
    with WAYS[way]():
        call(4 if way == "stock" else LONG)  # captures, and does what is done once
        before = {of: cuda_twin.counts(of).total() for of in ("launches", "waits")}
        call(SHORT)
        between = {of: cuda_twin.counts(of).total() for of in before}
        call(LONG)
        after = {of: cuda_twin.counts(of).total() for of in before}
    of_step = {of: (after[of] - 2 * between[of] + before[of]) / (LONG - SHORT) for of in before}
    if way == "stock":
        return of_step
    report = fastgen.explain()
    return of_step | {"replayed": report.kernels["decode step, CUDA graph"], "shares": bool(report.shared)}


if __name__ == "__main__":
    main()
