"""The call that does what a noted one has done, with the same tensors and into the same memory.

Tests: tests/ops/test_cpu_graph.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastgen.ops.cpu_graph.trace import Call, Diverged
from fastgen.ops.cpu_linear import few_rows

# A function and its arguments.
Repetition = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

_COPIES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)

# Arguments that a form with `out` takes from the tensor that it is given.
_TOLD_BY_OUT = frozenset({"dtype", "layout", "device", "pin_memory"})


def repetition_of(call: Call) -> Repetition:
    """Of a call that computes something, or reads a scalar: Diverged is raised where that has changed."""
    if not call.made and not call.writes:
        return functools.partial(_expect, call), (), {}
    if call.writes:
        return call.operation._op, call.args, call.kwargs
    if call.operation in _COPIES:
        return Tensor.copy_, (call.result, call.args[0]), {}
    if call.operation._schema.name == few_rows.OPERATION:
        return few_rows.call_into(call.result, *call.args), (), {}
    form, outs = _form_with_out(call.operation)
    if form is None:
        return functools.partial(_compute_and_copy, call), (), {}
    known = {argument.name for argument in form._schema.arguments}
    kwargs = {name: value for name, value in call.kwargs.items() if name in known}
    return form._op, call.args, kwargs | dict(zip(outs, call.made))


def _expect(call: Call) -> None:
    found = call.operation._op(*call.args, **call.kwargs)
    if found != call.result:
        raise Diverged(f"{call.operation} returned {found} on the host instead of {call.result}")


def _compute_and_copy(call: Call) -> None:
    results = call.operation._op(*call.args, **call.kwargs)
    for mine, found in zip(call.made, (results,) if isinstance(results, Tensor) else results):
        mine.copy_(found)


@functools.cache
def _form_with_out(operation: torch._ops.OpOverload) -> tuple[torch._ops.OpOverload | None, tuple[str, ...]]:
    """The form of an operation that writes its results into given tensors, and their names; None if it has none."""
    results = [str(result.type) for result in operation._schema.returns]
    wanted = [_described(argument) for argument in operation._schema.arguments if argument.name not in _TOLD_BY_OUT]
    packet = operation.overloadpacket
    for form in (getattr(packet, name) for name in packet.overloads()):
        outs = [argument for argument in form._schema.arguments if argument.is_out]
        others = [argument for argument in form._schema.arguments if not argument.is_out]
        if results and [str(out.type) for out in outs] == results and wanted == list(map(_described, others)):
            return form, tuple(out.name for out in outs)
    return None, ()


def _described(argument: Any) -> tuple[str, str]:
    return argument.name, str(argument.type)
