"""Other engines beside stock transformers and fastgen: the same weights, lengths and threads, in turns in one run.

    python benchmarks/peers.py [CASE …] [--peers NAME …] [--repeats 3] [--lock FILE] [--json FILE]
    python benchmarks/peers.py --install ENVIRONMENT

The file of --json is written after each case, and keeps the results of other cases that it has.

PEERS below says which there are, in which dtype, and what each cannot do. A peer runs in a process and, but for
transformers' own `generate_batch`, in a virtual environment of its own, which --install makes (peer_process.py). One
that cannot do a case, or is not installed, has a reason in place of a figure. pip has to find torch's CPU builds: with
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu, for instance.

Seconds are medians. The order rotates from turn to turn; between two calls lies a pause, so that no threads of the one
still spin in the other. Outputs are compared with stock's, row by row, where the search is no sampling. "other numbers"
are dtypes that change what is generated.

--lock takes the file that flock(1) would: shared while models are loaded, exclusive during each turn.
"""

from __future__ import annotations

import fcntl
import json
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from bench_recordings import SETTINGS as RECORDING
from bench_recordings import recordings, segments, transcriber
from clock import medians
from generate_cases import CASES as GENERATE_CASES
from generate_cases import Case, Inputs, llama_like
from harness import commit, finish, parse_flags, parser_of
from machine import print_head
from peer_process import Answer, Environment, PeerError, PeerProcess, Tokens, write_task
from show_peers import FASTGEN_BFLOAT16, OTHER_NUMBERS

import fastgen

PAUSE = 0.3  # seconds


@dataclass(frozen=True)
class Peer:
    """An engine in one dtype. cannot: reasons by case; other_numbers: the dtype changes what is generated.

    variables: of its process's environment.
    """

    name: str
    dtype: str
    environment: Environment
    program: str
    cannot: Mapping[str, str]
    other_numbers: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.name} {self.dtype}{OTHER_NUMBERS * self.other_numbers}"

    def start(self, case: str, folder: Path) -> PeerProcess:
        """folder: what `write_task` has written. Raises PeerError with the reason where it cannot do the case."""
        if case in self.cannot:
            raise PeerError(self.cannot[case])
        threads = torch.get_num_threads()
        return PeerProcess(self.environment, self.program, folder, self.dtype, threads, self.variables)


def llama_prefix() -> tuple[torch.nn.Module, Inputs]:
    """8 inputs that begin with the same 1,024 tokens, before 32 of their own."""
    model, _ = llama_like()
    prefix = torch.randint(10, model.config.vocab_size, (1, 1024)).expand(8, -1)
    return model, {"input_ids": torch.cat([prefix, torch.randint(10, model.config.vocab_size, (8, 32))], dim=1)}


def long_recordings() -> tuple[torch.nn.Module, Inputs]:
    """2 recordings of 90 s."""
    model = transcriber()
    return model, {"input_features": recordings(model, 90)}


_MEASURED = ("bart-beam4", "t5-beam4", "whisper-beam5", "gpt2-beam4", "gpt2-sample16", "llama-sample16")
CASES = {name: GENERATE_CASES[name] for name in _MEASURED} | {
    "prefix-sample4": Case(llama_prefix, {"num_return_sequences": 4, "do_sample": True, "max_new_tokens": 16}),
    "prefix-greedy": Case(llama_prefix, {"do_sample": False, "max_new_tokens": 16}),
    "recordings": Case(long_recordings, RECORDING),
}
_ENCODER_DECODERS = ("bart-beam4", "t5-beam4", "whisper-beam5")
_DECODER_ONLY = ("gpt2-beam4", "gpt2-sample16", "llama-sample16", "prefix-sample4", "prefix-greedy")
_CTRANSLATE2 = {
    "llama-sample16": "one call takes more than 90 s: prompts beyond the shortest are decoded token by token",
    "recordings": "hears windows of 30 s; faster-whisper cuts recordings into such windows for CTranslate2",
}
_OPENVINO = dict.fromkeys(_DECODER_ONLY, "not measured: vLLM stands for continuous batching of decoder-only models") | {
    "recordings": "not measured: OpenVINO's Whisper is measured in windows of 30 s"
}
_VLLM = {
    "bart-beam4": "vLLM 0.32 has no BART without a plugin",
    "t5-beam4": "vLLM 0.32 has no T5",
    **dict.fromkeys(
        ("whisper-beam5", "gpt2-beam4", "recordings"),
        "its beam search asks for a tokenizer, which models of random weights have not",
    ),
}
_GENERATE_BATCH = dict.fromkeys((*_ENCODER_DECODERS, "recordings"), "takes decoder-only models") | {
    "gpt2-beam4": "has no beam search"
}
_FASTER_WHISPER = dict.fromkeys((*_ENCODER_DECODERS, *_DECODER_ONLY), "transcribes recordings only")

