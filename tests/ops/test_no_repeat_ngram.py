"""The op no-repeat-n-gram: what it bans, its two forms, what torch knows of it, and which implementation runs."""

from __future__ import annotations

import ctypes
from importlib.machinery import ModuleSpec

import ngram_definition as definition
import pytest
import torch
from hypothesis import given, settings
from ngram_definition import Case, buffer, on, same, wrapped
from torch.fx.experimental.proxy_tensor import make_fx

from fastgen import ops
from fastgen.config import CONFIG
from fastgen.ops import load, load_reasons
from fastgen.ops.kernel import Kernel, gpu_reasons
from fastgen.ops.no_repeat_ngram import kernels, no_repeat_ngram, no_repeat_ngram_, reference
from fastgen.ops.no_repeat_ngram.kernels import kernel_for, kernel_of

CASES = settings(definition.SETTINGS, max_examples=120)
FORMS = [no_repeat_ngram_, no_repeat_ngram]
OPS = [torch.ops.fastgen.no_repeat_ngram_.default, torch.ops.fastgen.no_repeat_ngram.default]


def banned(scores: torch.Tensor) -> list[list[int]]:
    return [(row == -torch.inf).nonzero().flatten().tolist() for row in scores]


def test_tokens_that_would_complete_an_ngram_again_are_banned():
    tokens = torch.tensor([[1, 2, 3, 1, 2], [4, 4, 4, 4, 4], [1, 2, 3, 4, 5]])
    scores = torch.zeros(3, 6)
    assert banned(no_repeat_ngram(tokens, scores, 3)) == [[3], [4], []]
    assert banned(no_repeat_ngram(tokens, scores, 1)) == [[1, 2, 3], [4], [1, 2, 3, 4, 5]]
    assert banned(no_repeat_ngram(tokens, scores, 6)) == [[], [], []]


def test_tokens_behind_the_length_do_not_count():
    tokens = torch.tensor([[1, 2, 1, 3, 1], [1, 2, 1, 3, 1]])
    scores = torch.zeros(2, 4)
    assert banned(no_repeat_ngram(tokens, scores, 2)) == [[2, 3], [2, 3]]
    for lengths in (3, torch.tensor(3), torch.tensor(3, dtype=torch.int32), torch.tensor([3, 3])):
        assert banned(no_repeat_ngram(tokens, scores, 2, lengths)) == [[2], [2]]
    assert banned(no_repeat_ngram(tokens, scores, 2, torch.tensor([1, 5]))) == [[], [2, 3]]
    assert banned(no_repeat_ngram(tokens, scores, 1, 0)) == [[], []]


def test_lengths_on_a_device_count_as_the_nearest_possible():
    tokens = torch.tensor([[1, 2, 1], [1, 2, 1]])
    assert banned(no_repeat_ngram(tokens, torch.zeros(2, 4), 1, torch.tensor([-5, 99]))) == [[], [1, 2]]


def test_beams_share_the_ngrams_of_their_input():
    encoder_tokens = torch.tensor([[1, 2, 3], [1, 3, 2]])
    tokens = torch.tensor([[7, 1], [7, 2], [7, 1], [7, 3]])
    scores = torch.zeros(4, 4)
    assert banned(no_repeat_ngram(tokens, scores, 2, None, encoder_tokens)) == [[2], [3], [3], [2]]
    assert banned(no_repeat_ngram(tokens, scores, 2, 0, encoder_tokens)) == [[], [], [], []]
    assert banned(no_repeat_ngram(tokens, scores, 1, 0, encoder_tokens)) == [[1, 2, 3]] * 4


@CASES
@given(case=definition.cases())
def test_in_place_the_scores_are_written_and_returned(case):
    expected = case.expected()
    assert no_repeat_ngram_(*case.arguments()) is case.scores
    assert same(buffer(case.scores), buffer(expected))


@CASES
@given(case=definition.cases())
def test_the_functional_form_leaves_the_scores_as_they_are(case):
    expected, before = case.expected(), on("cpu", case.scores)
    found = no_repeat_ngram(*case.arguments())
    assert same(found, expected.contiguous()) and found.is_contiguous()
    assert same(buffer(case.scores), buffer(before))
    assert not found.numel() or found.data_ptr() != case.scores.data_ptr()


