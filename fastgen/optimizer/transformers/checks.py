"""`CallChecks` decides whether a call of transformers, or a part of it, is left to the library.

Each part of a call has tables of reasons: code, text and condition. fastgen does the part if no condition holds. To add
a reason, add a row. `check` registers the parts that a table is for. fastgen/reasons.py explains the codes.

Before any of these, the patch of `generate` switches fastgen off for tiny calls, and first_use.py for code that no test
has seen. Whether a part is worthwhile is decided first, by the seconds of the `CostModel`. row_groups.py finds reasons
in arguments, and kv_layers.py reasons in caches, for these tables; prefixes.py and `captures.can_capture` have tables
of their own.

Tests: tests/optimizer/transformers/test_replaced_code.py, tests/optimizer/transformers/test_training_mode.py,
tests/optimizer/transformers/test_captured_steps.py, tests/optimizer/transformers/test_replaced_loop.py,
tests/optimizer/transformers/test_generate_threads.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, KeysView, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import filterfalse
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastgen.ops.tracing import is_watched, replaced_functions
from fastgen.optimizer import PATCH_SET
from fastgen.optimizer.decoding import call as decoding_call
from fastgen.optimizer.decoding import report
from fastgen.optimizer.decoding.call import GenerateCall
from fastgen.optimizer.decoding.guards import KnownCode, is_user_code
from fastgen.optimizer.decoding.model_info import FEWER_ROWS, ModelInfo, named
from fastgen.optimizer.decoding.report import MODES, NOT_EMPTY, Reason, Report, check, that_hold
from fastgen.optimizer.decoding.static_kv_cache import MOST_TOKENS
from fastgen.optimizer.transformers import compat, kv_layers, processors, row_groups
from fastgen.optimizer.transformers.row_groups import RowGroups
from fastgen.provenance import PYTHON, comes_with, packages_of

# A model of the library, or of another class with the library's `generate`.
HostModel: TypeAlias = GenerationMixin

_REGISTRIES = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS, compat.EXPERTS_FUNCTIONS)
_REGISTERED_AS = ("_attn_implementation", "_experts_implementation")


def _registered(modules: Iterable[nn.Module]) -> dict[str, Callable[[], Any]]:
    """Returns readers of the functions that modules find by name: attention, masks, experts."""
    configs = {id(config): config for module in modules if (config := vars(module).get("config")) is not None}
    names = {str(getattr(config, name, None)) for config in configs.values() for name in _REGISTERED_AS}
    return {
        f"{type(functions).__name__}.{name}": partial(functions.get, name)
        for functions in _REGISTRIES
        for name in sorted(names)
    }


def _encoder_of(model: nn.Module) -> nn.Module | None:
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return model.get_encoder() if is_encoder_decoder and hasattr(model, "get_encoder") else None


KNOWN = KnownCode(
    # Packages whose modules and forwards treat every row alike, and those that the library itself calls.
    packages=PYTHON | {
        "transformers", "torch", "torchvision", "torchaudio", "timm", "peft", "accelerate", "bitsandbytes", "torchao",
        "optimum", "hqq", "gptqmodel", "auto_gptq", "awq", "kernels", "liger_kernel", "trl", "fastgen", "numpy",
        "einops", "flash_attn", "causal_conv1d", "mamba_ssm", "deepspeed", "huggingface_hub", "packaging",
        "safetensors", "scipy", "tokenizers",
    },
    # Hooks for captured outputs, weight norms, pruning and moves to a device, and partials of these.
    hooks=frozenset({"transformers", "torch", "accelerate", "functools", "trl"}),
    files=(
        "transformers.activations", "transformers.cache_utils", "transformers.generation.utils",
        "transformers.integrations.moe",
        "transformers.integrations.sdpa_attention", "transformers.masking_utils", "transformers.modeling_layers",
        "transformers.modeling_rope_utils", "transformers.modeling_utils", "transformers.pytorch_utils",
        "transformers.utils.generic", "transformers.utils.output_capturing", "torch", "torch.nn.functional",
    ),
    registered=_registered,
    encoder_of=_encoder_of,
    not_of_a_step=frozenset({"generation_config"}),
)  # fmt: skip


def is_foreign(model: object) -> bool:
    """Whether the class of this model is not the library's: `first_use` compares such models.

    torch makes classes of sharded models.
    """
    return not packages_of(type(model)) <= {"transformers", "fastgen", "torch"}


@dataclass
class TransformersCall:
    """The part of a `GenerateCall` that only transformers' patches read and write.

    user_cache: whether the caller passed a cache. user_code: whether code that is not the host's uses the cache.
    custom_generate: whether that is a loop that the caller passed. has_callbacks: whether the caller passed objects
    that are called between steps, which may change the model. source: the token ids of an encoder's input, `[inputs,
    length]`, or None. beam_scores: the scores of beam search's best hypotheses, `[inputs, num_beams]`, the best first.
    encoded: see `models/seamless.py`. accepted: by model, the classes of its modules by which the call is fastgen's.
    """

    user_cache: bool = False
    user_code: bool = False
    custom_generate: bool = False
    has_callbacks: bool = False
    source: Tensor | None = None
    beam_scores: Tensor | None = None
    encoded: list[Any] = field(default_factory=list)
    accepted: dict[Any, KeysView[type]] = field(default_factory=dict)


def generate_call(model: Any, has_stages: bool = False, has_steps: bool = True) -> GenerateCall:
    """Returns a context in which `current_call()` is a new call of this model's `generate`."""
    return GenerateCall(Report(type(model).__name__, has_steps=has_steps), TransformersCall(), has_stages=has_stages)


def current_call() -> GenerateCall | None:
    """Returns the innermost running call, or None outside of calls and in a call of another host."""
    call = decoding_call.current_call()
    return call if call is not None and isinstance(call.host, TransformersCall) else None


# What fastgen's loops replace without calling it: patches, methods, and criteria that depend on each row alone.
LOOPS = ("transformers.sample", "transformers.beam_search")
METHODS = ("_has_unfinished_sequences",)
# The methods that give a forward its inputs.
INPUTS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")


class EndsEarly(MaxLengthCriteria):
    """Ends a call before the length that its caller has set."""


CRITERIA = {EosTokenCriteria, MaxLengthCriteria, EndsEarly}

# Outputs of the library's loops that fastgen's do not collect.
INNER_OUTPUTS = ("output_attentions", "output_hidden_states")

READ = "user code in each step may read the caller's cache"
REORDERS = "the model reorders its cache itself"
STOPS_OTHERWISE = "a stopping criterion other than length and end tokens"

# In the names of types of rotary positions that are scaled by the longest prompt so far.
_GROWING_ROPE = ("dynamic", "longrope")


class LoopArguments(NamedTuple):
    """The arguments of one of the library's loops. methods: the methods of that loop that fastgen's replaces."""

    input_ids: Tensor
    logits_processor: Any
    stopping_criteria: Any
    generation_config: Any
    synced_gpus: bool
    model_kwargs: dict[str, Any]
    streamer: Any = None
    methods: tuple[str, ...] = ()


class CallChecks:
    """The reasons why parts of a call are left to the library: a table for each part, in which no reason may hold.

    arguments: those of the loop; without them only the reasons in the model, and those of a prefill, are available.
    """

    known_code = KNOWN

    def __init__(self, call: GenerateCall, model: Any, arguments: Any = None) -> None:
        self.call, self.model, self.decoder = call, model, model
        self.arguments: LoopArguments = arguments
        self._rows: tuple[ModelInfo | None, list[Reason]] = None, []

    @cached_property
    def runs_user_code(self) -> bool:
        """Whether the loop calls user code in each step."""
        _, processors, criteria, *_ = self.arguments
        streamers = [] if self.arguments.streamer is None else [self.arguments.streamer]
        return is_user_code([*processors, *criteria, *streamers], KNOWN.packages)

    @property
    def _cache_is_read(self) -> bool:
        return bool(self.call.host.user_cache and self.runs_user_code)

    @property
    def rows(self) -> list[Reason]:
        """The reasons in the model and its surroundings why rows may depend on each other, or on their number.

        If there are none, a forward of some rows gives the same as a forward of all rows. The table is evaluated again
        if the model has changed.
        """
        facts = self.call.facts_of(self.model, KNOWN)
        if self._rows[0] is not facts:
            self._rows = facts, self._row_reasons(facts)
        return self._rows[1] + facts.proofs.get(FEWER_ROWS, [])

    @check(report.PREFILL, report.STEPS, report.COMPACTION, report.DRAFTS)
    def _row_reasons(self, facts: ModelInfo) -> list[Reason]:
        kind = self.model.config.model_type
        switched_on = [] if facts.training is None else [facts.training]
        if not switched_on and (name := facts.foreign_in_training) is not None:
            switched_on = [f"{named(name)}, of a class that is not the library's, is in training mode"]
        # Models of users' classes are compared at their first use.
        user_code = [what for _, what in facts.replaced] if is_foreign(self.model) else facts.user_code
        hooks = [facts.hooks[0][1]] if facts.hooks else []
        compiled = [named(facts.compiled[0])] if facts.compiled else []
        has_new_classes = self.call.host.accepted.get(self.model, facts.kinds.keys()) != facts.kinds.keys()
        return that_hold(
            ("GRADIENTS", "autograd records, but shared caches are written in place", torch.is_grad_enabled()),
            ("TRAINING", "{}", switched_on),
            ("HOOKS", "the model has a forward hook, which would see fewer rows: {}", hooks),
            ("TORCH_MODE", MODES, _is_in_mode()),
            ("USER_CODE", "{} is not the library's, and may treat rows differently", user_code[:1]),
            ("COMPILED", "{} is compiled", compiled),
            ("UNVERIFIED", "modules have other classes than in the last call", has_new_classes),
            ("ROWS_COUPLED", f"{kind}: {compat.COUPLED_ROWS.get(kind)}", kind in compat.COUPLED_ROWS),
        )

    @check(report.PREFILL, report.COMPACTION)
    def row_states(self, sizes: set[int], previous: dict[tuple[int, str], Tensor] | None = None) -> list[Reason]:
        """Returns the reason, if any, that modules hold states of the rows: tensors as long as one of `sizes`.

        Some models store such states (RecurrentGemma's recurrent states, the rope_deltas of Qwen2-VL). previous:
        tensors that they held earlier (`ModelInfo.row_tensors`), which are ignored.
        """
        names = set()
        for key, value in self.call.facts_of(self.model, KNOWN).row_tensors().items():
            if (previous is None or previous.get(key) is not value) and sizes.intersection(value.shape[:2]):
                names.add(key[1])
        return that_hold(("MODEL_STATE", "the model keeps states of its rows in {}", sorted(names)))

    @check(report.PREFILL)
    def prefill_sync(self, arguments: dict[str, Any], generation_config: Any, groups: RowGroups) -> list[Reason]:
        """Returns why a prefill must run with all rows instead of one of each group. May read the device."""
        cache = kv_layers.cache_of(arguments)
        cache_reasons = []
        is_filled = kv_layers.is_filled(cache)
        if kv_layers.is_static(cache) and self.call.host.user_cache:
            cache_reasons = [Reason("USER_CACHE", "the caller passed a StaticCache")]
        elif kv_layers.is_static(cache):
            cache_reasons = _static_cache_reasons(cache, generation_config)
        elif is_filled:
            cache_reasons = kv_layers.unsupported_contents(cache, groups.rows)
        elif cache is not None:
            cache_reasons = kv_layers.unsupported_types(cache)
        elif arguments.get("use_cache", True) and not getattr(self.model, "_supports_default_dynamic_cache", bool)():
            cache_reasons = [Reason("MODEL_CACHE", "the model makes its own cache")]
        argument_reasons = row_groups.unsupported_reasons(self.model.config.model_type, arguments, groups.rows)
        reasons = self.rows + cache_reasons + argument_reasons
        differ = not (reasons or groups.are_equal or row_groups.groups_are_equal_sync(arguments, groups))
        if is_filled and not (differ or reasons):
            differ = not kv_layers.rows_are_equal_sync(cache, groups.firsts, groups.group_of_row)
        return [Reason("ROWS_DIFFER", "the rows of an input differ from each other")] if differ else reasons

    @check(report.PREFIX)
    def prefix(self, cache: Any, most: int, moves_columns: bool) -> list[Reason]:
        """Returns why a forward cannot continue from a common prefix in this cache, for up to `most` positions.

        moves_columns: whether the columns of a row are permuted.
        """
        kind = self.model.config.model_type
        is_old = not compat.LAYERS_ARE_KNOWN
        has_layers = cache is not None and not kv_layers.is_static(cache)
        counted = compat.COUNTED_COLUMNS.get(kind)
        return that_hold(
            ("TRANSFORMERS_VERSION", "transformers before 5.17 continues from a cache in another way", is_old),
            self._attention_reasons,
            ("CACHE_TYPE", "there is no DynamicCache", not has_layers),
            kv_layers.layer_reasons(cache) or kv_layers.window_reasons(cache, most) if has_layers else [],
            self._growing_positions,
            ("POSITIONS", f"{kind}: {counted}", moves_columns and counted is not None),
        )

    @property
    @check(report.STEPS, report.DRAFTS, report.COMPACTION)
    def _coupled_products(self) -> list[Reason]:
        """Products with one scale for all numbers of a forward round one way or the other after any other rounding."""
        coupled = self.call.facts_of(self.model, KNOWN).coupled
        return that_hold(("ROWS_COUPLED", f"{coupled}", coupled is not None))

    @property
    @check(report.PREFIX, report.STEPS, report.DRAFTS)
    def _attention_reasons(self) -> list[Reason]:
        attention = getattr(self.model.config, "_attn_implementation", None)
        is_other = attention not in ("sdpa", "eager")
        return that_hold(("ATTENTION", f"attention {attention} (supported: sdpa, eager)", is_other))

    @check(report.DRAFTS)
    def window_reasons(self, most: int) -> list[Reason]:
        """Returns why masks of `most` positions hide the first ones: of a window, whatever the layers of the cache.

        A window of 0 is none: so Qwen's configurations write that no layer slides.
        """
        text: Any = self.model.config.get_text_config(decoder=True)
        windows = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
        crossed = [window for window in windows if isinstance(window, int) and 0 < window <= most]
        return that_hold(("SLIDING_WINDOW", f"a sliding window of {{}} for up to {most} positions", crossed[:1]))

    @cached_property
    @check(report.PREFIX, report.DRAFTS)
    def _growing_positions(self) -> list[Reason]:
        text: Any = self.model.config.get_text_config(decoder=True)
        ropes = getattr(text, "rope_parameters", None)  # for all layers, or for each type of layer
        ropes = [ropes, *ropes.values()] if isinstance(ropes, dict) else []
        kinds = {str(rope.get("rope_type")) for rope in ropes if isinstance(rope, dict)}
        text = "rope_type {}: positions depend on the length of the prompt"
        growing = sorted(kind for kind in kinds if any(name in kind for name in _GROWING_ROPE))
        return that_hold(("POSITIONS", text, growing[:1]))

    @cached_property
    @check(report.LOOP)
    def settings(self) -> list[Reason]:
        """The reasons in the caller's settings why the library's loop must run; checked before everything else."""
        arguments = self.arguments
        config = self.arguments.generation_config
        is_beam_search = bool(arguments.methods)
        return that_hold(
            ("COMPILED", "compile_config is set", config.compile_config is not None and not is_beam_search),
            ("LOW_MEMORY", "low_memory is set", config.low_memory and is_beam_search),
        )

    @cached_property
    @check(report.LOOP)
    def loop(self) -> list[Reason]:
        """The reasons why fastgen's loop cannot replace the library's."""
        call = self.call
        arguments = self.arguments
        config = self.arguments.generation_config
        lists = arguments.logits_processor, arguments.stopping_criteria
        cache = kv_layers.cache_of(arguments.model_kwargs)
        loops = list(filterfalse(PATCH_SET.direct.__contains__, LOOPS))
        methods = (*METHODS, *arguments.methods)
        replaced = [name for name in methods if not comes_with(getattr(self.model, name, None), GenerationMixin)]
        calls = [type(items).__name__ for items in lists if not _runs_library_code(items)]
        is_own_call = "__call__" in vars(self.model)
        is_assistant = getattr(config, "is_assistant", False)
        inner = [name for name in INNER_OUTPUTS if config.return_dict_in_generate and getattr(config, name)]
        is_old = not compat.STEPS_ARE_KNOWN
        return that_hold(
            ("METHOD_REPLACED", "{}: another loop was there before fastgen", loops),
            ("METHOD_REPLACED", "{} is not that of GenerationMixin", replaced),
            ("METHOD_REPLACED", "__call__ of this model: some loops of the library call it", is_own_call),
            ("METHOD_REPLACED", "{}.__call__ is not that of transformers", calls),
            ("FUNCTION_REPLACED", "{} is not that of torch", replaced_functions()),
            ("TORCH_MODE", MODES, _is_in_mode()),
            [] if cache is None else kv_layers.unsupported_types(cache),
            ("CUSTOM_GENERATE", "custom_generate may read the cache", call.host.custom_generate),
            ("TRANSFORMERS_VERSION", "transformers before 5.3 prepares its steps in another way", is_old),
            ("SYNCED_GPUS", "synced_gpus is set", arguments.synced_gpus),
            ("OUTPUTS", "{} is set", inner),
            ("ASSISTANT", "the model is the assistant of another", is_assistant),
        )

    @cached_property
    def stops_by_row(self) -> bool:
        """Whether all stopping criteria look at each row alone: length and end tokens."""
        criteria = self.arguments.stopping_criteria
        return CRITERIA.issuperset(map(type, criteria)) and all(map(_runs_library_code, criteria))

    @check(report.DRAFTS)
    def drafts(self, most: int) -> list[Reason]:
        """Returns why a step has one token: a forward of several might not give the same as several forwards.

        most: the most positions that the cache can have when the loop ends.
        """
        cache = kv_layers.cache_of(self.arguments.model_kwargs)
        capacity = getattr(self.model.config, "expert_capacity", None)
        has_few = capacity is not None and capacity < MOST_TOKENS
        prepares = [name for name in INPUTS if not self._is_read(name)]
        return that_hold(
            self._attention_reasons,
            ("PREPARES_INPUTS", "{} is not GenerationMixin's: it may prepare several tokens differently", prepares),
            ("TOKENS_COUPLED", f"an expert takes at most {capacity} tokens of a row", has_few),
            self._coupled_products,
            ("CACHE_TYPE", "there is no DynamicCache", cache is None or kv_layers.is_static(cache)),
            [] if cache is None else kv_layers.unsupported_types(cache) or kv_layers.layer_reasons(cache),
            self.window_reasons(most),
            self._growing_positions,
            self._table_reasons(most),
            ("USER_CACHE", READ, self._cache_is_read),
            self.rows,
        )

    @check(report.STEPS, report.DRAFTS)
    def _table_reasons(self, most: int) -> list[Reason]:
        """Returns the reason that a table of positions may have to grow: M2M100's does in the forward that needs it."""
        embedding: Any = getattr(self.model.get_decoder(), "embed_positions", None)
        table = getattr(embedding, "weights", None)
        positions = len(table) if isinstance(table, Tensor) else None
        is_short = positions is not None and most + embedding.padding_idx + 1 > positions
        return that_hold(("POSITIONS", f"{most} positions, and the table has {positions}", is_short))

    def _is_read(self, name: str) -> bool:
        """Whether the inputs of one token depend on the arguments alone: the library's method, or one that was read."""
        kind: Any = next(base for base in type(self.model).__mro__ if name in vars(base))
        is_read = kind is GenerationMixin or kind.__name__ in compat.STATELESS_INPUTS.get(kind.__module__, ())
        # Since 5.24 the library wraps its method, by a function of another file.
        return is_read and packages_of(getattr(self.model, name)) == packages_of(kind)

    @cached_property
    @check(report.STEPS)
    def capture(self) -> list[Reason]:
        """The reasons in arguments and configuration why steps are not captured; see `captures.can_capture`."""
        model = self.model
        arguments = self.arguments.model_kwargs
        name = type(self.model).__name__
        most = self.arguments.generation_config.max_length or 0
        cache = kv_layers.cache_of(arguments)
        waits = not getattr(model, "_can_compile_fullgraph", False)
        waits = waits and model.config.model_type not in compat.SYNC_FREE
        return that_hold(
            ("TRANSFORMERS_VERSION", "transformers before 5.17 has other static caches", not compat.LAYERS_ARE_KNOWN),
            ("NO_CACHE", "use_cache is not set", not arguments.get("use_cache")),
            ("USER_CACHE", READ, self._cache_is_read),
            ("MAY_SYNC", f"{name}.forward may synchronize with the device (not _can_compile_fullgraph)", waits),
            self._attention_reasons,
            ("QUANTIZED", "the model is quantized", getattr(model, "hf_quantizer", None) is not None),
            self._coupled_products,
            [] if cache is None else kv_layers.static_reasons(cache, most - self.arguments.input_ids.shape[1]),
            self._table_reasons(most),
            ("REORDERS_ITSELF", REORDERS, hasattr(model, "_reorder_cache")),
        )

    @check(report.COMPACTION)
    def compaction(
        self, rows: int, rows_per_input: int, model_kwargs: dict[str, Any], cache_reasons: Sequence[Reason]
    ) -> list[Reason]:
        """Returns why finished inputs must stay in the batch at this step, such as inputs that may depend on them.

        cache_reasons: why the rows of the cache cannot be moved.
        """
        config = self.arguments.generation_config
        samples_beams = config.do_sample and bool(self.arguments.methods)
        return (
            that_hold(
                ("USER_CACHE", "the caller's cache has all rows", self.call.host.user_cache),
                ("RETURN_DICT", "the outputs of all rows are returned", config.return_dict_in_generate),
                ("SAMPLED_BEAMS", "random numbers are drawn for all beams together", samples_beams),
            )
            or (self.processors_by_row + processors.parameters_of_rows(self.arguments.logits_processor, rows))[:1]
            + that_hold(("REORDERS_ITSELF", REORDERS, hasattr(self.model, "_reorder_cache")))
            or that_hold(("STREAMER", "a streamer gets the tokens of all rows", self.arguments.streamer is not None))
            or that_hold(("STOPPING_CRITERION", STOPS_OTHERWISE, not self.stops_by_row))
            or self.rows
            or self._coupled_products
            or self.row_states({rows, rows // rows_per_input})
            or [*cache_reasons]
            or row_groups.unsupported_reasons(self.model.config.model_type, model_kwargs, rows)
        )

    @cached_property
    def processors_by_row(self) -> list[Reason]:
        return processors.by_batch_index(self.arguments.logits_processor)


@check(report.PREFILL)
def _static_cache_reasons(cache: Any, generation_config: Any) -> list[Reason]:
    """Returns why a prefill of one row of each group cannot fill the library's static cache for all rows."""
    text = "the cache is a StaticCache"
    is_chunked = generation_config.prefill_chunk_size is not None
    kinds = {*map(type, kv_layers.layers_of(cache))} - {StaticLayer, StaticSlidingWindowLayer}
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    return that_hold(
        ("CHUNKED_PREFILL", f"{text}, for which the library may compile a prefill in chunks", is_chunked),
        ("CACHE_LAYERS", f"{text} with layers of other kinds ({names})", bool(kinds)),
        ("CACHE_NOT_EMPTY", NOT_EMPTY, not kinds and cache.get_seq_length() > 0),
    )[:1]


def _is_in_mode() -> bool:
    """Whether a TorchFunctionMode or TorchDispatchMode of user code would see fewer rows, or other functions."""
    return is_watched() or torch._C._len_torch_dispatch_stack() > 0


def _runs_library_code(called: object) -> bool:
    """Whether calling this object, of a class of the library, runs the library's code."""
    return packages_of(type(called).__call__) == {"transformers"}