CTRANSLATE2, OPENVINO, VLLM, OWN = map(Environment, ("ctranslate2", "openvino", "vllm", ""))
CTRANSLATE2_FLOAT32 = Peer("CTranslate2", "float32", CTRANSLATE2, "run_ctranslate2.py", _CTRANSLATE2)
# On some CPUs with AVX-512 its products are faster without.
IN_AVX2 = dict.fromkeys(("CT2_FORCE_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA"), "AVX2")
PEERS = (
    CTRANSLATE2_FLOAT32,
    replace(CTRANSLATE2_FLOAT32, name="CTranslate2 in AVX2", variables=IN_AVX2),
    Peer("CTranslate2", "bfloat16", CTRANSLATE2, "run_ctranslate2.py", _CTRANSLATE2, other_numbers=True),
    Peer("CTranslate2", "int8", CTRANSLATE2, "run_ctranslate2.py", _CTRANSLATE2, other_numbers=True),
    Peer("OpenVINO", "float32", OPENVINO, "run_openvino.py", _OPENVINO),
    Peer("OpenVINO", "bfloat16", OPENVINO, "run_openvino.py", _OPENVINO, other_numbers=True),
    Peer("vLLM", "float32", VLLM, "run_vllm.py", _VLLM),
    Peer("generate_batch", "float32", OWN, "run_generate_batch.py", _GENERATE_BATCH),
    Peer("faster-whisper", "float32", CTRANSLATE2, "run_faster_whisper.py", _FASTER_WHISPER),
)


class Library:
    """transformers in this process, with fastgen or without."""

    def __init__(self, case: str, model: Any, inputs: Inputs, arguments: Mapping[str, Any], dtype: torch.dtype) -> None:
        self.case, self.arguments = case, arguments
        self.model = model if model.dtype == dtype else deepcopy(model).to(dtype)
        self.inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}

    def fastgen(self) -> Answer:
        torch.manual_seed(1)
        begun = time.perf_counter()
        tokens = self._tokens()
        return Answer(time.perf_counter() - begun, tokens)

    def stock(self) -> Answer:
        with fastgen.disabled():
            return self.fastgen()

    def _tokens(self) -> Tokens:
        if self.case == "recordings":
            found = segments(self.model, self.inputs["input_features"])
            return [[token for *_, tokens in recording for token in tokens] for recording in found]
        return self.model.generate(**self.inputs, **self.arguments)[:, -self.arguments["max_new_tokens"] :].tolist()


class Lock:
    """flock(1)'s lock on a file, so that benchmarks on one machine wait for each other; none without a file."""

    def __init__(self, path: str | None) -> None:
        self._file = open(path, "ab") if path else None  # noqa: SIM115 (it is held until the program ends)

    @contextmanager
    def hold(self, kind: int) -> Iterator[None]:
        """kind: fcntl.LOCK_SH or LOCK_EX."""
        if self._file:
            fcntl.flock(self._file, kind)
        try:
            yield
        finally:
            if self._file:
                fcntl.flock(self._file, fcntl.LOCK_UN)


Way = Callable[[], Answer]


def arguments_of(case: Case) -> dict[str, Any]:
    """Those of `generate`, with what is a default of transformers and not of others."""
    defaults = {"top_k": 50} if case.arguments["do_sample"] else {}
    return {"max_new_tokens": 32, "eos_token_id": None, **defaults, **case.arguments}


def prepared(name: str) -> tuple[Any, Inputs, dict[str, Any]]:
    """The model of a case, inputs with their mask, and arguments."""
    torch.manual_seed(0)
    case = CASES[name]
    model, inputs = case.make()
    if "input_ids" in inputs:
        inputs = {"attention_mask": torch.ones_like(inputs["input_ids"]), **inputs}
    return model.eval(), inputs, arguments_of(case)


