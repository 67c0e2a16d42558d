"""The op no-repeat-n-gram: what it bans and refuses, its two forms, what torch knows of it, and which kernel runs."""

import re
from importlib import import_module
from importlib.machinery import ModuleSpec
from unittest import mock

import ngram_definition as definition
import pytest
import torch
from hypothesis import given, settings
from ngram_definition import buffer, on, same

from fastgen import ops
from fastgen.config import CONFIG
from fastgen.ops import load, load_reasons
from fastgen.ops.kernel import Kernel, gpu_reasons
from fastgen.ops.no_repeat_ngram import kernels, no_repeat_ngram, no_repeat_ngram_, reference
from fastgen.ops.no_repeat_ngram.kernels import kernel_for, kernel_of

FORMS = [no_repeat_ngram_, no_repeat_ngram]
OP = torch.ops.fastgen.no_repeat_ngram_.default
TOKENS = torch.tensor([[1, 2, 3, 1, 2], [4, 4, 4, 4, 4], [1, 2, 3, 4, 5]])
ALIKE = torch.tensor([[1, 2, 1, 3, 1], [1, 2, 1, 3, 1]])
BEAMS = torch.tensor([[7, 1], [7, 2], [7, 1], [7, 3]])
SOURCES = torch.tensor([[1, 2, 3], [1, 3, 2]])


def banned(scores: torch.Tensor) -> list[list[int]]:
    return [(row == -torch.inf).nonzero().flatten().tolist() for row in scores]


# tokens, n, lengths, tokens of the encoder, and what is banned in each row
EXAMPLES = [
    (TOKENS, 3, None, None, [[3], [4], []]),
    (TOKENS, 1, None, None, [[1, 2, 3], [4], [1, 2, 3, 4, 5]]),
    (TOKENS, 6, None, None, [[], [], []]),
    (ALIKE, 2, None, None, [[2, 3], [2, 3]]),
    *((ALIKE, 2, lengths, None, [[2], [2]]) for lengths in (3, torch.tensor(3), torch.tensor([3, 3]).int())),
    (ALIKE, 2, torch.tensor([1, 5]), None, [[], [2, 3]]),
    (ALIKE, 1, 0, None, [[], []]),
    (ALIKE, 1, torch.tensor([-5, 99]), None, [[], [1, 2, 3]]),  # those of a tensor count as the nearest possible
    (BEAMS, 2, None, SOURCES, [[2], [3], [3], [2]]),
    (BEAMS, 2, 0, SOURCES, [[], [], [], []]),
    (BEAMS, 1, 0, SOURCES, [[1, 2, 3]] * 4),
]


@pytest.mark.parametrize(("tokens", "ngram_size", "lengths", "encoder_tokens", "expected"), EXAMPLES)
def test_tokens_that_would_repeat_an_ngram_are_banned(tokens, ngram_size, lengths, encoder_tokens, expected):
    scores = torch.zeros(len(tokens), 8)
    assert banned(no_repeat_ngram(tokens, scores, ngram_size, lengths, encoder_tokens)) == expected


@settings(definition.SETTINGS, max_examples=120)
@given(case=definition.cases())
def test_one_form_writes_the_scores_and_one_copies_them(case):
    expected, before = case.expected(), on("cpu", case.scores)
    new = no_repeat_ngram(*case.arguments())
    assert same(new, expected.contiguous()) and new.is_contiguous()
    assert same(buffer(case.scores), buffer(before))
    assert not new.numel() or new.data_ptr() != case.scores.data_ptr()
    assert no_repeat_ngram_(*case.arguments()) is case.scores
    assert same(buffer(case.scores), buffer(expected))


@pytest.mark.skipif(bool(load_reasons(kernels.CPU)), reason=f"C++: {load_reasons(kernels.CPU)}")
def test_the_kernel_in_cpp_may_use_the_threads_of_torch(monkeypatch):
    granted, run = [], kernels._cpu()
    monkeypatch.setattr(
        kernels, "_cpu", lambda: lambda problem, threads: granted.append(threads) or run(problem, threads)
    )
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert banned(no_repeat_ngram(TOKENS, torch.zeros(3, 6), 3)) == [[3], [4], []]
    assert set(granted) == {4}


