"""No-repeat-n-gram on a GPU: every implementation against the definition, in CUDA graphs, streams and devices."""

import ngram_definition as definition
import pytest
import torch
from hypothesis import given, settings
from ngram_definition import Case, wrapped
from versions import needs_gpu

from fastgen.ops.no_repeat_ngram import no_repeat_ngram, reference
from fastgen.ops.no_repeat_ngram.kernels import KERNELS, kernel_for

DEVICE = "cuda"

pytestmark = needs_gpu

ON_GPU = {kernel.name: kernel for kernel in KERNELS if kernel.device in ("", DEVICE)}


@pytest.fixture(params=ON_GPU, scope="module")
def ban(request):
    kernel = ON_GPU[request.param]
    if reasons := kernel.unsupported_reasons():
        assert not [reason for reason in reasons if "differs" in reason or "Error" in reason]
        pytest.skip(str(kernel))
    return kernel.run


@settings(definition.SETTINGS, max_examples=200)
@given(case=definition.cases() | definition.wide_cases())
def test_every_kernel_of_a_gpu_bans_as_defined(ban, case):
    definition.check(ban, case.to(DEVICE))


@pytest.mark.parametrize("ngram_size", [1, 3, 1000, 1 << 15])
def test_rows_of_32768_tokens_are_banned_on_a_gpu(ban, ngram_size):
    tokens = wrapped(range(1 << 9), 2, 1 << 15, torch.int32, shift=1)
    definition.check(ban, Case(tokens, torch.zeros(2, 1 << 9), ngram_size).to(DEVICE))


def test_a_gpu_takes_more_rows_than_its_grid_has(ban):
    tokens = torch.randint(0, 3, (70_000, 9), generator=torch.Generator().manual_seed(0))
    expected, scores = torch.zeros(70_000, 3), torch.zeros(70_000, 3, device=DEVICE)
    reference.ban(tokens, expected, 2, None, None)
    ban(tokens.to(DEVICE), scores, 2, None, None)
    assert torch.equal(scores.cpu(), expected)


@pytest.mark.parametrize("shape", [[], [3]], ids=["one length", "one a row"])
@pytest.mark.parametrize("with_encoder", [False, True])
def test_a_graph_sees_lengths_that_change(ban, shape, with_encoder):
    tokens = wrapped([0, 1, 2, 1], 3, 300, torch.int64, shift=1).to(DEVICE)
    encoder_tokens = tokens[:1].flip(1).contiguous() if with_encoder else None
    lengths = torch.zeros(shape, dtype=torch.int32, device=DEVICE)
    scores = torch.zeros(3, 5, device=DEVICE)

    def step() -> None:
        scores.zero_()
        ban(tokens, scores, 3, lengths, encoder_tokens)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # compiles the kernels that are compiled at their first use
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for length in (0, 2, 3, 7, 128, 300, 299, 5):
        lengths.fill_(length)
        graph.replay()
        expected = Case(tokens, torch.zeros_like(scores), 3, length, encoder_tokens).expected()
        assert torch.equal(scores, expected), length


def test_ngram_blocking_is_queued_on_the_current_stream(ban):
    """On another stream it would see the tokens before they are written."""
    tokens, scores = torch.zeros(2, 9, dtype=torch.int64, device=DEVICE), torch.zeros(2, 5, device=DEVICE)
    ban(tokens, scores.clone(), 2, None, None)
    wanted = wrapped([1, 2, 3], 2, 9, torch.int64).to(DEVICE)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        tokens.copy_(wanted)
        ban(tokens, scores, 2, None, None)
    stream.synchronize()
    assert scores.isinf().nonzero().tolist() == [[0, 1], [1, 1]]


def test_the_host_does_not_wait_for_ngram_blocking(ban):
    tokens, scores = wrapped([1, 2, 3], 2, 9, torch.int64).to(DEVICE), torch.zeros(2, 5, device=DEVICE)
    lengths = torch.tensor([9, 8], device=DEVICE)
    ban(tokens, scores, 2, lengths, None)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(1_000_000_000)
        after = torch.cuda.Event()
        ban(tokens, scores, 2, lengths, None)
        after.record()
        assert not after.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs: nothing was banned on a second one")
def test_ngrams_are_banned_on_another_device(ban):
    case = Case(wrapped([1, 2, 3], 2, 9, torch.int64), torch.zeros(2, 5), 2).to("cuda:1")
    torch.cuda.synchronize("cuda:1")
    definition.check(ban, case)
    assert torch.cuda.current_device() == 0


def test_the_op_uses_the_first_kernel_that_can_run():
    usable = [kernel for kernel in ON_GPU.values() if not kernel.unsupported_reasons()]
    assert kernel_for(DEVICE) is usable[0]
    tokens, scores = torch.tensor([[1, 2, 1]], device=DEVICE), torch.zeros(1, 4, device=DEVICE)
    assert no_repeat_ngram(tokens, scores, 2).isinf().tolist() == [[False, False, True, False]]
    op = torch.ops.fastgen.no_repeat_ngram_.default
    torch.library.opcheck(op, (tokens, scores, 2, torch.tensor(3, device=DEVICE)))
