"""Models too large for a device: `tp_plan="auto"` in two ranks, and `device_map="auto"`.

Keys are shared in each rank's part of the heads; the other parts come by all-reduce, inside of the model's modules.
"""

import json

import pytest
from architectures import Architecture
from parity import assert_same
from python_process import REPOSITORY, run_python
from reports import PROMPT, is_shared
from tiny_models import BEAMS, SAMPLES, lively, padded

torch = pytest.importorskip("torch")
accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("share_always", "one_thread")

RANK = """
import json, os, sys
import torch, transformers
from parity import compared
from tiny_models import BEAMS, SAMPLES, padded
from reports import PROMPT, is_shared
from fastgen.testing import configured

folder = sys.argv[1]
model = transformers.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
heads = model.model.layers[0].self_attn.k_proj.weight
assert heads.to_local().shape[0] == heads.shape[0] // 2  # this rank has half of them
results = {}
for name, arguments in {"beams": BEAMS, "samples": SAMPLES}.items():
    with configured(share="always"):
        both = compared(model, padded(9, 5), **arguments)
    results[name] = {"shared": is_shared(both.report, PROMPT), "sequences": both.fast.sequences.tolist()}
with open(f"{folder}/rank-{os.environ['RANK']}.json", "w") as file:
    json.dump(results, file)
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    lively(Architecture("llama", "causal").model()).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_tensor_parallel_ranks_share_the_keys_of_their_heads(saved):
    """Each rank compares with the unpatched library on the same two ranks, and both have the same outputs."""
    (saved / "rank.py").write_text(RANK)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    helpers = str(REPOSITORY / "tests/helpers")
    done = run_python(*torchrun, str(saved / "rank.py"), str(saved), path=helpers, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((saved / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert first == second
    whole = transformers.AutoModelForCausalLM.from_pretrained(saved).eval()
    assert first["beams"]["shared"] and first["samples"]["shared"]
    assert first["beams"]["sequences"] == whole.generate(**padded(9, 5), **BEAMS).tolist()


def test_a_model_by_device_map_auto_shares_keys(saved, tmp_path):
    """The memory of the CPU holds as much as fits, and the disk the rest."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        saved, device_map="auto", max_memory={"cpu": "60KB"}, offload_folder=tmp_path
    ).eval()
    assert {"cpu", "disk"} == set(model.hf_device_map.values())
    for arguments in (BEAMS, SAMPLES):
        assert is_shared(assert_same(model, padded(9, 5), **arguments), PROMPT)
