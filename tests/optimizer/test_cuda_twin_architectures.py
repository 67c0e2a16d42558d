"""On a twin of a GPU the steps of an architecture are captured, unless its own code is the reason."""

import json

import pytest
import torch
from architectures import BY_NAME
from cuda_twin import compiled
from host_compiler import needs_compiler
from made_once import made_once
from python_process import REPOSITORY, run_python

HELPERS = REPOSITORY / "tests" / "helpers"
FEW = ["gpt2", "llama", "bart", "t5", "whisper"]
# Captures begin and fail: the forward reads the device (xglm), copies an index to it (falcon), or takes no mask that is
# longer than its keys.
REFUSED = {"bloom", "falcon", "falcon-alibi", "xglm"}

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA: the twin is for builds without it"),
]


@pytest.mark.parametrize("names", [FEW, pytest.param([*BY_NAME], marks=pytest.mark.slow)], ids=["few", "all"])
def test_steps_of_architectures_are_captured(names, tmp_path_factory):
    library = made_once(tmp_path_factory.getbasetemp(), "cuda_twin", compiled) / "libcuda_twin.so"
    script = str(HELPERS / "cuda_twin_architectures.py")
    done = run_python(script, str(library), *names, path=HELPERS, OMP_NUM_THREADS="1")
    assert not done.returncode, done.stderr
    steps = json.loads(done.stdout.splitlines()[-1])
    replayed = [name for name, (replays, _) in steps.items() if replays]
    others = {name: reasons for name, (replays, reasons) in steps.items() if not replays}
    refused = {name: reasons for name, reasons in others.items() if "CAPTURE_REFUSED" in reasons}
    assert refused.keys() <= REFUSED, refused
    assert all(others.values()), others
    assert set(replayed).issuperset(FEW) and len(replayed) >= len(names) * 0.6, others
