"""Attention works on the segments of a tensor; any other operation materializes it."""

import copy
import inspect
import io
import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from torch.nn import functional

from fastgen.optimizer.decoding.report import MATERIALIZED
from fastgen.optimizer.decoding.segmented_kv import SegmentedKV


def states(groups: int = 1, copies: tuple[int, ...] = (2, 6)) -> SegmentedKV:
    """Six rows of 3 heads and 7 positions, in segments with so many copies each."""
    generator = torch.Generator().manual_seed(groups)
    lengths = {1: (7,), 2: (5, 2), 3: (3, 2, 2)}[len(copies)]
    segments = [torch.randn(count, 3, length, 4, generator=generator) for count, length in zip(copies, lengths)]
    return SegmentedKV(tuple(segments), 6, Counter(), groups=groups)


FLAT = states(groups=2).reshape(36, 7, 4)


def repeat_kv(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    rows, heads, length, width = tensor.shape
    tensor = tensor[:, :, None, :, :].expand(rows, heads, groups, length, width)
    return tensor.reshape(rows, heads * groups, length, width)


def narrower(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the first three columns, in segments if the tensor is."""
    if type(tensor) is torch.Tensor:
        return tensor[..., :3]
    return SegmentedKV(tuple(segment[..., :3] for segment in tensor.segments), tensor.rows, tensor.usage)


QUERY = torch.randn(6, 3, 1, 4, generator=torch.Generator().manual_seed(7))
FLAT_QUERY = QUERY.flatten(0, 1)
WEIGHTS = torch.rand(6, 3, 1, 7, generator=torch.Generator().manual_seed(8))
SEGMENTED = {
    "matmul transpose": lambda tensor: torch.matmul(QUERY, tensor.transpose(2, 3)),
    "matmul transpose negative": lambda tensor: QUERY @ tensor.transpose(-1, -2),
    "matmul mT": lambda tensor: QUERY.matmul(tensor.mT),
    "sdpa with values of another width": lambda tensor: functional.scaled_dot_product_attention(
        QUERY, tensor, narrower(tensor)
    ),
    "weights": lambda tensor: torch.matmul(WEIGHTS, tensor),
    "transposed twice": lambda tensor: WEIGHTS @ tensor.transpose(2, 3).transpose(3, 2),
    "contiguous": lambda tensor: WEIGHTS @ tensor.contiguous(),
    "other dtype": lambda tensor: WEIGHTS.double() @ tensor.to(torch.float64),
    "sdpa": lambda tensor: functional.scaled_dot_product_attention(QUERY, tensor, tensor),
    "sdpa grouped": lambda tensor: functional.scaled_dot_product_attention(
        QUERY.repeat(1, 2, 1, 1), tensor, tensor, enable_gqa=True
    ),
    "repeat_kv": lambda tensor: QUERY.repeat(1, 2, 1, 1) @ repeat_kv(tensor, 2).transpose(2, 3),
    "repeat_interleave": lambda tensor: QUERY.repeat(1, 2, 1, 1) @ tensor.repeat_interleave(2, dim=1).transpose(2, 3),
    "bmm": lambda tensor: torch.bmm(FLAT_QUERY, tensor.reshape(18, -1, 4).transpose(1, 2)),
    "bmm with weights": lambda tensor: WEIGHTS.flatten(0, 1).bmm(tensor.reshape(18, 7, 4)),
    "bmm of grouped heads": lambda tensor: torch.bmm(
        FLAT_QUERY.repeat(2, 1, 1), tensor.repeat_interleave(2, dim=1).reshape(36, -1, 4).mT
    ),
    "baddbmm": lambda tensor: torch.ones(18, 1, 7).baddbmm(
        batch1=FLAT_QUERY, batch2=tensor.reshape(18, -1, 4).transpose(-1, -2), beta=0.5, alpha=2.0
    ),
    "names of arguments": lambda tensor: torch.matmul(
        input=QUERY.repeat(1, 2, 1, 1),
        other=torch.transpose(input=torch.repeat_interleave(input=tensor, repeats=2, dim=1), dim0=2, dim1=3),
    ),
    "names in methods": lambda tensor: QUERY.matmul(other=tensor.transpose(dim0=-1, dim1=-2)),
}


def saved(tensor: torch.Tensor) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


ELSEWHERE = {
    "slice": lambda tensor: tensor[:, :, :3],
    "row": lambda tensor: tensor[1],
    "add": lambda tensor: tensor + 1,
    "radd": lambda tensor: 1 + tensor,
    "einsum": lambda tensor: torch.einsum("bhqd,bhkd->bhqk", QUERY, tensor),
    "cat": lambda tensor: torch.cat([tensor, tensor], dim=2),
    "reshape": lambda tensor: tensor.reshape(6, 21, 4),
    "flat and sliced": lambda tensor: tensor.reshape(18, -1, 4)[:, :3],
    "flat, of other rows": lambda tensor: torch.bmm(tensor.reshape(18, 7, 4), torch.ones(18, 4, 2)),
    "baddbmm in place": lambda tensor: torch.zeros(18, 1, 7).baddbmm_(FLAT_QUERY, tensor.reshape(18, 7, 4).mT),
    "view": lambda tensor: tensor.view(6, 3, 28),
    "other transpose": lambda tensor: tensor.transpose(1, 2),
    "permute": lambda tensor: tensor.permute(0, 2, 1, 3),
    "causal sdpa": lambda tensor: functional.scaled_dot_product_attention(QUERY, tensor, tensor, is_causal=True),
    "query": lambda tensor: functional.scaled_dot_product_attention(tensor, tensor, tensor),
    "left": lambda tensor: tensor @ tensor.transpose(2, 3),
    "broadcast rows": lambda tensor: QUERY[:1] @ tensor.transpose(2, 3),
    "index_select": lambda tensor: tensor.index_select(0, torch.tensor([0, 5])),
    "pad": lambda tensor: functional.pad(tensor, [0, 3]),  # values that are narrower than keys, for flash attention
    "sum": lambda tensor: tensor.sum(),
    "numpy": lambda tensor: torch.from_numpy(tensor.numpy()),
    "asarray": lambda tensor: torch.from_numpy(np.asarray(tensor) * 2),
    "tolist": lambda tensor: torch.tensor(tensor.tolist()),
    "list of rows": lambda tensor: torch.stack(list(tensor)),
    "pickle": lambda tensor: pickle.loads(pickle.dumps(tensor)),
    "save": saved,
    "dlpack": lambda tensor: torch.from_dlpack(tensor).clone(),
    "as_strided": lambda tensor: torch.as_strided(tensor, (3, 5), (7, 1)).clone(),
    "storage": lambda tensor: torch.tensor((tensor.untyped_storage().nbytes(), tensor.data_ptr() != 0)),
    "reinterpreted": lambda tensor: tensor.view(torch.uint8).clone(),
    "unfold": lambda tensor: tensor.unfold(2, 2, 1).clone(),
    "traced": lambda tensor: torch.jit.trace(lambda states: states * 2, torch.zeros(1, 1, 1, 1))(tensor),
    "deepcopy": copy.deepcopy,
    "clone": lambda tensor: tensor.clone(),
    "repeat_interleave rows": lambda tensor: tensor.repeat_interleave(2, dim=0),
    "matmul out": lambda tensor: torch.matmul(QUERY, tensor.transpose(2, 3), out=torch.empty(6, 3, 1, 7)),
    "reshape shape": lambda tensor: tensor.reshape(shape=(6, 3, 7, 4)),
    "expand size": lambda tensor: tensor[:, :, None].expand(size=(6, 3, 2, 7, 4)),
    "repeats of each head": lambda tensor: tensor.repeat_interleave(torch.tensor([1, 2, 3]), dim=1),
    "output size": lambda tensor: tensor.repeat_interleave(2, dim=1, output_size=6),
    "to of a transposed": lambda tensor: tensor.transpose(2, 3).to(torch.float64),
    "contiguous of a transposed": lambda tensor: tensor.transpose(2, 3).contiguous(),
}


@pytest.mark.parametrize("copies", [(2, 6), (1, 2, 6), (2,), (6,), (1, 6)], ids=str)
@pytest.mark.parametrize("name", SEGMENTED)
def test_attention_works_on_the_segments(name, copies):
    tensor = states(copies=copies)
    output, expected = SEGMENTED[name](tensor), SEGMENTED[name](tensor.materialize())
    torch.testing.assert_close(output, expected)
    assert type(output) is torch.Tensor
    assert not any(use.startswith(MATERIALIZED) for use in tensor.usage) and tensor.usage


@pytest.mark.parametrize("name", ELSEWHERE)
def test_other_operations_materialize_the_tensor(name):
    tensor = states(copies=(1, 2, 6))
    output, expected = ELSEWHERE[name](tensor), ELSEWHERE[name](tensor.materialize())
    torch.testing.assert_close(output, expected)
    assert type(output) is torch.Tensor
    assert any(use.startswith(MATERIALIZED) for use in tensor.usage)


def test_shapes_and_types_of_the_whole_tensor_cost_nothing():
    for tensor in (
        states(),
        states(groups=2),
        states(copies=(2,)),
        states(copies=(1, 2, 6)),
        states().transpose(2, 3),
        states()[:, :, None],
        FLAT,
        FLAT.mT,
    ):
        expected = tensor.materialize()
        assert tensor.shape == expected.shape and tensor.size(1) == expected.size(1)
        assert tensor.dim() == tensor.ndim == expected.dim() and tensor.numel() == expected.numel()
        assert tensor.dtype == expected.dtype and tensor.device == expected.device
        assert tensor.is_floating_point() and not tensor.requires_grad
        assert tensor.stride() == expected.stride() and tensor.is_contiguous() == expected.is_contiguous()
        assert tensor.layout == expected.layout and tensor.element_size() == expected.element_size() == tensor.itemsize
        assert tensor.nbytes == expected.nbytes and len(tensor) == len(expected) and tensor.storage_offset() == 0
        assert hash(tensor) == id(tensor) and tensor.is_leaf and tensor.grad is None
        assert not tensor.usage


ATTRIBUTES = [
    name for name in dir(torch.Tensor) if inspect.isdatadescriptor(inspect.getattr_static(torch.Tensor, name))
]
NOT_OF_THE_CONTENT = ("__weakref__", "__class__", "__dict__", "_cdata", "_python_dispatch")


@pytest.mark.parametrize("name", [name for name in ATTRIBUTES if name not in NOT_OF_THE_CONTENT])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_attribute_is_that_of_the_whole_tensor(name):
    def value(tensor):
        try:
            return getattr(tensor, name)
        except Exception as error:
            return type(error)

    attribute, expected = value(states()), value(states().materialize())
    assert torch.equal(attribute + 0, expected) if isinstance(expected, torch.Tensor) else attribute == expected


def test_a_materialized_tensor_is_one_memory_for_all_its_views():
    tensor, before = states(), states().materialize()
    views = (tensor.transpose(2, 3), tensor[:, :, None], tensor.reshape(tensor.shape), tensor.detach())
    copies = (repeat_kv(tensor, 2), tensor.repeat_interleave(1, dim=1), tensor.to(torch.float64))
    address = tensor.data_ptr()
    tensor.mul_(2)
    views[0][0, 0] = 5.0
    copies[1][:] = 7.0
    expected = before * 2
    expected[0, 0] = 5.0
    assert torch.equal(tensor + 0, expected) and tensor.data_ptr() == address
    assert all(view.data_ptr() == address for view in views)
    assert torch.equal(views[0] + 0, expected.transpose(2, 3)) and torch.equal(views[1][:, :, 0], expected)
    assert torch.equal(copies[0] + 0, before.repeat_interleave(2, dim=1))
    assert torch.equal(copies[2] + 0, before.double())
    assert torch.equal(copies[1] + 0, torch.full_like(before, 7.0))
    torch.testing.assert_close(QUERY @ tensor.mT, QUERY @ expected.mT)


def test_code_below_functions_of_torch_gets_a_whole_tensor():
    tensor = states()
    with torch._C.DisableTorchFunctionSubclass():
        outputs = torch.add(tensor, 1), torch.zeros_like(tensor, dtype=torch.float64)
    assert torch.equal(outputs[0], tensor.materialize() + 1)
    assert outputs[1].shape == tensor.shape and outputs[1].dtype == torch.float64
