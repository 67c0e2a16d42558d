"""Models inside of DDP, FSDP and PEFT, as trainers hold them: shared, or left alone with a reason."""

import pytest
import torch
import torch.distributed
from parity import Both, run_both
from peft import LoraConfig, get_peft_model
from process_group import process_group
from reports import PROMPT, is_shared, replays
from tiny_models import padded, tiny
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

pytestmark = [pytest.mark.usefixtures("share_always"), pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def _process_group():
    with process_group():
        yield


def generated(model: nn.Module, **options: object) -> Both:
    """Compares 24 steps, enough to be captured if possible."""
    samples = {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": 24, "eos_token_id": None}
    both = run_both(lambda: model.generate(**padded(9, 5), **samples, **options))
    assert torch.equal(both.stock, both.fast)
    return both


def step(model: nn.Module) -> None:
    """Trains one step, after which all weights are others."""
    tokens = padded(9, 7)["input_ids"]
    model(input_ids=tokens, labels=tokens).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.5)
                parameter.grad = None


LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: DistributedDataParallel(model),
        lambda model: get_peft_model(model, LoraConfig(**LORA, lora_dropout=0.0, init_lora_weights=False)),
    ],
    ids=("DDP", "adapters"),
)
def test_models_that_trainers_wrap_are_shared(wrap):
    wrapped = wrap(tiny("llama")).train()
    for _ in range(2):
        assert is_shared(generated(getattr(wrapped, "module", wrapped)).report, PROMPT)
        step(wrapped)


def test_fully_sharded_models_share_with_full_parameters():
    wrapped = FullyShardedDataParallel(tiny("llama").train(), use_orig_params=True, device_id=torch.device("cpu"))
    for _ in range(2):
        with FullyShardedDataParallel.summon_full_params(wrapped, recurse=False):
            assert is_shared(generated(wrapped.module).report, PROMPT)
        step(wrapped)


def test_steps_of_layers_that_are_sharded_are_not_captured():
    model = tiny("llama").train()
    for name, layer in model.model.layers.named_children():
        setattr(
            model.model.layers,
            name,
            FullyShardedDataParallel(layer, use_orig_params=True, device_id=torch.device("cpu")),
        )
    report = generated(model).report
    assert is_shared(report, PROMPT) and not replays(report)
    assert "SHARDED" in report.codes()


@pytest.mark.parametrize("synced_gpus", (False, True))
def test_models_sharded_by_layers_are_shared(synced_gpus):
    model = tiny("llama").train()
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for _ in range(2):
        assert is_shared(generated(model, synced_gpus=synced_gpus).report, PROMPT)
        step(model)


def test_adapters_with_dropout_are_left_alone():
    model = get_peft_model(tiny("llama"), LoraConfig(**LORA, lora_dropout=0.1, init_lora_weights=False))
    report = generated(model.train()).report
    assert not report.shared and any("lora_dropout" in reason for reason in report.fallbacks)
