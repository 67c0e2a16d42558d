"""Multi-query Transformers generate, train and are saved like transformers' own models."""

import pytest
import torch
from parity import assert_same, compared, run_both
from reports import CROSS, PREFILL, PROMPT, capturing, is_shared, replays
from tiny_models import lively, padded, token_ids
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from fastgen.models.mqa import MQATransformerConfig, MQATransformerForCausalLM, MQATransformerForConditionalGeneration
from fastgen.models.mqa.stack import NEEDS_CACHE_POSITION
from fastgen.optimizer.transformers.compat import LAYERS_ARE_KNOWN

KINDS = pytest.mark.parametrize("kind", (MQATransformerForConditionalGeneration, MQATransformerForCausalLM))
VARIANTS = pytest.mark.parametrize(
    ("key_value_heads", "window"), ((4, None), (1, None), (2, None), (4, 3), (1, 3)), ids=str
)
MODES = {
    "greedy": {"max_new_tokens": 12},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 12, "no_repeat_ngram_size": 2},
    "samples": {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 9},
}


def tiny_model(kind: type, key_value_heads: int = 1, window: int | None = None, **sizes: object) -> nn.Module:
    torch.manual_seed(0)
    few = {"vocab_size": 99, "d_model": 32, "d_ff": 48, "encoder_layers": 2, "decoder_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": key_value_heads, "local_window": window}
    return lively(kind(MQATransformerConfig(**few | heads | {"max_position_embeddings": 64} | sizes))).eval()


def inputs_for(kind: type) -> dict[str, torch.Tensor]:
    return padded(9, 6, 4, side="right" if kind is MQATransformerForConditionalGeneration else "left")


@KINDS
@VARIANTS
@pytest.mark.parametrize("mode", MODES)
def test_generate_is_the_librarys_with_and_without_a_cache(kind, key_value_heads, window, mode, share_always):
    model = tiny_model(kind, key_value_heads, window)
    report = assert_same(model, inputs_for(kind), **MODES[mode])
    if mode != "greedy":
        assert is_shared(report, CROSS if model.config.is_encoder_decoder else PROMPT) or window is not None
        assert PREFILL in report.shared
    outputs = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        outputs.append(model.generate(**inputs_for(kind), use_cache=use_cache, **MODES[mode]))
    assert torch.equal(*outputs)


@KINDS
@pytest.mark.skipif(not LAYERS_ARE_KNOWN, reason="nothing is captured with this version of transformers")
def test_steps_of_multi_query_models_are_captured(kind):
    model = tiny_model(kind)
    with capturing():
        both = run_both(lambda: model.generate(**inputs_for(kind), num_beams=3, max_new_tokens=20, min_new_tokens=20))
    assert torch.equal(both.stock, both.fast)
    assert replays(both.report) > 0


@KINDS
def test_local_layers_store_their_window_only(kind):
    model = tiny_model(kind, window=4)
    outputs = compared(model, inputs_for(kind), max_new_tokens=12, min_new_tokens=12).stock
    cache = outputs.past_key_values
    if model.config.is_encoder_decoder:
        assert all(layer.keys.shape[2] == 9 for layer in cache.cross_attention_cache.layers)
        cache = cache.self_attention_cache
    assert [layer.keys.shape[2] for layer in cache.layers] == [3, 3]  # besides the current position


@KINDS
def test_a_window_hides_earlier_tokens(kind):
    """A token changes the outputs of the layers' windows after it, and no others."""
    model = tiny_model(kind, window=3)
    tokens = token_ids(1, 14)
    changed = tokens.clone()
    changed[0, 2] = 50
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    source = {"input_ids": token_ids(1, 5)} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        before, after = (model(**source, **{name: ids}).logits[0] for ids in (tokens, changed))
    assert (before != after).any(-1).nonzero().flatten().tolist() == [2, 3, 4, 5, 6]  # 2 layers of 2 more