ELSEWHERE, LENGTHS = ("tokens", "lengths", "encoder_tokens"), "int, tensor of int32 or int64, None"
# Changes that make accepted arguments invalid, and the error without the argument's name.
CHANGES = (
    *((name, lambda old: old.to("meta"), "is on meta (accepted: cpu, as scores)") for name in ELSEWHERE),
    *(("ngram_size", lambda old, size=size: size, f"is {size} (accepted: 1 or more)") for size in (0, -3)),
    *(("lengths", lambda old, n=n: n, f"is {n} (accepted: 0 to 5, the width of tokens)") for n in (6, -1)),
    *(("lengths", lambda old, t=t: t(), f"is of type {t.__name__} (accepted: {LENGTHS})") for t in (list, float, bool)),
    ("tokens", lambda old: old.tolist(), "is of type list (accepted: Tensor)"),
    ("tokens", lambda old: old.short(), "has dtype int16 (accepted: int32, int64)"),
    ("tokens", lambda old: old.float(), "has dtype float32 (accepted: int32, int64)"),
    ("tokens", lambda old: old[0], "has shape [5] (accepted: [rows, width])"),
    ("scores", lambda old: None, "is of type NoneType (accepted: Tensor)"),
    ("scores", lambda old: old.double(), "has dtype float64 (accepted: float32, float16, bfloat16)"),
    ("scores", lambda old: old[None], "has shape [1, 4, 7] (accepted: [rows, vocabulary_size])"),
    ("scores", lambda old: old[:3], "has 3 rows (accepted: 4, as tokens)"),
    (
        "scores",
        lambda old: old.requires_grad_(),
        "requires gradients (accepted: scores that do not, or a call under torch.no_grad())",
    ),
    ("ngram_size", lambda old: 2.0, "is of type float (accepted: int)"),
    ("ngram_size", lambda old: True, "is of type bool (accepted: int)"),
    ("lengths", lambda old: old.half(), "has dtype float16 (accepted: int32, int64)"),
    ("lengths", lambda old: old[:1], "has shape [1] (accepted: [] or [4])"),
    ("lengths", lambda old: old[:, None], "has shape [4, 1] (accepted: [] or [4])"),
    ("encoder_tokens", lambda old: [[1]], "is of type list (accepted: Tensor, None)"),
    ("encoder_tokens", lambda old: old.int(), "has dtype int32 (accepted: int64)"),
    ("encoder_tokens", lambda old: old[0], "has shape [5] (accepted: [rows / beams, source_width])"),
    ("encoder_tokens", lambda old: old.new_zeros(3, 5), "has 3 rows (accepted: a divisor of 4, the rows of tokens)"),
    ("encoder_tokens", lambda old: old[:0], "has 0 rows (accepted: a divisor of 4, the rows of tokens)"),
)
# torch itself refuses arguments of its ops that are no tensor or no int, and takes a length as a tensor only.
CALLS = [(form, *change) for form in FORMS for change in CHANGES]
CALLS += [(OP, *change) for change in CHANGES if not re.search("is of type|0 to 5", change[2])]
SHARING_MEMORY = (
    (lambda old: old[:1].expand(4, 7), "is expanded along dimension 0 (accepted: scores with memory of their own)"),
    (lambda old: old[:, :1].expand(4, 7), "is expanded along dimension 1 (accepted: scores with memory of their own)"),
    (lambda old: old.as_strided((4, 7), (1, 1)), "has strides 1 and 1, rows overlap (accepted: rows that do not)"),
)


class TestChecks:
    """The error names the argument, its value and what would be accepted."""

    @pytest.fixture
    def arguments(self):
        return {
            "tokens": torch.zeros(4, 5, dtype=torch.int64),
            "scores": torch.zeros(4, 7),
            "ngram_size": 2,
            "lengths": torch.full((4,), 5),
            "encoder_tokens": torch.zeros(2, 5, dtype=torch.int64),
        }

    @pytest.mark.parametrize(("call", "name", "change", "message"), CALLS)
    def test_an_invalid_argument_is_named(self, call, name, change, message, arguments):
        call(**arguments)  # accepted as it is
        scores = arguments["scores"].zero_()
        arguments[name] = change(arguments[name])
        with pytest.raises(TypeError if "type" in message else ValueError) as raised:
            call(**arguments)
        assert str(raised.value) == f"{name} {message}"
        assert not scores.any()

    @pytest.mark.parametrize(("change", "message"), SHARING_MEMORY)
    def test_scores_that_share_memory_are_only_read(self, change, message, arguments):
        arguments["scores"] = change(arguments["scores"])
        with pytest.raises(ValueError) as raised:
            no_repeat_ngram_(**arguments)
        assert str(raised.value) == f"scores {message}"
        assert banned(no_repeat_ngram(**arguments)) == [[0]] * 4 and not arguments["scores"].any()

    @pytest.mark.parametrize("form", FORMS)
    def test_tensors_without_data_are_checked_too(self, form, arguments):
        without_data = {key: value.to("meta") if key != "ngram_size" else value for key, value in arguments.items()}
        assert form(**without_data).shape == (4, 7)
        with pytest.raises(ValueError, match="scores has 3 rows"):
            form(**without_data | {"scores": torch.zeros(3, 7, device="meta")})


