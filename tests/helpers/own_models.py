"""Small models of user code: an attention that each test chooses, or a preparation of inputs of their own."""

from types import MethodType

import torch
from architectures import SPECIAL, VOCABULARY
from peft import PrefixTuningConfig, get_peft_model
from tiny_models import lively, tiny
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from fastgen.models.cache_names import CACHE

HEADS, KV_HEADS, WIDTH, HIDDEN = 4, 2, 8, 32


class OddConfig(PretrainedConfig):
    model_type = "odd"

    def __init__(self, **kwargs):
        super().__init__(**SPECIAL | kwargs)
        self.vocab_size, self.hidden_size, self.num_hidden_layers = VOCABULARY, HIDDEN, 2
        self.num_attention_heads = HEADS


class OddModel(PreTrainedModel, GenerationMixin):
    """Two layers of attention without positions; a test passes `attend(query, keys, values, mask)`."""

    config_class = OddConfig
    _supports_sdpa = True

    def __init__(self, config: OddConfig, attend=None) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.query = nn.ModuleList(nn.Linear(HIDDEN, HEADS * WIDTH) for _ in range(2))
        self.key_value = nn.ModuleList(nn.Linear(HIDDEN, 2 * KV_HEADS * WIDTH) for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.attend = attend
        self.post_init()

    def forward(self, input_ids, attention_mask=None, use_cache=None, **kwargs):
        cache = kwargs.get(CACHE)
        hidden_states = self.embed(input_ids)  # [rows, length, hidden]
        rows, length = input_ids.shape
        for index in range(2):
            query = self.query[index](hidden_states).view(rows, length, HEADS, WIDTH).transpose(1, 2)
            both = self.key_value[index](hidden_states).view(rows, length, 2 * KV_HEADS, WIDTH).transpose(1, 2)
            keys, values = both.chunk(2, dim=1)
            if cache is not None:
                keys, values = cache.update(keys, values, index)
            total = keys.shape[2]
            mask = torch.ones(length, total, dtype=torch.bool).tril(total - length)
            if attention_mask is not None:
                mask = mask & attention_mask[:, None, None, :total].bool()  # [rows, 1, length, total]
            mask = torch.where(mask, 0.0, -1e9).to(query.dtype)
            attended = self.attend(query, keys, values, mask)
            hidden_states = hidden_states + attended.transpose(1, 2).reshape(rows, length, HIDDEN)
        return CausalLMOutputWithPast(logits=self.head(hidden_states), **{CACHE: cache})


def weigh(scores: Tensor, mask: Tensor) -> Tensor:
    return (scores * WIDTH**-0.5 + mask).softmax(dim=-1)


def repeated(states: Tensor) -> Tensor:
    return states.repeat_interleave(HEADS // KV_HEADS, dim=1)


def odd_model(attend, base: type[OddModel] = OddModel) -> OddModel:
    own_class = type(base.__name__, (base,), {})  # each class is verified once
    return lively(own_class(OddConfig(), attend)).eval()


def by_products(query, keys, values, mask):
    return weigh(query @ repeated(keys).transpose(2, 3), mask) @ repeated(values)


def by_einsum(query, keys, values, mask):
    weights = weigh(torch.einsum("bhqd,bhkd->bhqk", query, repeated(keys)), mask)
    return torch.einsum("bhqk,bhkd->bhqd", weights, repeated(values))


def by_sliced_keys(query, keys, values, mask):
    keys, values = keys[:, :, -4:], values[..., -4:, :]
    return weigh(query @ repeated(keys).mT, mask[..., -4:]) @ repeated(values)


def by_key_order(query, keys, values, mask):
    order = keys.norm(dim=-1, keepdim=True).argsort(dim=2)  # [rows, kv_heads, length, 1]
    keys, values = torch.take_along_dim(keys, order, 2), values.gather(2, order.expand(-1, -1, -1, WIDTH))
    mask = torch.take_along_dim(mask.expand(-1, KV_HEADS, -1, -1), order.transpose(2, 3), 3)
    return weigh(query @ repeated(keys).mT, repeated(mask)) @ repeated(values)


def by_rows_of_numpy(query, keys, values, mask):
    keys, values = (torch.tensor(states.detach().numpy().tolist()) for states in (keys, values))
    return weigh(query @ repeated(keys).mT, mask) @ repeated(values)


# Uses of keys that no library model has.
ODD = (by_einsum, by_sliced_keys, by_key_order, by_rows_of_numpy)


def preparing_model(name: str) -> nn.Module:
    """Returns a tiny model that prepares the inputs of a step itself.

    llama-prefix: PEFT's prefix tuning. llama-counting: by a method of the program, which changes tokens by the number
    of steps so far. phi3-short: drops its cache at the 13th token.
    """
    if name == "phi3-short":
        return tiny("phi3", original_max_position_embeddings=12)
    model = tiny("llama")
    if name == "llama-prefix":
        return get_peft_model(model, PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")).eval()
    model.prepare_inputs_for_generation = MethodType(_counting_steps, model)
    return model


def _counting_steps(self, input_ids, is_first_iteration=False, **kwargs):
    kind = type(self)
    inputs = kind.prepare_inputs_for_generation(self, input_ids, is_first_iteration=is_first_iteration, **kwargs)
    self.steps = 0 if is_first_iteration else self.steps + 1
    if not is_first_iteration:
        inputs["input_ids"] = (inputs["input_ids"] + self.steps // 4) % VOCABULARY
    return inputs