@pytest.mark.parametrize("ngram_size", [1, 2, 1 << 14, 1 << 15, (1 << 15) + 1])
def test_rows_of_32768_tokens_and_ngrams_as_long(ngram_size):
    case = Case(wrapped(range(1 << 10), 2, 1 << 15, torch.int32, shift=1), torch.zeros(2, 1 << 10), ngram_size)
    expected = case.expected()
    assert same(no_repeat_ngram_(*case.arguments()), expected)


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_many_rows_on_the_threads_of_torch(four_threads, monkeypatch):
    asked = []
    if not load_reasons(kernels.CPU):
        run = kernels._cpu()
        monkeypatch.setattr(
            kernels, "_cpu", lambda: lambda problem, threads: asked.append(threads) or run(problem, threads)
        )
    case = Case(wrapped([0, 1, 2, 1, 3], 13, 1 << 15, torch.int64, shift=1), torch.zeros(13, 5), 3)
    expected = case.expected()
    assert same(no_repeat_ngram_(*case.arguments()), expected)
    assert set(asked) == {4} or load_reasons(kernels.CPU)


ACCEPTED = (
    (torch.tensor([[1, 2, 1], [3, 3, 3]]), torch.zeros(2, 4), 2),
    (torch.tensor([[1, 2, 1]]), torch.zeros(1, 4), 1, torch.tensor(2)),
    (torch.zeros(2, 4, dtype=torch.int32), torch.zeros(4, 2).half().t(), 2, None, torch.tensor([[0, 1]]).int()),
    (torch.zeros(0, 4, dtype=torch.int32), torch.zeros(0, 2), 9),
)


class TestForTorch:
    """What torch knows of the ops: for compilers, graphs and autograd."""

    @pytest.mark.parametrize("arguments", ACCEPTED, ids=["plain", "length", "encoder tokens, transposed", "empty"])
    @pytest.mark.parametrize("op", OPS)
    def test_schema_fake_and_autograd_are_right(self, op, arguments):
        torch.library.opcheck(op, arguments)

    def test_graphs_hold_the_op(self):
        tokens, scores = torch.tensor([[1, 2, 1, 3]]), torch.zeros(1, 4)
        for length in (lambda tokens: 3, lambda tokens: tokens.shape[1] - 1):
            graph = make_fx(lambda *both, n=length: no_repeat_ngram(*both, 2, n(both[0])), tracing_mode="symbolic")
            traced = graph(tokens, scores)
            assert torch.ops.fastgen.no_repeat_ngram.default in [node.target for node in traced.graph.nodes]
            assert banned(traced(tokens, scores)) == [[2]]

    @pytest.mark.parametrize("form", FORMS)
    def test_it_compiles_with_lengths_that_change(self, form):
        compiled = torch.compile(form, backend="aot_eager", fullgraph=True, dynamic=True)
        tokens = torch.tensor([[1, 2, 1, 3, 1]])
        for length in (3, 4, 5):
            for lengths in (length, torch.tensor(length)):
                expected = no_repeat_ngram(tokens, torch.zeros(1, 4), 2, lengths)
                assert torch.equal(compiled(tokens, torch.zeros(1, 4), 2, lengths), expected)

    def test_autograd_sees_that_scores_were_written(self):
        tokens, scores = torch.tensor([[1, 2, 1]]), torch.ones(1, 4)
        weight = torch.ones(1, 4, requires_grad=True)
        loss = (weight * scores).sum()
        no_repeat_ngram(tokens, scores, 2)
        assert scores._version == 0
        no_repeat_ngram_(tokens, scores, 2)
        assert scores._version == 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_scores_that_require_gradients_are_taken_where_none_are_recorded(self):
        tokens, scores = torch.tensor([[1, 2, 1]]), torch.ones(1, 4, requires_grad=True)
        with torch.no_grad():
            assert banned(no_repeat_ngram(tokens, scores, 2)) == [[2]]
            assert banned(no_repeat_ngram_(tokens, scores, 2)) == [[2]]

    def test_ngrams_are_blocked_in_inference_mode(self):
        tokens, outside = torch.tensor([[1, 2, 1]]), torch.zeros(1, 4)
        with torch.inference_mode():
            for scores in (torch.zeros(1, 4), outside):
                assert banned(no_repeat_ngram(tokens, scores, 2)) == [[2]]
                assert banned(no_repeat_ngram_(tokens, scores, 2)) == [[2]]