def measure(name: str, peers: tuple[Peer, ...], repeats: int, lock: Lock) -> dict[str, Any]:
    """Seconds of all ways in all turns, who generates stock's tokens, and reasons of peers that have no figure."""
    model, inputs, arguments = prepared(name)
    reasons: dict[str, str] = {}
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        float32 = Library(name, model, inputs, arguments, torch.float32)
        bfloat16 = Library(name, model, inputs, arguments, torch.bfloat16)
        ways = {"fastgen": float32.fastgen, "stock": float32.stock, FASTGEN_BFLOAT16: bfloat16.fastgen}
        with lock.hold(fcntl.LOCK_SH):
            write_task(Path(folder), model, inputs, arguments)
            for peer in peers:
                try:
                    process = peer.start(name, Path(folder))
                except PeerError as error:
                    reasons[peer.title] = str(error)
                    continue
                stack.enter_context(process)
                ways[peer.title] = process.generate
                versions |= process.versions
        turns, tokens = in_turns(ways, repeats, lock, reasons)
    seconds = medians(turns)
    return {
        "case": name,
        "seconds": seconds,
        "turns": {way: [turn[way] for turn in turns] for way in seconds},
        "ratios": {way: statistics.median(turn[way] / turn["fastgen"] for turn in turns) for way in seconds},
        "equal": tokens["stock"] == tokens["fastgen"],
        "rows_equal": {} if arguments["do_sample"] else rows_equal(tokens),
        "new_tokens": {way: sum(map(len, rows)) for way, rows in tokens.items()},
        "reasons": reasons,
        "versions": versions,
    }


def in_turns(
    ways: dict[str, Way], repeats: int, lock: Lock, reasons: dict[str, str]
) -> tuple[list[dict[str, float]], dict[str, Tokens]]:
    """Seconds of each turn, and the tokens of the last. A peer that fails leaves the ways, with its reason.

    All but stock, which prepares nothing, are called once before.
    """
    turns: list[dict[str, float]] = []
    tokens: dict[str, Tokens] = {}
    for turn in range(repeats + 1):
        order = [*ways][turn % len(ways) :] + [*ways][: turn % len(ways)]
        seconds = {}
        with lock.hold(fcntl.LOCK_EX):
            for way in order if turn else [way for way in order if way != "stock"]:
                time.sleep(PAUSE)
                try:
                    seconds[way], tokens[way] = ways[way]()
                except PeerError as error:
                    reasons[way] = str(error)
        for way in reasons.keys() & ways.keys():
            del ways[way]
        turns.append(seconds)
    return [{way: turn[way] for way in ways} for turn in turns[1:]], tokens


def rows_equal(tokens: Mapping[str, Tokens]) -> dict[str, str]:
    """Of each way but stock: how many of its rows are stock's."""
    stock = tokens["stock"]
    return {
        way: f"{sum(a == b for a, b in zip(rows, stock))} of {len(stock)}"
        for way, rows in tokens.items()
        if way != "stock"
    }


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Of one case: the fastest way first, then reasons."""
    yield f"{result['case']}:"
    for way, seconds in sorted(result["seconds"].items(), key=lambda item: item[1]):
        ratio = f"{result['ratios'][way]:5.2f} of fastgen's"
        equal, tokens = result["rows_equal"].get(way, "-"), result["new_tokens"][way]
        yield f"  {way:33} {seconds:8.2f} s {ratio}, rows equal: {equal}, {tokens} tokens"
    yield from (f"  {peer:33}        - {reason}" for peer, reason in result["reasons"].items())


def parse(argv: list[str] | None) -> Namespace:
    parser = parser_of(__doc__, CASES)
    names = list(dict.fromkeys(peer.name for peer in PEERS))
    parser.add_argument("--peers", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {names}")
    parser.add_argument("--lock", metavar="FILE", help="hold flock(1)'s lock on it during each turn")
    environments = [one.name for one in (CTRANSLATE2, OPENVINO, VLLM)]
    parser.add_argument("--install", choices=environments, help="make this virtual environment, and measure nothing")
    return parse_flags(parser, argv, "peers", CASES)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.install:
        Environment(args.install).install()
        return 0
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print_head()
    lock, missed = Lock(args.lock), []
    results, versions = measured_before(args.json)
    for name in args.cases:
        result = measure(name, tuple(peer for peer in PEERS if peer.name in args.peers), args.repeats, lock)
        print("\n".join(lines(result)), flush=True)
        versions |= result.pop("versions")
        results[name] = {"commit": commit(), **result}
        if not result["equal"]:
            missed.append(f"{name}: outputs differ")
        finish(args, list(results.values()), [], peer_versions=versions)
    print("\n".join(missed), end="\n" * bool(missed))
    return int(bool(missed))


def measured_before(path: str | None) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The results of a file by case, and the versions of its peers; nothing without a file."""
    if path is None or not Path(path).exists():
        return {}, {}
    told = json.loads(Path(path).read_text(encoding="utf-8"))
    return {result["case"]: result for result in told["results"]}, told["peer_versions"]


if __name__ == "__main__":
    raise SystemExit(main())
