"""OpenVINO through optimum-intel: models that transformers' own `generate` drives, exported once per model."""

from __future__ import annotations

import torch
from answer import Call, Task, Tokens, answer
from optimum.intel import OVModelForSeq2SeqLM, OVModelForSpeechSeq2Seq
from transformers import AutoConfig

CLASSES = {"bart": OVModelForSeq2SeqLM, "t5": OVModelForSeq2SeqLM, "whisper": OVModelForSpeechSeq2Seq}
HINTS = {"float32": "f32", "bfloat16": "bf16"}


def load(task: Task) -> Call:
    model_class = CLASSES[AutoConfig.from_pretrained(task.model).model_type]
    exported = task.folder / "openvino"
    if not exported.exists():
        model_class.from_pretrained(task.model, export=True, compile=False).save_pretrained(exported)
    settings = {
        "INFERENCE_PRECISION_HINT": HINTS[task.dtype],
        "KV_CACHE_PRECISION": HINTS[task.dtype],
        "INFERENCE_NUM_THREADS": str(task.threads),
        "PERFORMANCE_HINT": "LATENCY",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
    }
    model = model_class.from_pretrained(exported, ov_config=settings)
    new = task.arguments["max_new_tokens"]

    def call() -> Tokens:
        with torch.inference_mode():
            return model.generate(**task.inputs, **task.arguments)[:, -new:].tolist()

    return call


if __name__ == "__main__":
    answer(load, "openvino", "optimum-intel")
