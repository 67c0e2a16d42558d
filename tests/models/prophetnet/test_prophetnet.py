"""ProphetNet in fairseq: attention by its definition, steps that agree with the whole, scores of transformers."""

import math
from itertools import chain

import pytest
import torch
from python_process import run_code, run_python
from torch import Tensor

fairseq = pytest.importorskip("fairseq")

from fairseq.criterions import CRITERION_REGISTRY  # noqa: E402
from fairseq.sequence_generator import SequenceGenerator  # noqa: E402
from models.prophetnet.tiny import WORDS, dictionary, prophetnet, tokens  # noqa: E402

import fastgen  # noqa: E402
from fastgen.cli.fairseq.command import generate  # noqa: E402
from fastgen.models.predict_streams import bucket_of, make_streams  # noqa: E402
from fastgen.models.prophetnet import (  # noqa: E402
    BertDictionary,
    NgramLanguageLoss,
    NgramMultiheadAttention,
    to_fairseq,
    to_transformers,
)


@pytest.fixture
def words(tmp_path):
    return dictionary(tmp_path)


def logits_of(model, source: Tensor, target: Tensor) -> Tensor:
    with torch.no_grad():
        return model(source, (source != 0).sum(1), target)[0]


def step_logits(model, source: Tensor, target: Tensor) -> Tensor:
    """Returns the same logits, computed position by position."""
    with torch.no_grad():
        encoded, state = model.encoder(source, src_lengths=(source != 0).sum(1)), {}
        steps = range(1, target.shape[1] + 1)
        return torch.cat([model.decoder(target[:, :step], encoded, state)[0] for step in steps], dim=1)