ACCEPTED = (
    (torch.tensor([[1, 2, 1], [3, 3, 3]]), torch.zeros(2, 4), 2),
    (torch.tensor([[1, 2, 1]]), torch.zeros(1, 4), 1, torch.tensor(2)),
    (torch.zeros(2, 4, dtype=torch.int32), torch.zeros(4, 2).half().t(), 2, None, torch.tensor([[0, 1]]).int()),
    (torch.zeros(0, 4, dtype=torch.int32), torch.zeros(0, 2), 9),
)


class TestForTorch:
    """What torch knows of the op: for compilers, graphs and autograd."""

    @pytest.mark.parametrize("arguments", ACCEPTED, ids=["plain", "length", "encoder tokens, transposed", "empty"])
    def test_schema_fake_and_autograd_are_right(self, arguments):
        torch.library.opcheck(OP, arguments)

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
        assert scores._version > 0  # torch counts two writes, the kernel one
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    @pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
    @pytest.mark.parametrize("form", FORMS)
    def test_scores_may_require_gradients_if_none_are_recorded(self, form, context):
        recorded = torch.ones(1, 4, requires_grad=context is torch.no_grad)
        with context():
            for scores in (recorded, torch.zeros(1, 4)):
                assert banned(form(torch.tensor([[1, 2, 1]]), scores, 2)) == [[2]]


class TestChoice:
    """The first implementation is chosen that runs on the device and agrees with torch."""

    @pytest.fixture(autouse=True)
    def _forget(self):
        caches = (kernels.bans_as_torch, kernels._kernel_for, load, kernels._cpu)
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

    def test_the_kernel_that_was_built_is_used(self):
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

    @pytest.mark.parametrize(
        ("ban", "reason"),
        [
            (lambda tokens, scores, *others: scores.fill_(-torch.inf), "differs from torch on a CPU"),
            (lambda *arguments: None, "differs from torch on a CPU"),
            (lambda *arguments: 1 / 0, "ZeroDivisionError: division by zero"),
        ],
        ids=["bans all", "does nothing", "raises"],
    )
    def test_an_implementation_that_is_wrong_is_not_used(self, first, ban, reason):
        assert first(ban).unsupported_reasons() == [reason]
        assert kernel_for("cpu").name == "torch"
        assert banned(no_repeat_ngram(torch.tensor([[1, 2, 1]]), torch.zeros(1, 4), 2)) == [[2]]

    def test_devices_without_a_kernel_need_a_proof(self, monkeypatch):
        """The CPU stands for one; this machine has neither of those that are meant."""
        module = import_module("fastgen.ops.no_repeat_ngram")
        monkeypatch.setattr(module, "DEVICE_TYPES", ())
        monkeypatch.setattr(module, "BY_TORCH", ("cpu",))
        arguments = torch.tensor([[1, 2, 1]]), torch.zeros(1, 4)
        assert module.unsupported_reasons(*arguments) == []
        wrong = mock.Mock(ban=lambda tokens, scores, *others: scores.fill_(-torch.inf))
        monkeypatch.setattr(module, "reference", wrong)
        assert module.unsupported_reasons(*arguments) == ["differs from torch on a CPU"]
        for device in ("mps", "xpu"):
            [reason] = kernels.bans_as_torch.reasons(reference.ban, device)
            assert "Error: " in reason and "\n" not in reason

    def test_kernels_for_a_gpu_wait_for_the_switch(self, first, monkeypatch):
        kernel, tried = first(device="cuda", machine_reasons=gpu_reasons), []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(kernels.bans_as_torch, "reasons", lambda *arguments: tried.append(arguments) or [])
        monkeypatch.setattr(CONFIG, "cuda_kernels", False)
        assert kernel_for("cuda").name == "torch" and not tried
        assert kernel.unsupported_reasons() == ["FASTGEN_CUDA_KERNELS=0"]
        monkeypatch.setattr(CONFIG, "cuda_kernels", True)
        assert kernel_for("cuda") is kernel and len(tried) == 1

    def test_a_library_that_is_missing_or_broken_is_not_used(self, first, tmp_path, monkeypatch):
        assert load_reasons("fastgen.ops._missing") == ["not built"]
        path = tmp_path / "_cpu.so"
        path.write_bytes(b"no library" * 10)
        monkeypatch.setattr(ops, "find_spec", lambda name: ModuleSpec(name, None, origin=str(path)))
        [reason] = first(machine_reasons=lambda: load_reasons(kernels.CPU)).unsupported_reasons()
        assert str(path) in reason
        assert kernel_for("cpu").name == "torch"

    def test_the_report_lists_them_with_their_reasons(self):
        reasons = {kernel.name: kernel.unsupported_reasons() for kernel in ops.kernels()["no-repeat n-gram"]}
        assert list(reasons) == ["CUDA", "Triton", "C++", "torch"]
        assert reasons["torch"] == [] and reasons["C++"] == load_reasons(kernels.CPU)
        if not torch.cuda.is_available():
            assert reasons["Triton"] == ["torch finds no GPU"]
            assert reasons["CUDA"] in (["torch finds no GPU"], ["not built"])
