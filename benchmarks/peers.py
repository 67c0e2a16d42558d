"""Other engines on the same weights, in turns with stock and fastgen: which there are, and the processes that run them.

A peer runs a program of `peer_programs` (answer.py says what it answers) and, but for transformers' own
`generate_batch`, in a virtual environment of its own: the folder `.venv-NAME` of the checkout, with the packages of
peer_programs/NAME.txt, which `bench.py install NAME` makes. pip has to find torch's CPU builds: with
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu, for instance. A peer that cannot do a case, or is not
installed, has a reason instead of a figure. "other numbers" are dtypes that change what is generated.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from measure import Answer, Options, PeerError, Tokens, Ways

ROOT = Path(__file__).parent.parent
PROGRAMS = Path(__file__).parent / "peer_programs"
LONGEST_ANSWER, PAUSE = 900, 0.3  # seconds; the pause between calls lets the threads of a call stop spinning
OTHER_NUMBERS = ", other numbers"  # of a dtype that changes what is generated
FASTGEN_BFLOAT16 = f"fastgen bfloat16{OTHER_NUMBERS}"
# PyPI's builds of these need CUDA's libraries: with a CPU build of torch they cannot be imported.
_NEED_CUDA = ("torchaudio", "torchvision", "torchcodec")


@dataclass(frozen=True)
class Peer:
    """An engine in one dtype. environment: empty for this Python's; cannot: reasons by case.

    variables: of its process's environment.
    """

    name: str
    dtype: str
    environment: str
    program: str
    cannot: Mapping[str, str]
    other_numbers: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.name} {self.dtype}{OTHER_NUMBERS * self.other_numbers}"

    def start(self, case: str, folder: Path) -> PeerProcess:
        """Loads the model in `folder`. Raises PeerError with the reason why it cannot do the case."""
        if case in self.cannot:
            raise PeerError(self.cannot[case])
        return PeerProcess(self, folder, torch.get_num_threads())

    def python(self) -> str:
        """Returns its interpreter; raises PeerError if it is not installed."""
        if not self.environment:
            return sys.executable
        python = ROOT / f".venv-{self.environment}" / "bin" / "python"
        if not python.exists():
            raise PeerError(f"not installed: python benchmarks/bench.py install {self.environment}")
        return str(python)


_ENCODER_DECODERS = ("bart-beam4", "t5-beam4", "whisper-beam5")
_DECODER_ONLY = ("gpt2-beam4", "gpt2-sample16", "llama-sample16", "prefix-sample4", "prefix-greedy")
_CTRANSLATE2 = {
    "llama-sample16": (
        "one call takes more than 90 s: prompt tokens beyond the length of the shortest prompt are decoded one by one"
    ),
    "recordings": "processes windows of 30 s; faster-whisper cuts recordings into such windows for CTranslate2",
}
_OPENVINO = dict.fromkeys(_DECODER_ONLY, "not measured: vLLM already represents continuous batching here") | {
    "recordings": "not measured: OpenVINO's Whisper is measured in windows of 30 s"
}
_VLLM = {
    "bart-beam4": "vLLM 0.32 has no BART without a plugin",
    "t5-beam4": "vLLM 0.32 has no T5",
    **dict.fromkeys(
        ("whisper-beam5", "gpt2-beam4", "recordings"),
        "its beam search needs a tokenizer, and models with random weights have none",
    ),
}
_GENERATE_BATCH = dict.fromkeys((*_ENCODER_DECODERS, "recordings"), "takes decoder-only models") | {
    "gpt2-beam4": "has no beam search"
}
_FASTER_WHISPER = dict.fromkeys((*_ENCODER_DECODERS, *_DECODER_ONLY), "transcribes recordings only")
_CTRANSLATE2_FLOAT32 = Peer("CTranslate2", "float32", "ctranslate2", "run_ctranslate2.py", _CTRANSLATE2)
# On some CPUs with AVX-512 its products are faster in AVX2.
_IN_AVX2 = dict.fromkeys(("CT2_FORCE_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA"), "AVX2")
PEERS: tuple[Peer, ...] = (
    _CTRANSLATE2_FLOAT32,
    replace(_CTRANSLATE2_FLOAT32, name="CTranslate2 in AVX2", variables=_IN_AVX2),
    replace(_CTRANSLATE2_FLOAT32, dtype="bfloat16", other_numbers=True),
    replace(_CTRANSLATE2_FLOAT32, dtype="int8", other_numbers=True),
    Peer("OpenVINO", "float32", "openvino", "run_openvino.py", _OPENVINO),
    Peer("OpenVINO", "bfloat16", "openvino", "run_openvino.py", _OPENVINO, other_numbers=True),
    Peer("vLLM", "float32", "vllm", "run_vllm.py", _VLLM),
    Peer("generate_batch", "float32", "", "run_generate_batch.py", _GENERATE_BATCH),
    Peer("faster-whisper", "float32", "ctranslate2", "run_faster_whisper.py", _FASTER_WHISPER),
)


def names() -> list[str]:
    return list(dict.fromkeys(peer.name for peer in PEERS))


def install(environment: str) -> None:
    """Makes the virtual environment of that name."""
    folder = ROOT / f".venv-{environment}"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    requirements = PROGRAMS / f"{environment}.txt"
    subprocess.run([*pip, "install", "--quiet", "--requirement", str(requirements)], check=True)
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", *_NEED_CUDA], check=True)


def add(
    ways: Ways, case: str, work: Any, options: Options, stack: ExitStack, reasons: dict[str, str]
) -> dict[str, Any]:
    """Adds to `ways` the peers that can do the case, until the stack is closed; returns their versions.

    work: a model, its inputs and arguments, as calls.Work. If a peer has other numbers, fastgen in bfloat16 is added.
    """
    engines = [peer for peer in PEERS if peer.name in options.against]
    if any(peer.other_numbers for peer in engines):
        half = deepcopy(work)
        half.model.to(torch.bfloat16)
        half.inputs = {name: x.bfloat16() if x.is_floating_point() else x for name, x in work.inputs.items()}
        ways[FASTGEN_BFLOAT16] = half.generate
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    versions: dict[str, str] = {}
    write_task(folder, work.model, work.inputs, work.arguments)
    for peer in engines:
        try:
            process = peer.start(case, folder)
        except PeerError as error:
            reasons[peer.title] = str(error)
            continue
        stack.enter_context(process)
        ways[peer.title] = process.generate
        versions |= process.versions
    return {"peer_versions": versions}


def write_task(folder: Path, model: Any, inputs: Mapping[str, torch.Tensor], arguments: Mapping[str, Any]) -> None:
    """Writes the model, inputs and arguments of `generate` for a peer's program."""
    model.save_pretrained(folder / "model")
    torch.save(dict(inputs), folder / "inputs.pt")
    text = json.dumps({"eos_token_id": None, **arguments})
    (folder / "arguments.json").write_text(text, encoding="utf-8")