class TestChoice:
    """The first implementation that runs on the device and gives what torch gives."""

    @pytest.fixture(autouse=True)
    def _forget(self):
        caches = (kernels._proven_reasons, kernels._kernel_for, load, kernels._cpu)
        for cache in caches:
            cache.cache_clear()
        yield
        for cache in caches:
            cache.cache_clear()

    @pytest.fixture
    def first(self, monkeypatch):
        """Puts a variant of the C++ kernel before all others."""

        def put(ban=kernels.ban_on_cpu, device="cpu", machine_reasons=list) -> Kernel:
            variant = kernel_of("first", device, machine_reasons, ban)
            monkeypatch.setattr(kernels, "KERNELS", (variant, kernels.KERNELS[-1]))
            return variant

        return put

    def test_what_was_built_is_used(self):
        expected = "torch" if load_reasons(kernels.CPU) else "C++"
        assert kernel_for("cpu").name == expected
        assert kernel_for("mps").name == "torch"

    def test_an_implementation_that_works_is_used_and_was_tried_once(self, first):
        calls = []
        works = first(ban=lambda *arguments: calls.append(len(arguments)) or reference.ban(*arguments))
        scores = torch.zeros(1, 4)
        for _ in range(3):
            assert kernel_for("cpu") is works and not works.unsupported_reasons()
            no_repeat_ngram_(torch.tensor([[1, 2, 1]]), scores, 2)
        assert calls == [5] * 4 and banned(scores) == [[2]]

    def test_an_implementation_that_gives_something_else_is_not_used(self, first):
        wrong = first(ban=lambda tokens, scores, *others: scores.fill_(-torch.inf))
        assert wrong.unsupported_reasons() == ["differs from torch on cpu"]
        assert kernel_for("cpu").name == "torch"
        assert banned(no_repeat_ngram(torch.tensor([[1, 2, 1]]), torch.zeros(1, 4), 2)) == [[2]]

    def test_an_implementation_that_does_nothing_is_not_used(self, first):
        assert first(ban=lambda *arguments: None).unsupported_reasons() == ["differs from torch on cpu"]

    def test_an_implementation_that_raises_is_not_used(self, first):
        def ban(*arguments):
            raise RuntimeError("no kernel image is available for execution on the device")

        wanted = ["RuntimeError: no kernel image is available for execution on the device"]
        assert first(ban=ban).unsupported_reasons() == wanted
        assert kernel_for("cpu").name == "torch"

    def test_kernels_for_a_gpu_wait_for_the_switch(self, first, monkeypatch):
        kernel, tried = first(device="cuda", machine_reasons=gpu_reasons), []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(kernels, "_proven_reasons", lambda *arguments: tried.append(arguments) or [])
        monkeypatch.setattr(CONFIG, "cuda_kernels", False)
        assert kernel_for("cuda").name == "torch" and not tried
        assert kernel.unsupported_reasons() == ["FASTGEN_CUDA_KERNELS=0"]
        monkeypatch.setattr(CONFIG, "cuda_kernels", True)
        assert kernel_for("cuda") is kernel and len(tried) == 1

    def test_a_library_that_was_not_built(self, first):
        missing = first(machine_reasons=lambda: load_reasons("fastgen.ops._missing"))
        assert missing.unsupported_reasons() == ["not built"]
        assert kernel_for("cpu").name == "torch"
        with pytest.raises(OSError, match="not built"):
            load("fastgen.ops._missing")

    def test_a_library_that_cannot_be_loaded(self, first, tmp_path, monkeypatch):
        path = tmp_path / "_cpu.so"
        path.write_bytes(b"no library" * 10)
        monkeypatch.setattr(ops, "find_spec", lambda name: ModuleSpec(name, None, origin=str(path)))
        [reason] = first(machine_reasons=lambda: load_reasons(kernels.CPU)).unsupported_reasons()
        assert str(path) in reason
        assert kernel_for("cpu").name == "torch"

    def test_a_library_without_the_function(self, first, monkeypatch):
        monkeypatch.setattr(kernels, "load", lambda name: ctypes.CDLL(None))
        [reason] = first().unsupported_reasons()
        assert reason.startswith("AttributeError: ") and "fastgen_no_repeat_ngram_cpu" in reason

    def test_the_report_lists_them_with_their_reasons(self):
        found = {kernel.name: kernel.unsupported_reasons() for kernel in ops.kernels()["no-repeat n-gram"]}
        assert list(found) == ["CUDA", "Triton", "C++", "torch"]
        assert found["torch"] == [] and found["C++"] == load_reasons(kernels.CPU)
        if not torch.cuda.is_available():
            assert found["Triton"] == ["torch finds no GPU"]
            assert found["CUDA"] in (["torch finds no GPU"], ["not built"])
