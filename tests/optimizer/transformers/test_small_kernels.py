"""Liger-Kernel's kernels, in Triton's interpreter: modules whose forwards they replace, and their numbers."""

from importlib.util import find_spec

import pytest
from python_process import run_functions

pytestmark = pytest.mark.skipif(
    not (find_spec("triton") and find_spec("liger_kernel")), reason="triton or liger-kernel is not installed"
)

# Models, and the kernels that a forward of them counts.
NORM, ROTARY, GATE = "RMS norm, Liger", "rotary positions, Liger", "SiLU gate, Liger"
ALL = {NORM, ROTARY, GATE}
MODELS = {"llama": ALL, "qwen3": ALL, "mistral": ALL, "gemma3_text": {NORM, ROTARY}, "gpt_oss": {NORM}, "gpt2": set()}


def forwards_are_the_librarys() -> None:
    """Logits are those of the library, and no forward stays on a module."""
    import liger_interpreted  # noqa: F401
    import torch
    from tiny_models import tiny, token_ids

    from fastgen.optimizer.decoding.call import generate_call
    from fastgen.optimizer.decoding.faster_forwards import faster_forwards, has_faster_forward
    from fastgen.optimizer.transformers import small_kernels

    for name, expected in MODELS.items():
        model, tokens = tiny(name).eval(), token_ids(2, 7)
        state = torch.get_rng_state()
        with torch.no_grad():
            stock = model(tokens, use_cache=False).logits
            with generate_call(name) as call:
                forwards = small_kernels.forwards_on_gpu(model.modules())
                with faster_forwards(call, {model: model.modules()}, forwards):
                    logits = model(tokens, use_cache=False).logits
        torch.testing.assert_close(logits, stock, atol=1e-4, rtol=1e-4)
        assert set(call.report.kernels) == expected, (name, call.report.kernels)
        assert torch.equal(torch.get_rng_state(), state)
        assert not any(map(has_faster_forward, model.modules()))


def classes_that_compute_something_else_keep_their_forward() -> None:
    import liger_interpreted  # noqa: F401
    import torch
    from torch import nn
    from torch.nn import functional
    from transformers.models.glm4 import modeling_glm4
    from transformers.models.hunyuan_vl import modeling_hunyuan_vl
    from transformers.models.qwen3 import modeling_qwen3

    from fastgen.optimizer.transformers import small_kernels

    class MeanNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-6

        def forward(self, rows):
            return self.weight * functional.normalize(rows - rows.mean(-1, keepdim=True), dim=-1) * 4

    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(16, 16) for _ in range(3))
            self.act_fn = nn.SiLU()

        def forward(self, rows):
            return self.down_proj(self.act_fn(self.up_proj(rows)) * self.gate_proj(rows))

    class ClampedGate(Gate):
        """A gate with a limit that random inputs do not reach, like that of DeepSeek-V4."""

        def forward(self, rows):
            return self.down_proj(self.act_fn(self.gate_proj(rows)).clamp(max=10) * self.up_proj(rows))

    assert small_kernels.forwards_on_gpu([MeanNorm(), Gate(), ClampedGate()]) == {}
    assert small_kernels._is_llamas(modeling_qwen3.apply_rotary_pos_emb)
    assert not small_kernels._is_llamas(modeling_hunyuan_vl.apply_rotary_pos_emb)
    assert not small_kernels._is_llamas(modeling_glm4.apply_rotary_pos_emb)


def a_norm_without_a_weight_keeps_its_forward() -> None:
    """Other modules of its class have one, as in Gemma 3n."""
    import liger_interpreted  # noqa: F401
    import torch
    from torch import nn
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm

    from fastgen.optimizer.decoding.call import generate_call
    from fastgen.optimizer.decoding.faster_forwards import faster_forwards
    from fastgen.optimizer.transformers import small_kernels

    norms = nn.Sequential(Gemma3nRMSNorm(16), Gemma3nRMSNorm(16, with_scale=False), Gemma3nRMSNorm(16))
    rows = torch.randn(3, 16)
    with torch.no_grad(), generate_call("norms") as call:
        expected = norms(rows)
        with faster_forwards(call, {norms: norms}, small_kernels.forwards_on_gpu(norms)):
            torch.testing.assert_close(norms(rows), expected)
    assert call.report.kernels[NORM] == 2


def norms_round_as_the_librarys() -> None:
    """Weights of the norms of Llama, Gemma and GPT-OSS in fp16: at most one unit of the last place from the library."""
    import liger_interpreted  # noqa: F401
    import torch
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    from fastgen.ops import liger
    from fastgen.optimizer.transformers import small_kernels

    for kind, norm in zip((LlamaRMSNorm, Gemma3RMSNorm, GptOssRMSNorm), liger.NORMS):
        module = kind(64).half().requires_grad_(False)
        module.weight.data = torch.randn(64).half()
        assert small_kernels.forwards_on_gpu([module])[kind].keywords == dict(zip(("offset", "rounds"), norm))
        rows = (3 * torch.randn(5, 64)).half()
        expected = module(rows)
        output = liger.rms_norm(rows, module.weight, 1e-6, *norm)
        torch.testing.assert_close(output, expected, rtol=2**-10, atol=1e-6)
        assert (output == expected).float().mean() > 0.95, kind


def test_forwards_with_liger_give_the_librarys_numbers():
    run_functions(__file__, "forwards_are_the_librarys", TRITON_INTERPRET="1")


def test_other_classes_keep_their_forward():
    compared = "classes_that_compute_something_else_keep_their_forward", "a_norm_without_a_weight_keeps_its_forward"
    run_functions(__file__, *compared, "norms_round_as_the_librarys", TRITON_INTERPRET="1")
