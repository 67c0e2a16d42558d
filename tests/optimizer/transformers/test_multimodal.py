"""Models that also take images: prompts of text and of images are shared as in other models."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from parity import assert_same
from reports import CROSS, PROMPT, is_shared, left_alone_because
from tiny_models import BOTH, TOKENS_ONLY, lively, padded
from torch import nn
from transformers import Gemma3TextConfig, GemmaConfig, LlamaConfig, SiglipVisionConfig

import fastgen
from fastgen.optimizer.decoding.report import PREFIX

pytestmark = pytest.mark.usefixtures("share_always")

IMAGE, VIDEO, BEGIN, END = 95, 96, 97, 98
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = SIZES | {"vocab_size": 99}
VISION = SiglipVisionConfig(**SIZES, image_size=16, patch_size=8)


# Sizes of vision encoders and text decoders.
PATCHES = {"hidden_size": 32, "intermediate_size": 64, "depth": 2, "num_heads": 4, "patch_size": 8}
QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
}


def rotary(*sections: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "mrope_section": list(sections), "rope_theta": 10000.0}}


def built(name: str, **config: Any) -> nn.Module:
    model, config_class = getattr(transformers, f"{name}ForConditionalGeneration"), f"{name}Config"
    return model(getattr(transformers, config_class)(**config))


def llava(**options: Any) -> nn.Module:
    text = LlamaConfig(**TEXT, **options)
    ids = {"image_token_index": IMAGE, "vision_feature_select_strategy": "full"}
    return built("Llava", vision_config=VISION, text_config=text, **ids)


def gemma3(window: int = 6) -> nn.Module:
    layers = ["sliding_attention", "full_attention"]
    text = Gemma3TextConfig(**TEXT, num_key_value_heads=2, head_dim=8, sliding_window=window, layer_types=layers)
    ids = {"image_token_id": IMAGE, "boi_token_id": BEGIN, "eoi_token_id": END}
    return built("Gemma3", text_config=text, vision_config=VISION, mm_tokens_per_image=4, **ids)


def paligemma() -> nn.Module:
    text = GemmaConfig(**TEXT, num_key_value_heads=2, head_dim=8)
    widths = {"projection_dim": 32, "hidden_size": 32}
    return built("PaliGemma", vision_config=VISION, text_config=text, image_token_id=IMAGE, **widths)


def qwen2_vl() -> nn.Module:
    text = TEXT | {"num_key_value_heads": 2} | rotary(1, 1, 2)
    return built("Qwen2VL", text_config=text, vision_config=PATCHES | {"embed_dim": 32}, **QWEN_IDS)


def qwen3_vl() -> nn.Module:
    """Its images also go into the first layers."""
    text = TEXT | {"num_key_value_heads": 2, "head_dim": 8} | rotary(2, 1, 1)
    deep = {"out_hidden_size": 32, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 4}
    return built("Qwen3VL", text_config=text, vision_config=PATCHES | deep, **QWEN_IDS)


def blip2() -> nn.Module:
    text = {"model_type": "opt", "vocab_size": 99, "ffn_dim": 64, "word_embed_proj_dim": 32}
    return built(
        "Blip2",
        vision_config=SIZES | {"image_size": 16, "patch_size": 8},
        qformer_config=TEXT | {"encoder_hidden_size": 32},
        text_config=SIZES | text | {"max_position_embeddings": 64},
        num_query_tokens=4,
        image_token_id=IMAGE,
    )


def idefics3() -> nn.Module:
    vision = SIZES | {"image_size": 16, "patch_size": 4}
    text = LlamaConfig(**TEXT)
    return built("Idefics3", vision_config=vision, text_config=text, image_token_id=IMAGE, scale_factor=2)


def florence2() -> nn.Module:
    """An encoder and a decoder; its images of 16 × 16 have five tokens."""
    text = {"model_type": "bart", "vocab_size": 99, "d_model": 32, "max_position_embeddings": 64}
    for part in ("encoder", "decoder"):
        text |= {f"{part}_layers": 2, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 64}
    vision = {"depths": (1, 1), "patch_size": (7, 3), "patch_stride": (4, 2), "patch_padding": (3, 1)}
    vision |= {"patch_prenorm": (False, True), "embed_dim": (16, 32), "num_heads": (2, 4), "num_groups": (2, 4)}
    vision |= {"window_size": 2, "projection_dim": 32}
    return built("Florence2", vision_config=vision, text_config=text, image_token_id=IMAGE)


def ready(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = lively(make()).eval()
    model.generation_config.update(pad_token_id=1, eos_token_id=2)
    return model


def text(*lengths: int) -> dict[str, torch.Tensor]:
    inputs = padded(*lengths)
    inputs["input_ids"].clamp_(max=90)
    return inputs


@BOTH
@pytest.mark.parametrize("make", (llava, gemma3, paligemma, qwen2_vl))
def test_a_prompt_of_text_is_shared(make, arguments):
    report = assert_same(ready(make), text(9, 7), **arguments)
    assert is_shared(report, PROMPT)


def with_images(*lengths: int, images: int = 1, axes: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    """Returns prompts with images of four tokens. axes: dimensions before the channels of the images."""
    inputs = text(*lengths)
    for image in range(images):
        inputs["input_ids"][:, 3 + 5 * image : 7 + 5 * image] = IMAGE
    inputs["pixel_values"] = torch.randn(len(lengths) * images, *axes, 3, 16, 16)
    return inputs


def with_patches() -> dict[str, torch.Tensor]:
    """Returns prompts for Qwen with an image of one token each, whose pixels are rows of patches."""
    inputs = text(9, 9)
    inputs["input_ids"][:, 3:6] = torch.tensor([BEGIN, IMAGE, END])
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE).long()
    return inputs | {"pixel_values": torch.randn(8, 384), "image_grid_thw": torch.tensor([[1, 2, 2]] * 2)}


IMAGES = {
    llava: lambda: with_images(9, 7),
    paligemma: lambda: with_images(9, 7),
    gemma3: lambda: with_images(9, 7),
    blip2: lambda: with_images(9, 7),
    idefics3: lambda: with_images(9, 7, axes=(1,)),
    qwen2_vl: with_patches,
    qwen3_vl: with_patches,
}


@BOTH
@pytest.mark.parametrize("make", IMAGES)
def test_images_in_a_prompt_are_shared(make, arguments):
    torch.manual_seed(0)
    assert is_shared(assert_same(ready(make), IMAGES[make](), **arguments), PROMPT)


@BOTH
def test_images_in_the_encoders_prompt_are_shared(arguments):
    inputs = with_images(9, 9)
    inputs["input_ids"][:, 7] = IMAGE
    inputs["attention_mask"][1, 8:] = 0
    assert is_shared(assert_same(ready(florence2), inputs, **arguments), CROSS, PROMPT)


@BOTH
@pytest.mark.parametrize("as_many", (True, False), ids=("as many in each", "other numbers"))
def test_several_images_in_a_prompt_are_shared(as_many, arguments):
    inputs = with_images(15, 15, images=2)
    if not as_many:
        inputs["input_ids"][0, 8:12] = 7
        inputs["pixel_values"] = inputs["pixel_values"][:3]
    assert is_shared(assert_same(ready(llava), inputs, **arguments), PROMPT)


@pytest.mark.parametrize("different", (True, False))
def test_repeated_prompts_are_shared_if_images_are_equal(different):
    inputs = {name: value.repeat_interleave(3, dim=0) for name, value in with_images(9, 7).items()}
    if different:
        inputs["pixel_values"] = torch.randn(6, 3, 16, 16)
    report = assert_same(ready(llava), inputs, max_new_tokens=5, do_sample=False)
    if different:
        assert left_alone_because(report, "IMAGES_DIFFER")
    else:
        assert is_shared(report, PROMPT)


@BOTH
def test_positions_of_the_last_images_do_not_reach_text(arguments):
    model, words = ready(qwen2_vl), text(9, 7)
    words["mm_token_type_ids"] = torch.zeros_like(words["input_ids"])
    for _ in range(2):
        assert is_shared(assert_same(model, with_patches(), **arguments), PROMPT)
        assert is_shared(assert_same(model, words, **arguments), PROMPT)


def alike(inputs: dict[str, torch.Tensor], prefix: int, differ: bool = True) -> dict[str, torch.Tensor]:
    """Returns these inputs with `prefix` equal tokens at the beginning of each row, then different ones."""
    start = (inputs["attention_mask"] != 0).long().argmax(dim=1)
    for row in range(1, len(start)):
        inputs["input_ids"][row, start[row] : start[row] + prefix] = inputs["input_ids"][
            0, start[0] : start[0] + prefix
        ]
    if differ:
        for row, first in enumerate(start.tolist()):
            inputs["input_ids"][row, first + prefix] = 10 + row
    return inputs


Inputs = dict[str, torch.Tensor]


def after(axes: tuple[int, ...] = ()) -> Inputs:
    """Returns prompts whose first image, after the prefix, differs from row to row."""
    return alike(with_images(14, 14, axes=axes), 3, differ=False)


def inside(axes: tuple[int, ...] = ()) -> Inputs:
    inputs = alike(with_images(14, 14, 14, axes=axes), 10)
    inputs["pixel_values"][:] = inputs["pixel_values"][:1].clone()
    return inputs


def other_numbers() -> Inputs:
    inputs = alike(with_images(15, 15, images=2), 3, differ=False)
    inputs["input_ids"][0, 8:12] = 7
    inputs["pixel_values"] = inputs["pixel_values"][:3]
    return inputs


def with_types() -> Inputs:
    inputs = after()
    return inputs | {"token_type_ids": (inputs["input_ids"] == IMAGE).long()}


def patches_after() -> Inputs:
    return alike(with_patches(), 3, differ=False)


# The model, its inputs, the length of the common prefix, and how many tokens are saved, or why none.
PREFIXES = [
    *((make, inputs, *lengths) for make in (llava, blip2) for inputs, *lengths in ((after, 3, 3), (inside, 10, 20))),
    (idefics3, partial(after, (1,)), 3, 3),
    (idefics3, partial(inside, (1,)), 10, 20),
    (llava, other_numbers, 3, 3),
    (gemma3, after, 0, "SLIDING_WINDOW"),
    (paligemma, after, 0, "NOT_CAUSAL"),
    (gemma3, with_types, 0, "IMAGES"),
    (qwen2_vl, patches_after, 0, "ARGUMENT_COLUMNS"),
    (qwen3_vl, patches_after, 0, "ARGUMENT_COLUMNS"),
]


@BOTH
@pytest.mark.parametrize(("make", "inputs", "length", "saved"), PREFIXES)
def test_images_after_and_inside_a_common_prefix(make, inputs, length, saved, arguments):
    torch.manual_seed(0)
    report = assert_same(ready(make), inputs(), **arguments, **TOKENS_ONLY)
    assert report.prefix_length == length
    assert saved in (report.codes(PREFIX) if length == 0 else {report.prefix_tokens_saved})


@pytest.mark.parametrize("order", (1, -1))
def test_a_prefix_that_sees_later_tokens_is_left_alone(order):
    """Gemma 3 lets neighbors of type 1 see each other."""
    model, options = ready(partial(gemma3, window=60)), TOKENS_ONLY | {"max_new_tokens": 5, "do_sample": False}
    inputs = alike(text(14, 14, 14), 8)
    causal = torch.zeros_like(inputs["input_ids"])
    mixed = causal.clone()
    mixed[:, 5:11] = 1
    for types in (causal, mixed)[::order]:
        report = assert_same(model, inputs | {"token_type_ids": types}, **options)
        assert report.prefix_length == (8 if types is causal else 0)
        assert types is causal or report.codes(PREFIX) == {"NOT_CAUSAL"}


def test_positions_of_a_text_model_that_depend_on_prompts():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = ready(partial(llava, rope_parameters=rope, max_position_embeddings=8))
    unused = copy.deepcopy(model)  # it remembers the longest prompt
    inputs, options = alike(text(14, 14, 14), 6), {"max_new_tokens": 5, "do_sample": False}
    with fastgen.disabled():
        expected = unused.generate(**inputs, **options)
    assert torch.equal(model.generate(**inputs, **options), expected)
    assert fastgen.explain().prefix_length == 0 and fastgen.explain().codes(PREFIX) == {"POSITIONS"}
