"""Models that also take images: prompts of text alone are shared as in other models, images are left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from architectures import Architecture
from parity import BEAMS, PROMPT, SAMPLES, assert_same, is_shared, left_alone_because, lively, padded
from torch import nn
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    SiglipVisionConfig,
)

pytestmark = pytest.mark.usefixtures("share_always")

IMAGE, VIDEO, BEGIN, END = 95, 96, 97, 98
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = SIZES | {"vocab_size": 99}
VISION = SiglipVisionConfig(**SIZES, image_size=16, patch_size=8)


def llava() -> nn.Module:
    config = LlavaConfig(
        vision_config=VISION,
        text_config=LlamaConfig(**TEXT),
        image_token_index=IMAGE,
        vision_feature_select_strategy="full",
    )
    return LlavaForConditionalGeneration(config)


def gemma3() -> nn.Module:
    layers = ["sliding_attention", "full_attention"]
    text = Gemma3TextConfig(**TEXT, num_key_value_heads=2, head_dim=8, sliding_window=6, layer_types=layers)
    ids = {"image_token_id": IMAGE, "boi_token_id": BEGIN, "eoi_token_id": END}
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4, **ids)
    )


def paligemma() -> nn.Module:
    text = GemmaConfig(**TEXT, num_key_value_heads=2, head_dim=8)
    return PaliGemmaForConditionalGeneration(
        PaliGemmaConfig(vision_config=VISION, text_config=text, image_token_id=IMAGE, projection_dim=32, hidden_size=32)
    )


def qwen2_vl() -> nn.Module:
    rotary = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    config = Qwen2VLConfig(
        text_config=TEXT | {"num_key_value_heads": 2, "rope_parameters": rotary},
        vision_config={"embed_dim": 32, "hidden_size": 32, "depth": 2, "num_heads": 4, "patch_size": 8},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
    )
    return Qwen2VLForConditionalGeneration(config)


def ready(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = lively(make()).eval()
    model.generation_config.update(pad_token_id=1, eos_token_id=2)
    return model


def text(*lengths: int) -> dict[str, torch.Tensor]:
    inputs = padded(*lengths)
    inputs["input_ids"].clamp_(max=90)
    return inputs


@pytest.mark.parametrize("make", (llava, gemma3, paligemma, qwen2_vl))
@pytest.mark.parametrize("arguments", (BEAMS, SAMPLES), ids=("beams", "samples"))
def test_a_prompt_of_text_is_shared(make, arguments):
    report = assert_same(ready(make), text(9, 7), **arguments)
    assert is_shared(report, PROMPT)


@pytest.mark.parametrize("arguments", (BEAMS, SAMPLES), ids=("beams", "samples"))
def test_images_in_a_prompt_are_left_alone(arguments):
    inputs = text(9, 7)
    inputs["input_ids"][:, 3:7] = IMAGE
    inputs["pixel_values"] = Architecture("", "vision").inputs()["pixel_values"]
    assert left_alone_because(assert_same(ready(llava), inputs, **arguments), "its rows are not those of the prompt")


@pytest.mark.parametrize("arguments", (BEAMS, SAMPLES), ids=("beams", "samples"))
def test_text_after_images_that_the_model_remembers_positions_of(arguments):
    model, images, words = ready(qwen2_vl), text(9, 9), text(9, 7)
    images["input_ids"][:, 3:6] = torch.tensor([BEGIN, IMAGE, END])
    images["mm_token_type_ids"] = (images["input_ids"] == IMAGE).long()
    images |= {"pixel_values": torch.randn(8, 384), "image_grid_thw": torch.tensor([[1, 2, 2]] * 2)}
    words["mm_token_type_ids"] = torch.zeros_like(words["input_ids"])
    for _ in range(2):
        report = assert_same(model, images, **arguments)
        assert left_alone_because(report, "its rows are not those of the prompt")
        assert is_shared(assert_same(model, words, **arguments), PROMPT)
