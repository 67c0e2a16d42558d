"""Packed copies of weights: the same numbers, in bounded memory, and never of a weight that has changed."""

from __future__ import annotations

import weakref

import pytest
import torch
from parity import BEAMS, assert_same, padded, tiny
from python_process import run_code
from torch import nn
from transformers import LogitsProcessor
from transformers.pytorch_utils import Conv1D

from fastgen.config import CONFIG
from fastgen.ops import cpu_linear
from fastgen.ops.cpu_linear import autotune_cache, packing
from fastgen.ops.cpu_linear import product as op
from fastgen.optimizer.decoding import model_facts, packed_weights
from fastgen.optimizer.decoding.faster_forwards import expect_steps, faster_forwards
from fastgen.optimizer.transformers.forwards import forwards

pytestmark = pytest.mark.skipif(bool(cpu_linear.machine_reasons()), reason="this build of torch has no oneDNN")

PACKED, PLAIN = "cpu_linear, packed", "cpu_linear, oneDNN"
STATES = torch.randn(4, 48, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def onednn(monkeypatch):
    """Everything goes through oneDNN."""
    monkeypatch.setattr(op, "MIN_ELEMENTS", 0)
    monkeypatch.setattr(cpu_linear, "fastest", lambda *product: cpu_linear.ONEDNN)
    monkeypatch.setattr(model_facts, "MIN_LARGE_PER_MODULE", 0)


@pytest.fixture
def packed(onednn, monkeypatch):
    """The packed weights that live; packing pays after three products."""
    living = weakref.WeakSet()

    class Known(packing.PackedWeight):
        def __init__(self, weight):
            super().__init__(weight)
            living.add(self)

    monkeypatch.setattr(packed_weights, "PackedWeight", Known)
    monkeypatch.setattr(cpu_linear, "MIN_PRODUCTS", 3)
    monkeypatch.setattr(cpu_linear, "is_known", lambda kind: True)
    monkeypatch.setattr(cpu_linear, "pays_after", lambda kind: 3)
    return living


def model_of(module: nn.Module) -> nn.Module:
    """A model that leaves room for a copy of all of the module's weights."""
    torch.manual_seed(0)
    for weight in module.parameters():
        nn.init.normal_(weight)
    return nn.Sequential(module, nn.Embedding(sum(weight.numel() for weight in module.parameters()), 1))


class Products:
    """Inside it a call of `generate` runs, of so many steps at most; `usage` counts."""

    def __init__(self, model: nn.Module, steps: int = 100) -> None:
        self.model, self.steps, self.usages = model, steps, []

    def __enter__(self) -> Products:
        self.context = faster_forwards([self.model], forwards(), self.usages)
        self.context.__enter__()
        expect_steps(self.model, self.steps)
        return self

    def __exit__(self, *error: object) -> None:
        self.context.__exit__(*error)

    def of(self, module: nn.Module, times: int, states: torch.Tensor = STATES) -> dict[str, int]:
        """Multiplies so often, with the right result each time; what was counted for that."""
        before = self.usages[0].copy()
        with torch.no_grad():
            expected = type(module).forward(module, states)
            for _ in range(times):
                torch.testing.assert_close(module(states), expected, rtol=1e-5, atol=1e-4)
        return dict(self.usages[0] - before)


@pytest.mark.parametrize("rows", [(1, 1), (4, 1), (3, 5), (64, 1), (200,)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_products_with_packed_weights_are_those_of_torch(rows, with_bias, kind, mode, packed, monkeypatch):
    module = nn.Linear(48, 1003, with_bias) if kind == "linear" else Conv1D(1003, 48)
    with mode(), Products(model_of(module)) as products:
        assert products.of(module, 5, torch.randn(*rows, 48)) == {PLAIN: 3, PACKED: 2}


@pytest.mark.skipif(torch.bfloat16 not in op.dtypes(), reason="this CPU has no instructions for bf16")
def test_bf16_weights_are_packed_too(packed):
    module, states = nn.Linear(48, 1003), STATES.bfloat16()
    model = model_of(module).bfloat16()
    with torch.no_grad(), Products(model) as products:
        expected = nn.functional.linear(states, module.weight, module.bias)
        for _ in range(5):
            torch.testing.assert_close(module(states), expected, rtol=1e-2, atol=1e-2)
    assert products.usages == [{PLAIN: 3, PACKED: 2}]


def test_generate_packs_where_many_tokens_can_follow_and_gives_the_same(packed):
    arguments = {**padded(9, 5)}
    model = tiny("gpt2")
    report = assert_same(model, arguments, **BEAMS | {"max_new_tokens": 12, "eos_token_id": None})
    assert report.kernels[PACKED] > 0 and packed
    report = assert_same(model, arguments, **BEAMS | {"max_new_tokens": 5, "eos_token_id": None})
    assert report.kernels[PLAIN] > 0 and not report.kernels[PACKED]


def test_fairseq_packs_too(packed):
    pytest.importorskip("fairseq")
    from fairseq_models import CASES
    from fairseq_parity import compare

    assert compare(CASES["transformer"](), min_len=12, max_len_b=15).report.kernels[PACKED] > 0


def in_place(module):
    with torch.no_grad():
        module.weight.mul_(2)


def in_place_in_inference_mode(module):
    with torch.inference_mode():
        module.weight.mul_(2)


def load_state_dict(module):
    module.load_state_dict({name: 2 * weight for name, weight in module.state_dict().items()})


def replace_the_parameter(module):
    module.weight = nn.Parameter(2 * module.weight.detach())


def replace_the_data(module):
    module.weight.data = 2 * module.weight.data


def transpose_the_data(module):
    module.weight.data = module.weight.data.t()


def write_through_data(module):
    module.weight.data.mul_(2)


CHANGES = [in_place, in_place_in_inference_mode, load_state_dict, replace_the_parameter, replace_the_data]


@pytest.mark.parametrize("change", [*CHANGES, transpose_the_data, write_through_data])
@pytest.mark.parametrize("module", [nn.Linear(48, 48), Conv1D(48, 48)])
def test_a_weight_that_changes_between_calls_gives_the_changed_result(module, change, packed):
    model = model_of(module)
    with Products(model) as products:
        assert products.of(module, 5) == {PLAIN: 3, PACKED: 2}
    with Products(model) as products:
        assert products.of(module, 5) == {PACKED: 5}
    change(module)
    with Products(model) as products:
        assert products.of(module, 5) == {PLAIN: 4, PACKED: 1}


@pytest.mark.parametrize("change", [*CHANGES, transpose_the_data])
@pytest.mark.parametrize("module", [nn.Linear(48, 48), Conv1D(48, 48)])
def test_a_weight_that_changes_within_a_call_gives_the_changed_result(module, change, packed):
    with Products(model_of(module)) as products:
        products.of(module, 5)
        change(module)
        assert products.of(module, 1) == {PLAIN: 1}
        assert PACKED in products.of(module, 8)  # a copy of the changed weight


def test_a_processor_may_change_a_weight_while_generate_runs(packed):
    class Changing(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] == 9 + 6:
                in_place(model.transformer.h[0].attn.c_attn)
            return scores

    def call():
        model.load_state_dict(weights)
        return model.generate(**padded(9, 5), **arguments, logits_processor=[Changing()]).scores

    model, arguments = tiny("gpt2"), {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    arguments |= {"output_scores": True, "return_dict_in_generate": True}
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    fast = call()
    with Products(model, steps=0):  # nothing is packed
        torch.testing.assert_close(fast, call(), rtol=1e-4, atol=1e-4)


def test_copies_stay_with_the_model_and_hold_no_weight_that_it_has_replaced(packed):
    model = model_of(module := nn.Linear(48, 1003))
    with Products(model) as outer:
        with Products(model) as inner:
            inner.of(module, 5)
        assert outer.of(module, 5) == {PACKED: 5}
    [copy] = packed
    weight = weakref.ref(module.weight.untyped_storage())
    module.weight.data = module.weight.data.clone()
    assert weight() is None and copy.held is None
    with Products(model) as products:
        assert products.of(module, 5) == {PACKED: 5}  # other memory, the same numbers
    del copy, model, module, products, outer, inner
    assert not packed


def test_copies_hold_nothing_after_an_error(packed):
    model = model_of(module := nn.Linear(48, 1003))
    with pytest.raises(LookupError), Products(model) as products:
        products.of(module, 5)
        raise LookupError
    assert [copy.held for copy in packed] == [None]


def test_copies_of_a_model_that_changes_its_type_are_given_back(packed):
    model = model_of(module := nn.Linear(48, 1003))
    with Products(model) as products:
        products.of(module, 5)
    assert packed
    model.double()
    with Products(model):
        pass
    assert not packed


def test_copies_take_at_most_half_of_the_model_s_bytes(packed):
    with Products(module := nn.Linear(48, 48)) as products:
        assert products.of(module, 5) == {PLAIN: 5}
    model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(6)))
    half = sum(weight.nbytes for weight in model.parameters()) // 2
    with Products(model) as products:
        for module in model:
            products.of(module, 5)
        assert len(packed) == 3  # the first to come
        assert sum(one.nbytes for one in packed) <= half
        in_place(model[0])
        products.of(model[0], 1)
        assert PACKED in products.of(model[3], 5)  # there is room again


@pytest.mark.parametrize("pack", [True, False])
def test_fastgen_pack_switches_it_off(pack, packed, monkeypatch):
    monkeypatch.setattr(CONFIG, "pack", pack)
    with Products(model_of(module := nn.Linear(48, 1003))) as products:
        assert products.of(module, 5).get(PACKED, 0) == 2 * pack
    code = "from fastgen.optimizer.decoding import packed_weights; print(packed_weights.CONFIG.pack)"
    assert run_code(code, FASTGEN_PACK=str(int(pack))).strip() == str(pack)


@pytest.mark.parametrize(("steps", "copies"), [(0, 0), (5, 0), (6, 1)])
def test_nothing_is_packed_unless_half_as_many_products_can_follow_as_packing_costs(steps, copies, packed):
    with Products(model_of(module := nn.Linear(48, 1003)), steps) as products:
        products.of(module, 7)
        assert len(packed) == copies


def test_a_kind_of_product_that_gains_nothing_uses_no_copy(packed, monkeypatch):
    monkeypatch.setattr(cpu_linear, "pays_after", lambda kind: 3 if kind.rows == 4 else None)
    with Products(model_of(module := nn.Linear(48, 1003))) as products:
        assert PACKED in products.of(module, 5)
        assert products.of(module, 5, torch.randn(100, 48)) == {PLAIN: 5}
        assert products.of(module, 5) == {PACKED: 5}


def test_gradients_and_weights_that_tell_of_no_change_use_no_copy(packed):
    model = model_of(module := nn.Linear(48, 1003))
    with Products(model) as products:
        products.of(module, 5)
        module(STATES).sum().backward()
    assert module.weight.grad is not None and products.usages[0][PACKED] == 2
    with torch.inference_mode():
        model = model_of(module := nn.Linear(48, 1003))
    with Products(model) as products:
        assert products.of(module, 5) == {PLAIN: 5}


@pytest.fixture
def measured(onednn, monkeypatch, tmp_path):
    """Nothing is known from before; packing takes next to nothing, and a product with a packed weight `seconds`."""
    seconds = {"plain": 1.0, "packed": 0.5}
    monkeypatch.setattr(
        packing, "seconds_of", lambda function, rows, weight, bias: seconds["packed" if weight.is_mkldnn else "plain"]
    )
    monkeypatch.setattr(CONFIG, "cache", str(tmp_path))
    later_process(monkeypatch)
    return seconds


def later_process(monkeypatch) -> None:
    known = packing.ANSWERS
    monkeypatch.setattr(packing, "ANSWERS", autotune_cache.AutotuneCache(known.question, known.is_answer))


def test_the_call_that_measures_and_those_of_later_processes_use_the_same_products(measured, monkeypatch):
    counts = []
    for _ in range(2):
        model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(2)), nn.Embedding(48 * 48 * 2, 1))
        with Products(model) as products:
            for _ in range(20):
                for module in model[:2]:
                    products.of(module, 1)
        counts.append(products.usages[0])
        later_process(monkeypatch)
    assert counts[0] == counts[1] == {PLAIN: 2 * packing.MIN_PRODUCTS, PACKED: 2 * (20 - packing.MIN_PRODUCTS)}
    assert len(autotune_cache.path().read_bytes().splitlines()) == 1  # one module's weight was enough