def rows_equal(tokens: Mapping[str, Tokens]) -> dict[str, str]:
    """Returns how many rows equal those of stock, for each other way."""
    stock = tokens["stock"]
    return {
        way: f"{sum(a == b for a, b in zip(rows, stock))} of {len(stock)}"
        for way, rows in tokens.items()
        if way != "stock"
    }


class PeerProcess:
    """A peer that has loaded its model. A context manager, which ends the process."""

    def __init__(self, peer: Peer, folder: Path, threads: int) -> None:
        """Starts the program on what `write_task` has written. Raises PeerError if the peer cannot do this work."""
        self._errors = Path(tempfile.mkdtemp(dir=folder)) / "stderr"
        command = [peer.python(), str(PROGRAMS / peer.program), str(folder), peer.dtype, str(threads)]
        pipe = subprocess.PIPE
        variables = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", **peer.variables}
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=errors, env=variables, start_new_session=True
            )
        try:
            self.versions: dict[str, str] = self._read()["versions"]
        except PeerError:
            self.close()
            raise

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(self) -> Answer:
        """Returns the seconds and new tokens of a call. Raises PeerError."""
        try:
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(self._end()) from None
        answer = self._read()
        return Answer(answer["seconds"], answer["tokens"])

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # with the processes that it has started
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def _read(self) -> dict[str, Any]:
        """Returns its next answer. Raises PeerError: with its reason, with how it ended, or if it does not answer."""
        if not select.select([self._process.stdout], [], [], LONGEST_ANSWER)[0]:
            raise PeerError(f"no answer within {LONGEST_ANSWER} s")
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(self._end())
        answer = json.loads(line)
        if "reason" in answer:
            raise PeerError(answer["reason"])
        return answer

    def _end(self) -> str:
        status = self._process.wait()
        if status < 0:
            return f"crashed with {signal.Signals(-status).name}"
        lines = self._errors.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing on standard error")
        return f"ended with status {status}: {last}"
