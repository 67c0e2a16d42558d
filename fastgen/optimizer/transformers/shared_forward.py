"""A model's forwards over a tree of token sequences: what several sequences begin with goes through it once.

    node        prefix [1, P] ──> contexts [n, R] ──> continuations [n * m, C]
    its keys    [1, H, P, D]      [n, H, R, D]        attention sees them after those of all ancestors, in segments

A node is one forward of rows of equal length. Its cache is a `DynamicCache` of `NodeLayer`s. `log_likelihoods` and
`token_log_probs` build such trees. Autograd records all forwards: keys of a node get the sum of the gradients of all
rows that attend to them.

Tests: tests/optimizer/transformers/test_token_log_probs.py, tests/optimizer/transformers/test_log_likelihoods.py
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from fastgen.models.cache_names import CACHE
from fastgen.optimizer.decoding.call import GenerateCall
from fastgen.optimizer.decoding.cost_model import size_of
from fastgen.optimizer.decoding.guards import OfCall
from fastgen.optimizer.decoding.model_info import FEWER_ROWS
from fastgen.optimizer.decoding.report import Reason, that_hold
from fastgen.optimizer.decoding.segmented_kv import KV, in_segments, repeated
from fastgen.optimizer.transformers import checks, prefixes
from fastgen.optimizer.transformers.models import latent_attention

# Of a mixture of experts: the loss of its routers would need masks of the parts, and nobody reads it here.
ROUTERS = "output_router_logits"


class NodeLayer(DynamicLayer):
    """A layer of a node, which stores the first keys and values that it gets, with their graph; a leaf stores none.

    A layer of the model that is computed again for the backward gets the same keys and values back.
    ancestors: the segments before them, those of the root first. usage: see `SegmentedKV`.
    """

    is_initialized: bool

    def __init__(
        self, like: DynamicLayer, rows: int, usage: Counter[str], is_leaf: bool, ancestors: Sequence[KV] = ()
    ) -> None:
        super().__init__()
        self.is_sliding = like.is_sliding
        self.rows = rows
        self.usage = usage
        self.ancestors = ancestors
        self._will_store = not is_leaf
        if ancestors:
            self._describe(ancestors[0][0])

    def _describe(self, states: Tensor) -> None:
        self.dtype, self.device = states.dtype, states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> KV:
        pair: KV = (key_states, value_states)
        if self._will_store:
            pair = tuple(map(_without_surplus, pair))
            self._describe(key_states)
            self.keys, self.values = pair
            self._will_store = False
        segments = [*self.ancestors, pair]
        if len(segments) > 1 and all(keys.shape[0] == self.rows for keys, _ in segments):
            return tuple(torch.cat(states, dim=2) for states in zip(*segments))
        return in_segments(segments, self.rows, self.usage)

    def get_seq_length(self) -> int:
        """Returns the number of positions before those of this node; the root counts its own once it has them."""
        if self.ancestors:
            return sum(keys.shape[2] for keys, _ in self.ancestors)
        return super().get_seq_length()

    def child(self, rows: int, is_leaf: bool, should_share: Callable[[Tensor, int], bool]) -> NodeLayer:
        """Returns the same layer of a node whose rows continue those of this one.

        should_share: whether keys are stored once for a number of rows, and not for each of them.
        """
        ancestors = []
        for pair in (*self.ancestors, (self.keys, self.values)):
            count = rows // pair[0].shape[0]
            shares = count == 1 or should_share(pair[0], count)
            ancestors.append(pair if shares else repeated(pair, rows))
        return NodeLayer(self, rows, self.usage, is_leaf, ancestors)


def _without_surplus(states: Tensor) -> Tensor:
    """Copies states that are a view of a larger tensor, as of fused projections, unless autograd holds it anyway."""
    return states if states.requires_grad or states.untyped_storage().nbytes() <= states.nbytes else states.clone()


class SharedForward:
    """The forwards of a decoder-only model in one call.

    gives_positions: whether rows are passed their positions. added: what a node of its own takes.
    """

    gives_positions = False

    def __init__(self, call: GenerateCall, model: Any) -> None:
        self.call, self.model, self.size = call, model, size_of(model, checks.KNOWN)
        self.added = prefixes.forward_of_prefix(call.costs, self.size)
        parameters = inspect.signature(model.forward).parameters
        self.accepted = set(parameters)
        self.takes_kwargs = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())

    def gains(self, saved_tokens: int) -> bool:
        """Whether saving `saved_tokens` tokens is worth an additional forward."""
        return self.call.costs.pays(self.size.tokens(saved_tokens), *self.added)

    def unsupported_reasons(self, length: int, tokens: Sequence[int] = (1, 1)) -> list[Reason]:
        """Returns why a forward of this model cannot be continued from another one, with gradients or without.

        length: the most columns of a row. tokens: two for a trial. With gradients on a GPU, attention to segments would
        be computed by products, whose backward needs all attention weights.
        """
        if torch.is_grad_enabled() and self.model.device.type != "cpu":
            return [Reason("ATTENTION", "with gradients, attention to a shared beginning is supported on a CPU only")]
        modules = _checkpointing_modules(self.model)
        with torch.no_grad(), _checkpointing(modules):  # the caches of the trial are not written in place
            return _checkpointing_reasons(modules) or self._unsupported_reasons(length, tokens)

    def _unsupported_reasons(self, length: int, tokens: Sequence[int]) -> list[Reason]:
        cache = DynamicCache(config=self.model.config)
        moves_columns = self.gives_positions
        of_call = checks.CallChecks(self.call, self.model)
        if reasons := of_call.prefix(cache, length, moves_columns) + of_call.rows:
            return reasons
        columns = {"input_ids": [*tokens], "attention_mask": [1, 1]}
        prefix = prefixes.CommonPrefix(2)
        rows = 2  # of the trial
        if moves_columns:  # padding may be between a node and its parent
            columns = {"input_ids": [0, *tokens], "attention_mask": [0, 1, 1], prefixes.POSITIONS: [0, 0, 1]}
            rows = 3
            prefix = prefixes.CommonPrefix(2, padding=torch.ones(1, dtype=torch.int64, device=self.model.device))
        arguments: dict[str, Any] = {
            name: torch.tensor([row], device=self.model.device)
            for name, row in columns.items()
            if name != prefixes.POSITIONS or name in self.accepted
        }
        arguments |= {CACHE: cache, **({ROUTERS: False} if ROUTERS in self.accepted else {})}
        facts = self.call.facts_of(self.model, checks.KNOWN)

        def forward(tried: dict[str, Any]) -> Any:
            previous = facts.row_tensors()
            outputs = self.model(**prefixes.without_cached_columns(tried), use_cache=True)
            if reasons := of_call.row_states({rows}, previous):
                facts.proofs[FEWER_ROWS] = reasons
            return outputs

        return prefixes.model_reasons(facts, forward, prefix, arguments) or facts.proofs.get(FEWER_ROWS, [])

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """A context of forwards of nodes: layers checkpoint with their cache, and latents are expanded once."""
        modules = _checkpointing_modules(self.model)
        facts = self.call.facts_of(self.model, checks.KNOWN)
        # Not in layers that are computed again outside of this context.
        latents = nullcontext() if modules else latent_attention.expanding_in_parts(facts.modules.values())
        with _checkpointing(modules), latents:
            yield

    def node(self, rows: int, parent: Any = None, is_leaf: bool = False) -> Any:
        """Returns the empty cache of a node with `rows` rows.

        parent: the filled one whose rows they continue. is_leaf: whether no rows will continue these.
        """
        node: Any = DynamicCache(config=self.model.config)
        if parent is None:
            node.layers = [NodeLayer(layer, rows, self.call.report.kernels, is_leaf) for layer in node.layers]
        else:
            node.layers = [layer.child(rows, is_leaf, self.should_share) for layer in parent.layers]
        return node

    def should_share(self, keys: Tensor, rows_per_copy: int) -> bool:
        """Whether keys of a node are stored once for `rows_per_copy` rows that continue it."""
        return True

    def logits(self, columns: int, tokens: Tensor, mask: Tensor | None, node: Any = None) -> Tensor:
        """Returns the logits `[rows, columns, vocabulary_size]` of the last columns of tokens `[rows, length]`.

        mask: `[rows, length]` with the columns of all ancestors, 1 for visible tokens; None if all are visible.
        """
        arguments = {prefixes.MASK: mask, CACHE: node, "logits_to_keep": columns, ROUTERS: False}
        if self.gives_positions and mask is not None:
            positions = (mask.long().cumsum(dim=1) - 1).clamp_(min=0)[:, -tokens.shape[1] :]
            arguments[prefixes.POSITIONS] = positions.to(tokens.device)
            arguments[prefixes.MASK] = None if mask.all() else mask.to(tokens.device)
        accepted = self.accepted | ({prefixes.MASK, CACHE} if self.takes_kwargs else set())
        arguments = {name: value for name, value in arguments.items() if value is not None and name in accepted}
        outputs = self.model(tokens, use_cache=node is not None, return_dict=True, **arguments)
        return outputs.logits[:, -columns:]


# Gradient checkpointing. The library drops the cache of a layer that it checkpoints, because the layer would write into
# it a second time when the backward computes it again. Caches of nodes are not written into, so their layers checkpoint
# with them.


def _checkpointing_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that checkpoint, or have a layer do it, in a forward of this model."""
    return [module for module in model.modules() if module.training and vars(module).get("gradient_checkpointing")]