def test_packing_pays_after_as_many_products_as_it_costs(measured, monkeypatch):
    measured["packed"] = 1 - 1e-12  # a gain, if a small one
    monkeypatch.setattr(packing, "GAIN", 1.0)
    with Products(model_of(module := nn.Linear(48, 1003))) as products:
        assert products.of(module, 30) == {PLAIN: 30}
    [answer] = packing.ANSWERS.load().values()
    assert answer > 10**6


def test_packing_never_pays_where_the_gain_may_be_chance(measured):
    measured["packed"] = 0.95
    with Products(model_of(module := nn.Linear(48, 1003))) as products:
        assert products.of(module, 30) == {PLAIN: 30}
    assert list(packing.ANSWERS.load().values()) == [None]


def test_calls_of_few_tokens_measure_nothing(measured):
    for steps in (2 * packing.MIN_PRODUCTS - 1, 0):
        with Products(model_of(module := nn.Linear(48, 1003)), steps) as products:
            products.of(module, 30)
    assert not autotune_cache.path().exists()


def test_a_part_of_a_large_weight_is_enough_to_measure(measured, monkeypatch):
    monkeypatch.setattr(packing, "MAX_TRIAL_ELEMENTS", 1000)
    states, module = torch.randn(4, 48), nn.Linear(48, 1003)
    trial = packing.Trial(cpu_linear.kind_of(states, module.weight, module.bias), module.weight.detach())
    assert trial.packed.nbytes < 4 * 1100
    monkeypatch.undo()
    for _ in range(packing.ROUNDS):
        trial.time(states, module.weight.detach(), module.bias.detach(), fastest=cpu_linear.ONEDNN)
    assert len(trial.seconds) == packing.ROUNDS