def definition(attention: NgramMultiheadAttention, x: Tensor, length: int, predict: int) -> Tensor:
    """Returns the attention query by query, with the keys that the paper lets each see; x `[L, B, C]`."""
    heads, buckets = attention.num_heads, attention.num_buckets
    query, key, value = (
        project(x).unflatten(2, (heads, -1)) for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    result = torch.zeros_like(query)
    for row in range(len(x)):
        stream, position = divmod(row, length)
        seen = [(key_position, key_position - position) for key_position in range(position + 1)]
        if stream:  # stream n sees all but the last n - 1, and its own place
            last = max(position - (stream - 1), 0)
            seen = [(place, place - position - 1) for place in range(last + 1)] + [(row, 0)]
        by_bucket = attention.relative_linear(x[row]).unflatten(1, (buckets, heads))
        scores = [
            (query[row] * key[place]).sum(-1) * attention.scaling
            + by_bucket[:, int(bucket_of(torch.tensor(distance), buckets, 16))]
            for place, distance in seen
        ]
        weights = torch.stack(scores).softmax(0)
        result[row] = sum(weight[..., None] * value[place] for weight, (place, _) in zip(weights, seen))
    return attention.out_proj(result.flatten(2))


@pytest.mark.parametrize("predict", (1, 2, 3))
def test_each_stream_sees_what_the_paper_lets_it_see(predict):
    torch.manual_seed(0)
    attention = NgramMultiheadAttention(12, 3, dropout=0.0, num_buckets=8).double()
    x = torch.randn(6 * (1 + predict), 2, 12, dtype=torch.float64)
    ours = attention(x, make_streams(torch.arange(6)[:, None], 6, predict, 8, 16, x))
    torch.testing.assert_close(ours, definition(attention, x, 6, predict), atol=1e-12, rtol=0)


def test_buckets_are_exact_near_by_and_logarithmic_further():
    buckets = bucket_of(-torch.arange(200), 32, 128)
    assert buckets[:16].tolist() == list(range(16))
    for distance in range(17, 128):
        exactly = 16 + math.log(distance / 16) / math.log(8) * 16
        assert abs(buckets[distance].item() - exactly) <= 1
    assert (buckets[128:] == 31).all() and (buckets.diff() >= 0).all()


@pytest.mark.parametrize("ngram", (1, 2, 3))
def test_steps_of_fairseqs_prophetnet_agree_with_the_whole(words, ngram):
    model = prophetnet(words, ngram=ngram)
    source, target = tokens(7, 5), tokens(8, 8, seed=1, first=words.eos())
    torch.testing.assert_close(
        step_logits(model, source, target), logits_of(model, source, target), atol=1e-5, rtol=1e-5
    )


def test_transformers_gives_the_same_beams(words):
    model = prophetnet(words)
    source = tokens(7, 7, 7)
    generator = SequenceGenerator([model], words, beam_size=3, max_len_a=0, max_len_b=36)
    sample = {"net_input": {"src_tokens": source, "src_lengths": torch.tensor([7, 7, 7])}}
    with torch.no_grad():
        ours = list(chain.from_iterable(generator.generate([model], sample)))
    with fastgen.disabled(), torch.no_grad():
        stock = list(chain.from_iterable(generator.generate([model], sample)))
    theirs = to_transformers(model).generate(
        source,
        num_beams=3,
        num_return_sequences=3,
        max_new_tokens=37,
        min_new_tokens=1,
        early_stopping=True,
        suppress_tokens=[words.pad()],
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert len({len(hypothesis["tokens"]) for hypothesis in ours}) > 2
    for hypothesis, plain, row, score in zip(ours, stock, theirs.sequences, theirs.sequences_scores):
        tokens_of_row = hypothesis["tokens"].tolist()
        assert plain["tokens"].tolist() == row[1 : 1 + len(tokens_of_row)].tolist() == tokens_of_row
        torch.testing.assert_close(hypothesis["score"], score, atol=1e-4, rtol=1e-4)


def test_a_conversion_there_and_back_changes_nothing(words):
    model = prophetnet(words, decoder_layers=3, ngram=3)
    back = to_fairseq(to_transformers(model), words)
    assert model.state_dict().keys() == back.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, back.state_dict()[name]), name


def test_models_that_cannot_be_converted_are_refused(words, tmp_path):
    with pytest.raises(ValueError, match="one for all"):
        to_transformers(prophetnet(words, share_all_embeddings=False, share_decoder_input_output_embed=False))
    (tmp_path / "few.txt").write_text("\n".join(WORDS[:9]), encoding="utf-8")
    with pytest.raises(ValueError, match="dictionary of 9 words"):
        to_fairseq(to_transformers(prophetnet(words)), BertDictionary.load(str(tmp_path / "few.txt")))


def test_checkpoints_of_the_authors_code_load(words):
    """They have one matrix for queries, keys and values, and another name for the encoder's first norm."""
    model = prophetnet(words)
    published = {}
    for name, weight in model.state_dict().items():
        stem, _, kind = name.rpartition("_proj.")
        if stem.endswith("attn.q"):
            parts = [model.state_dict()[f"{stem[:-1]}{part}_proj.{kind}"] for part in "qkv"]
            published[f"{stem[:-1]}in_proj_{kind}"] = torch.cat(parts)
        elif not stem.endswith(("attn.k", "attn.v")):
            published[name.replace("encoder.layernorm_embedding", "encoder.emb_layer_norm")] = weight
    assert "decoder.layers.0.ngram_self_attn.in_proj_weight" in published
    loaded = prophetnet(words, seed=1)
    loaded.load_state_dict(published)
    source, target = tokens(7, 5), tokens(8, 8, seed=1, first=words.eos())
    assert torch.equal(logits_of(loaded, source, target), logits_of(model, source, target))


@pytest.mark.parametrize(("eps", "disable"), ((0.0, False), (0.1, False), (0.0, True)))
def test_the_loss_sums_all_streams(words, eps, disable):
    model = prophetnet(words)
    source, target = tokens(7, 5), tokens(6, 4, seed=1)
    inputs = {"src_tokens": source, "src_lengths": torch.tensor([7, 5]), "prev_output_tokens": target}
    sample = {"net_input": inputs, "target": target, "ntokens": 10}

    class Task:
        target_dictionary = words

    loss, size, _ = NgramLanguageLoss(Task, eps, disable)(model, sample)
    logits, extra = model(**inputs)
    assert len(extra["ngram_logits"]) == 1
    streams = [logits] if disable else [logits, *extra["ngram_logits"]]
    expected = sum(
        torch.nn.functional.cross_entropy(
            stream.flatten(0, 1), target.flatten(), ignore_index=0, reduction="sum", label_smoothing=eps
        )
        for stream in streams
    )
    torch.testing.assert_close(loss, expected)
    assert size == 10 * len(streams)


@pytest.mark.parametrize(
    ("lines", "message"),
    ((["[PAD]", "", "a"], "line 2: ''"), (["a", "a"], "line 2: 'a'"), (["[PAD]", "[SEP]", "[CLS]"], r"no \[UNK\]")),
)
def test_vocabularies_unlike_berts_are_refused(lines, message, tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        BertDictionary.load(str(tmp_path / "vocab.txt"))


def test_a_dictionary_is_saved_as_it_was_read(words, tmp_path):
    words.save(str(tmp_path / "dict.txt"))
    again = BertDictionary.load(str(tmp_path / "dict.txt"))
    assert again.symbols == words.symbols == WORDS and again.eos() == 3 and again.pad() == 0
    assert again.encode_line("w0 w1 nothing", add_if_not_exist=False).tolist() == [5, 6, 1, 3]


@pytest.mark.slow
def test_prophetnet_is_registered_with_the_import():
    """In either order of the imports."""
    names = """
from fairseq.models import ARCH_MODEL_REGISTRY as architectures
from fairseq.tasks import TASK_REGISTRY as tasks
from fairseq.criterions import CRITERION_REGISTRY as criteria
assert {"ngram_transformer_prophet_base", "ngram_transformer_prophet_large"} <= set(architectures)
assert "translation_prophetnet" in tasks and "ngram_language_loss" in criteria
"""
    run_code("import fastgen, fairseq" + names, FASTGEN_STRICT="1")
    run_code("import fairseq, fastgen" + names, FASTGEN_STRICT="1")
    assert CRITERION_REGISTRY["ngram_language_loss"] is NgramLanguageLoss


@pytest.mark.slow
def test_a_prophetnet_of_user_code_gets_the_names(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").write_text("""
from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import TransformerModel
from fairseq.criterions import register_criterion, FairseqCriterion

@register_model("ngram_transformer_prophet")
class Theirs(TransformerModel):
    pass

@register_model_architecture("ngram_transformer_prophet", "ngram_transformer_prophet_large")
def large(args):
    pass

@register_criterion("ngram_language_loss")
class TheirLoss(FairseqCriterion):
    pass
""")
    code = f"""
import argparse, fastgen, fairseq.utils, fairseq.models, fairseq.criterions, fairseq.tasks
fairseq.utils.import_user_module(argparse.Namespace(user_dir={str(tmp_path / "theirs")!r}))
print(fairseq.models.ARCH_MODEL_REGISTRY["ngram_transformer_prophet_large"].__name__)
print(fairseq.criterions.CRITERION_REGISTRY["ngram_language_loss"].__name__)
print(fairseq.tasks.TASK_REGISTRY["translation_prophetnet"].__module__)
"""
    assert run_code(code).split() == ["Theirs", "TheirLoss", "fastgen.models.prophetnet.task"]


COMMANDS = """
import importlib, sys, fastgen

def run(command, arguments):
    sys.argv[1:] = arguments.split()
    importlib.import_module(f"fairseq_cli.{command}").cli_main()

"""


@pytest.mark.slow
def test_the_commands_train_and_generate_with_prophetnet(tmp_path, capfd):
    """fairseq's commands with fastgen imported agree with fastgen's; the task is to copy."""
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 300), ("valid", 30), ("test", 20)):
        lines = [
            " ".join(WORDS[5 + int(word)] for word in torch.randint(0, 8, (4,), generator=generator))
            for _ in range(count)
        ]
        for language in ("src", "tgt"):
            (tmp_path / f"{split}.{language}").write_text("\n".join(lines) + "\n")
    dictionary(tmp_path)
    task, data = "--task translation_prophetnet", tmp_path / "data"
    prefixes = " ".join(f"--{split}pref {tmp_path / split}" for split in ("train", "valid", "test"))
    vocabulary = tmp_path / "vocab.txt"
    preprocess = f"{task} -s src -t tgt {prefixes} --srcdict {vocabulary} --joined-dictionary --destdir {data}"
    sizes = " ".join(
        f"--{end}-layers 1 --{end}-embed-dim 32 --{end}-ffn-embed-dim 64 --{end}-attention-heads 2"
        for end in ("encoder", "decoder")
    )
    train = (
        f"{data} {task} --arch ngram_transformer_prophet_base {sizes} --criterion ngram_language_loss --cpu "
        f"--optimizer adam --lr 0.01 --max-tokens 600 --max-update 60 --dropout 0 --attention-dropout 0 "
        f"--activation-dropout 0 --save-dir {tmp_path / 'model'} --no-epoch-checkpoints --no-progress-bar "
        f"--max-source-positions 40 --max-target-positions 40"
    )
    run_code(f"{COMMANDS}run('preprocess', {preprocess!r})\nrun('train', {train!r})")
    generation = f"{data} {task} --path {tmp_path / 'model' / 'checkpoint_last.pt'} --cpu --beam 3 --max-len-b 8"
    generation += " --required-batch-size-multiple 1 --num-workers 0"
    done = run_python("-m", "fastgen", "-m", "fairseq_cli.generate", *generation.split())
    assert done.returncode == 0, done.stderr[-3000:]
    hypotheses = [line for line in done.stdout.splitlines() if line.startswith("H-")]
    assert len(hypotheses) == 20 and all("w" in line for line in hypotheses)
    capfd.readouterr()
    assert generate(generation.split()) == 0
    assert [line for line in capfd.readouterr().out.splitlines() if line.startswith("H-")] == hypotheses