def _layers(modules: list[nn.Module]) -> list[Any]:
    return [module for module in modules if isinstance(module, GradientCheckpointingLayer)]


def _checkpointing_reasons(modules: list[nn.Module]) -> list[Reason]:
    """Returns why `_checkpointing` cannot do what these modules do; empty if it can."""
    layers = _layers(modules)
    functions = [getattr(layer, "_gradient_checkpointing_func", None) for layer in layers]
    options = [getattr(function, "keywords", {}) for function in functions]
    is_reentrant = any(option.get("use_reentrant") is not False for option in options)
    replaced = [layer for layer in layers if "forward" in vars(layer)]
    text = "a module is in training mode with gradient checkpointing"
    return that_hold(
        ("TRAINING", f"{text} of a class that fastgen does not know", bool(modules) and not layers),
        ("TRAINING", f"{text} that is reentrant, which keeps no graph of keys", is_reentrant),
        ("TRAINING", f"{text}, and its forward has been replaced", bool(replaced)),
    )


@contextmanager
def _checkpointing(modules: list[nn.Module]) -> Iterator[None]:
    """A context in which these modules do not checkpoint as the library does.

    If autograd records, the layers among them checkpoint with their cache, by the same function.
    """
    layers = _layers(modules) if torch.is_grad_enabled() else []
    for module in modules:
        module.gradient_checkpointing = False
    for layer in layers:
        vars(layer)["forward"] = OfCall(_checkpointed, layer)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]
        for module in modules:
            module.gradient_checkpointing = True


def _checkpointed(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a layer whose activations are computed again in the backward."""
    forward = type(layer).forward
    forward = getattr(forward, "__wrapped__", forward)  # without the library's own checkpoint
    return layer._gradient_checkpointing_func(partial(forward, layer, **kwargs), *args)
