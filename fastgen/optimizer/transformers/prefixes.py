"""Common prefix: the first tokens of all prompts of a batch, computed once and stored once for all rows.

    row 0   | padding | prefix | rest 0 |          row 0   | prefix | padding | rest 0 | generated 0 |
    row 1   |  prefix |     rest 1      |   ──>    row 1   | prefix |     rest 1       | generated 1 |

The prefix goes through the model as one row, and the rests follow in one forward of all rows. In rows with padding on
the left the columns are permuted, so that the prefix is in the same columns of all rows: masks and positions move with
them, and attention does not depend on the order of its keys. Hydragen (arXiv 2402.05099) and ChunkAttention (arXiv
2402.15220) do the same for attention alone.

Tests: tests/optimizer/transformers/test_common_prefixes.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from fastgen.ops.kernel import tolerance
from fastgen.optimizer.decoding.call import GenerateCall
from fastgen.optimizer.decoding.cost_model import CostModel, ModelSize, Work, size_of
from fastgen.optimizer.decoding.model_info import ModelInfo
from fastgen.optimizer.decoding.report import KEPT, PREFIX, Reason, check, that_hold
from fastgen.optimizer.decoding.segmented_kv import KV
from fastgen.optimizer.transformers import kv_layers
from fastgen.optimizer.transformers.checks import KNOWN, CallChecks, HostModel
from fastgen.optimizer.transformers.kept_prefix import PLAIN, PrefixReuse, reuse_of
from fastgen.optimizer.transformers.models import images
from fastgen.optimizer.transformers.row_groups import IMAGES, TOKENIZER

NAN = Reason("NAN", "logits are NaN after a common prefix, and might not be without it")

TOKENS, EMBEDS, MASK, POSITIONS = "input_ids", "inputs_embeds", "attention_mask", "position_ids"
TYPES = "token_type_ids"

# Arguments of a prefill with a value for each column: `[rows, length]`, or `[rows, length, width]`. Positions may have
# one row for all.
COLUMNS = (TOKENS, EMBEDS, MASK, POSITIONS, TYPES)


@dataclass(frozen=True)
class CommonPrefix:
    """The first `length` columns after the padding, which all rows of a prefill have in common.

    padding: int64 `[rows]`, the number of columns to the left of the prefix in each row; None if there are none.
    reused: the number of first columns that an earlier call has kept; reused_layers: at least their keys and values,
    for each layer. head: the number of first columns to keep for the next call, computed in a forward of their own.
    images: the images in the prefix, and those after it.
    """

    length: int
    padding: Tensor | None = None
    reused: int = 0
    reused_layers: Sequence[KV] = ()
    head: int = 0
    images: tuple[dict[str, Any], dict[str, Any]] | None = None

    def of_prefix(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Returns a prefill's arguments for one row that holds the prefix."""
        row = self.of_rests(arguments)
        names = column_names(arguments)
        for name in {TOKENS, *names} & row.keys():
            row[name] = row[name][:1, : self.length if name in names else None]
        return row if self.images is None else row | {IMAGES: self.images[0]}

    def of_rests(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Returns a prefill's arguments for all rows, with the columns ordered so that the prefix comes first."""
        ordered = dict(arguments)
        if self.padding is not None:
            shape = prompt_of(arguments).shape[:2]
            padding = self.padding[:, None]
            columns = torch.arange(shape[1], device=padding.device).expand(shape)
            after_prefix = torch.where(columns < self.length + padding, columns - self.length, columns)
            order = torch.where(columns < self.length, columns + padding, after_prefix)
            for name in column_names(arguments):
                if (value := arguments[name]).shape[:2] == shape:
                    ordered[name] = value.take_along_dim(order[:, :, None] if value.dim() == 3 else order, dim=1)
        return ordered if self.images is None else ordered | {IMAGES: self.images[1]}

    def columns(self, arguments: dict[str, Any]) -> dict[str, Tensor]:
        """Returns the prefix's columns `[1, length, …]` of each argument with columns; no mask if it hides nothing."""
        prefix_arguments = self.of_prefix(arguments)
        columns = {name: prefix_arguments[name] for name in column_names(arguments)}
        if MASK in columns and bool((columns[MASK] == 1).all()):
            del columns[MASK]
        return columns

    def tokens(self, arguments: dict[str, Any]) -> Tensor:
        """Returns the tokens of the prefix, `[length]`; only for prompts without embeddings."""
        start = 0 if self.padding is None else int(self.padding[0])
        return arguments[TOKENS][0, start : start + self.length]


def prompt_of(arguments: dict[str, Any]) -> Tensor:
    """Returns the prompt's tokens `[rows, length]`, or embeddings `[rows, length, width]`."""
    return arguments[TOKENS] if arguments.get(EMBEDS) is None else arguments[EMBEDS]


def options_of(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments that have no columns, without the cache and the tokenizer of stop strings."""
    names = [name for name in arguments if name not in COLUMNS and name != TOKENIZER]
    return {name: arguments[name] for name in names if not isinstance(arguments[name], Cache)}


def column_names(arguments: dict[str, Any]) -> list[str]:
    """Returns the names of arguments with a value for each column of the prompt; not tokens if there are embeddings."""
    names = [name for name in COLUMNS if arguments.get(name) is not None]
    return names[1:] if EMBEDS in names and names[0] == TOKENS else names


def forward_of_prefix(costs: CostModel, size: ModelSize) -> tuple[Work, Work]:
    """Returns what an additional forward for a common prefix takes, whatever it saves."""
    return costs.overhead_of_prefill_once(size), size.step(1)


def common_prefix_sync(checks: CallChecks, arguments: dict[str, Any], generation_config: Any) -> CommonPrefix | None:
    """Returns the common prefix of a prefill's rows if computing it once, or not at all, gains something.

    It excludes the last column of each row, whose logits are needed. Adds to the report why a prefix is not used. Reads
    the device.
    """
    call = checks.call
    model = checks.model
    rows, length = prompt_of(arguments).shape[:2]
    size = size_of(model, KNOWN)
    costs = call.costs
    reuse = reuse_of(model)

    def gains(tokens: int) -> bool:
        return tokens > 0 and costs.pays(size.tokens(tokens), *forward_of_prefix(costs, size))

    if reuse is None and not gains((rows - 1) * (length - 1)):
        return None
    prefix = longest_sync(arguments, model.config)
    if prefix.length < 2:  # one token may just be the one that begins texts
        return None
    if reuse is not None:
        prefix = _with_reused_sync(call, model, reuse, prefix, arguments, gains)
    stored_length = max(prefix.reused, prefix.head)
    tokens = (rows - 1) * (prefix.length - stored_length)
    if not gains(tokens):
        if not stored_length:
            detail = f"{prefix.length} tokens of all inputs, {tokens} need not be computed"
            call.report.add_reasons(PREFIX, [Reason("PREFIX_SHORT", "too short to gain", detail)] if rows > 1 else [])
            return None
        prefix = replace(prefix, length=stored_length)
    if arguments.get(IMAGES):
        split = images.split_sync(arguments, model.config, prefix.tokens(arguments))
        prefix = replace(prefix, images=split)
    reasons = unsupported_reasons(checks, arguments, generation_config, prefix)
    call.report.add_reasons(PREFIX, reasons)
    return None if reasons else prefix


def _with_reused_sync(
    call: GenerateCall,
    model: HostModel,
    reuse: PrefixReuse,
    longest: CommonPrefix,
    arguments: dict[str, Any],
    gains: Callable[[int], bool],
) -> CommonPrefix:
    """Adds to the longest common prefix what earlier calls have kept of it, and how much of it must be kept.

    gains: returns whether saving a number of tokens is worth a forward of their own.
    """
    rows = len(prompt_of(arguments))
    wanted = longest.length
    if reuse.head is not None:
        wanted = reuse.head if reuse.head <= longest.length else 0
    reused = 0
    layers = list[KV]()
    if wanted > 1:
        columns = replace(longest, length=wanted).columns(arguments)
        reused, layers = reuse.match_sync(call, model, columns, options_of(arguments))
    head = wanted if reuse.head is not None and gains(rows * wanted) else 0
    if reuse.stored is not None and not gains(rows * reused):
        detail = f"{reused} of {wanted} tokens were kept"
        call.report.add_reasons(KEPT, [Reason("PREFIX_SHORT", "too short to gain", detail)])
    reused = reused if reused > 1 and gains(rows * reused) and head in (0, reused) else 0
    return replace(longest, reused=reused, reused_layers=layers, head=head)


def fill_sync(
    call: GenerateCall,
    model: HostModel,
    forward: Callable[[dict[str, Any]], Any],
    prefix: CommonPrefix,
    arguments: dict[str, Any],
) -> None:
    """Fills the empty cache among a prefill's arguments with the prefix, for one row: kept columns, then the rest."""
    cache: Any = kv_layers.cache_of(arguments)
    reuse = reuse_of(model)
    filled = prefix.reused
    for index, (keys, values) in enumerate(prefix.reused_layers if filled else ()):
        cache.update(keys[:, :, :filled], values[:, :, :filled], index)
    for part in (replace(prefix, length=prefix.head), prefix) if prefix.head else (prefix,):
        if filled >= part.length:
            continue
        part_arguments = part.of_prefix(arguments)
        if filled and part_arguments.get(MASK) is None:  # the library derives from it which columns are new
            part_arguments[MASK] = prompt_of(part_arguments).new_ones(1, part.length, dtype=torch.int64)
        forward(part_arguments)
        filled = part.length
        if reuse is not None and filled == (reuse.head or filled):
            reuse.keep(call, model, part.columns(arguments), options_of(arguments), cache)


def keep_prompt_sync(call: GenerateCall, model: HostModel, arguments: dict[str, Any], outputs: dict[str, Any]) -> None:
    """Keeps the whole prompt of a prefill with one row for the next call, inside `reusing_prefix`."""
    reuse = None if model.config.is_encoder_decoder else reuse_of(model)
    if reuse is None or reuse.head is not None or _have_other_shapes(arguments, moves=True):
        return
    columns = CommonPrefix(prompt_of(arguments).shape[1]).columns(arguments)
    if MASK not in columns:
        cache = kv_layers.cache_of(outputs) or kv_layers.cache_of(arguments)
        reuse.keep(call, model, columns, options_of(arguments), cache)


@check(PREFIX)
def model_reasons(
    facts: ModelInfo, forward: Callable[[dict[str, Any]], Any], prefix: CommonPrefix, arguments: dict[str, Any]
) -> list[Reason]:
    """Returns why this model cannot compute a prefix separately from the rest, tried once for each token type.

    Encoders used as decoders cannot, nor can models with bidirectional attention in prompts or between tokens of a
    type, or that count columns, if padding follows the prefix. forward: runs a prefill, which fills the empty cache
    among the arguments, and returns its outputs; the cache is empty again afterwards.
    """
    if facts.coupled is not None:
        return [Reason("ROWS_COUPLED", facts.coupled)]
    types = arguments.get(TYPES)
    for kind in [None] if types is None else types.unique().tolist():
        key = PREFIX, kind, prefix.padding is not None
        if key not in facts.proofs:
            facts.proofs[key] = _trial_reasons_sync(facts, forward, *_trial_of(prefix, arguments, kind))
        if reasons := facts.proofs[key]:
            return reasons
    return []


def without_cached_columns(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns a prefill's arguments without the columns that its cache has, as the library's `_prefill` passes them."""
    cache: Any = kv_layers.cache_of(arguments)
    cached = cache.get_seq_length()
    new = {name: arguments[name][:, cached:] for name in column_names(arguments) if name != MASK}
    return arguments | new


# Columns of padding in a trial: with this number, models that count columns are seen in half precision, too. The logits
# of twelve such models differ by 3 to 70 %, those of 80 other models by 0.4 % in bf16 and 4e-7 in fp32.
PADDING = 16


def _trial_of(prefix: CommonPrefix, arguments: dict[str, Any], kind: int | None) -> tuple[CommonPrefix, dict[str, Any]]:
    """Returns a prefix of two columns, and a prefill's arguments for two rows that have it in common.

    If the real rows have padding, a third row begins with `PADDING` columns of it. kind: the type of all tokens.
    """
    rows = replace(prefix, length=2, images=None).of_prefix(arguments)
    rows.pop(IMAGES, None)
    if rows.get(MASK) is None:  # the library derives from it which columns are new
        rows[MASK] = prompt_of(rows).new_ones(1, 2, dtype=torch.int64)
    names = column_names(rows)
    padding = 0 if prefix.padding is None else PADDING
    for name in names:
        pair = other = rows[name]
        if name == names[0]:
            other = pair + 1 if name == EMBEDS else torch.where(pair > 0, pair - 1, 1)
        parts = 1 + padding // 4
        first, second = (torch.cat([pair, *rest * parts], dim=1) for rest in ([other, pair], [pair, other]))
        if name == POSITIONS:
            first = second = pair[:, :1] + torch.arange(first.shape[1], device=pair.device)
        rows[name] = torch.cat([first, second])
        if prefix.padding is not None:
            hidden = arguments[name][int(prefix.padding.argmax()), None, :1]
            rows[name] = torch.cat([rows[name], torch.cat([*[hidden] * padding, second[:, :6]], dim=1)])
    if kind is not None:
        rows[TYPES] = torch.full_like(rows[TYPES], kind)
    if TOKENS not in names:
        rows[TOKENS] = rows[TOKENS].expand(len(rows[MASK]), -1)
    device = rows[MASK].device
    return CommonPrefix(2, torch.tensor([0, 0, padding], device=device) if padding else None), rows


@check(PREFIX)
def _trial_reasons_sync(
    facts: ModelInfo, forward: Callable[[dict[str, Any]], Any], prefix: CommonPrefix, arguments: dict[str, Any]
) -> list[Reason]:
    """Returns what differs if a prefill of `_trial_of` is computed for its prefix first, and then for the rests."""
    cache: Any = kv_layers.cache_of(arguments)
    with kv_layers.rollback_of(cache, facts.modules.values()):
        expected = forward(dict(arguments)).logits[:, -1]
        if not cache.layers or not all(layer.is_initialized for layer in cache.layers):
            return [Reason("NO_CACHE", "the model fills no cache")]
        if cache.get_seq_length() != prompt_of(arguments).shape[1]:
            return [Reason("VIRTUAL_TOKENS", "the model puts tokens of its own before the prompt")]
        states = (states[:2, :, :2] for layer in cache.layers for states in (layer.keys, layer.values))
        is_causal = all(torch.allclose(*rows, atol=1e-5, equal_nan=True) for rows in states)
    if not is_causal:
        return [Reason("NOT_CAUSAL", "keys and values of a token depend on later tokens")]
    try:
        with kv_layers.rollback_of(cache, facts.modules.values()):
            forward(prefix.of_prefix(arguments))
            cache.batch_repeat_interleave(len(expected))
            logits = forward(prefix.of_rests(arguments)).logits[:, -1]
    except Exception as error:
        text = f"a forward of several tokens with a filled cache raises {type(error).__name__}: {error}"
        return [Reason("CACHE_NOT_EMPTY", text)]
    if logits.isnan().any():  # torch hides NaN among few keys without a mask
        return [NAN]
    differences, sizes = (tensor.float().norm(dim=-1) for tensor in (logits - expected, expected))
    differ = (differences > tolerance("prefix", logits.dtype) * sizes).tolist()
    return that_hold(
        ("NOT_CAUSAL", "a forward that continues from a prefix gives other logits", any(differ[:2])),
        ("POSITIONS", "logits depend on the column of a token, not on its position and the mask alone", any(differ)),
    )


@check(PREFIX)
def unsupported_reasons(
    checks: CallChecks, arguments: dict[str, Any], generation_config: Any, prefix: CommonPrefix
) -> list[Reason]:
    """Returns why this prefix cannot be computed separately; empty if it can."""
    config = checks.model.config
    moves = prefix.padding is not None
    generated = generation_config.max_length or 0
    most = prompt_of(arguments).shape[1] + generated - arguments[TOKENS].shape[1]  # max_length counts no embeddings
    outputs = ("output_attentions", "output_hidden_states")
    full_outputs = [name for name in outputs if arguments.get(name) or getattr(config, name, False)]
    are_joined = prefix.images is not None and not images.can_split_sync(arguments, config)
    foreign = [name for name, value in options_of(arguments).items() if name != IMAGES and not isinstance(value, PLAIN)]
    foreign = foreign or _have_other_shapes(arguments, moves)
    would_show = moves and (generation_config.return_dict_in_generate or checks.call.host.user_cache)
    return that_hold(
        checks.prefix(kv_layers.cache_of(arguments), most, moves),
        ("CHUNKED_PREFILL", "prefill_chunk_size is set", generation_config.prefill_chunk_size is not None),
        ("OUTPUTS", "{} is set, which are those of all columns", full_outputs[:1]),
        ("IMAGES", "the features of images are not known to be those of the prompt's columns", are_joined),
        ("ARGUMENT_COLUMNS", "argument {}: its columns are not known", foreign[:1]),
        ("RETURN_DICT", "the cache that the caller gets would hold padding in other columns", would_show),
    )


def _have_other_shapes(arguments: dict[str, Any], moves: bool) -> list[str]:
    """Returns the arguments with columns that are not `[rows, length]`: M-RoPE has positions on several axes."""
    rows, length = prompt_of(arguments).shape[:2]
    names = []
    for name in column_names(arguments):
        shapes = [(rows, length)] if moves or name != POSITIONS else [(rows, length), (1, length)]
        if arguments[name].shape[:2] not in shapes or arguments[name].dim() != (3 if name == EMBEDS else 2):
            names.append(name)
    return names


def longest_sync(arguments: dict[str, Any], config: Any) -> CommonPrefix:
    """Returns the longest common prefix of the visible columns; its length is 0 if there is none."""
    prompt = prompt_of(arguments)
    mask = arguments.get(MASK)
    most = prompt.shape[1] - 1
    padding = None
    if mask is not None and mask.shape == prompt.shape[:2]:
        padding = (mask != 0).long().argmax(dim=1)
        largest = int(padding.max())
        most -= largest
        padding = padding if largest else None
    if most < 1:
        return CommonPrefix(0, padding)
    ordered = CommonPrefix(most, padding).of_rests(arguments)
    equal = torch.ones(most, dtype=torch.bool, device=prompt.device)
    for name in column_names(arguments):
        if (value := ordered[name]).shape[:2] == prompt.shape[:2]:
            equal &= (value[1:, :most] == value[:1, :most]).transpose(0, 1).flatten(1).all(dim=1)
            equal &= name != MASK or value[0, :most] != 0
    prefix = CommonPrefix(int(equal.long().cumprod(dim=0).sum()), padding)
    if not arguments.get(IMAGES):
        return prefix
    return replace(prefix, length=images.common_length_sync(arguments, config, prefix.tokens(arguments)))