@KINDS
def test_multi_query_models_generate_with_static_caches(kind):
    model = tiny_model(kind, window=3)
    inputs = inputs_for(kind)
    if NEEDS_CACHE_POSITION and model.config.is_encoder_decoder:
        with pytest.raises(ValueError, match="a static cache with local_window"):
            model.generate(**inputs, max_new_tokens=12, cache_implementation="static")
        return
    both = run_both(lambda: model.generate(**inputs, max_new_tokens=12, cache_implementation="static"))
    plain = model.generate(**inputs, max_new_tokens=12)
    assert torch.equal(both.stock, both.fast) and torch.equal(both.fast, plain)


@KINDS
@VARIANTS
def test_sdpa_and_eager_attention_agree(kind, key_value_heads, window):
    model, inputs = tiny_model(kind, key_value_heads, window), inputs_for(kind)
    if model.config.is_encoder_decoder:
        inputs |= {"decoder_input_ids": token_ids(3, 7)}
    real = inputs["attention_mask"].bool() if not model.config.is_encoder_decoder else torch.ones(3, 7).bool()
    with torch.no_grad():
        fused = model(**inputs).logits[real]
        model.set_attn_implementation("eager")
        plain = model(**inputs, output_attentions=True, output_hidden_states=True)
    torch.testing.assert_close(fused, plain.logits[real], atol=1e-5, rtol=1e-5)
    attentions = plain.decoder_attentions if model.config.is_encoder_decoder else plain.attentions
    states = plain.decoder_hidden_states if model.config.is_encoder_decoder else plain.hidden_states
    assert [weights.shape[1] for weights in attentions] == [4, 4]
    assert len(states) == 3


@KINDS
@pytest.mark.parametrize("checkpointing", (False, True))
def test_the_loss_of_labels_is_the_cross_entropy(kind, checkpointing):
    model = tiny_model(kind, dropout=0.0).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    labels = token_ids(3, 8)
    labels[0, 5:] = -100
    inputs = {"input_ids": token_ids(3, 8)}
    output = model(**inputs, labels=labels)
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    if model.config.is_encoder_decoder:
        start = torch.cat([torch.zeros(3, 1, dtype=torch.long), labels[:, :-1].clamp(min=0)], dim=1)
        logits, targets = model(**inputs, decoder_input_ids=start).logits, labels
    else:
        logits, targets = model(**inputs).logits[:, :-1], labels[:, 1:]
    counted = targets != -100
    torch.testing.assert_close(output.loss, nn.functional.cross_entropy(logits[counted], targets[counted]))


@KINDS
def test_a_saved_model_is_loaded_unchanged(kind, tmp_path):
    model = tiny_model(kind, key_value_heads=2, window=5)
    model.save_pretrained(tmp_path)
    auto = AutoModelForSeq2SeqLM if kind is MQATransformerForConditionalGeneration else AutoModelForCausalLM
    loaded = auto.from_pretrained(tmp_path)
    assert type(loaded) is kind and loaded.config.local_window == 5 and loaded.config.num_key_value_heads == 2
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
    inputs = inputs_for(kind)
    assert torch.equal(model.generate(**inputs, max_new_tokens=9), loaded.generate(**inputs, max_new_tokens=9))
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name])


def test_the_papers_models_have_as_many_parameters():
    """§4.1: 4096 wide with 8 key heads, 5440 with one; 211 million each."""
    with torch.device("meta"):
        multi_head = MQATransformerForConditionalGeneration(MQATransformerConfig(d_ff=4096, num_key_value_heads=8))
        multi_query = MQATransformerForConditionalGeneration(MQATransformerConfig())
    tied = ("lm_head.weight", "embed_tokens.weight")
    counts = [
        sum(weight.numel() for name, weight in model.named_parameters() if not name.endswith(tied))
        for model in (multi_head, multi_query)
    ]
    assert abs(counts[0] - counts[1]) / counts[0] < 0.005
    assert all(abs(count / 211e6 - 1) < 0.02 for count in counts)


def test_too_many_positions_are_refused():
    model = tiny_model(MQATransformerForCausalLM)
    with pytest.raises(ValueError, match=r"65 positions \(max_position_embeddings=64\)"):
        model(token_ids(1, 65), use_cache=False)
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()
