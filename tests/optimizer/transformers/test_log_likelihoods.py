"""Log-likelihoods of continuations are those of one forward for each context with its continuation."""

from collections import Counter
from functools import partial
from random import Random

import pytest
import torch
from architectures import ARCHITECTURES, COLUMNS_COUNT, WITHOUT_PREFIX
from hooks import costs, fresh_trust, watched
from reports import FREE
from tiny_models import lively, tiny, unchanged
from tokenizers.processors import TemplateProcessing
from torch import nn
from torch.nn import functional
from transformers import PreTrainedTokenizerFast
from transformers.cache_utils import DynamicLayer

import fastgen
from fastgen.models.demo import demo_path
from fastgen.optimizer.decoding.report import PREFILL
from fastgen.optimizer.transformers import log_likelihoods
from fastgen.optimizer.transformers.shared_forward import NodeLayer
from fastgen.testing import configured

pytestmark = pytest.mark.usefixtures("share_always")

CAUSAL = [each for each in ARCHITECTURES if each.kind == "causal"]
NOT_SHARED = WITHOUT_PREFIX | {"minimax": "CACHE_LAYERS"} | dict.fromkeys(COLUMNS_COUNT, "POSITIONS")


def one_by_one(model, contexts, continuations):
    """Returns the log-likelihoods by the definition of lm-evaluation-harness, with a forward for each pair."""
    results = []
    for context, continuation in zip(contexts, continuations):
        tokens = torch.tensor([[*context, *continuation]])
        with torch.no_grad(), fastgen.disabled():
            logits = model(tokens[:, :-1]).logits[0, -len(continuation) :].float()
        scores, wanted = functional.log_softmax(logits, dim=-1), tokens[0, -len(continuation) :]
        results.append((float(scores.gather(1, wanted[:, None]).sum()), bool((scores.argmax(-1) == wanted).all())))
    return results


def greedy(model, context, length):
    with torch.no_grad(), fastgen.disabled():
        for _ in range(length):
            context = [*context, int(model(torch.tensor([context])).logits[0, -1].argmax())]
    return context[-length:]


def questions(model, prefix: int, seed: int = 1, options: int = 4, longest: int = 4):
    """Returns contexts after a common prefix, with several continuations each, one of them greedy."""
    random = Random(seed)
    common = [random.randrange(3, 90) for _ in range(prefix)]
    contexts, continuations = [], []
    for number in range(5):
        context = [*common, 3 + number, *(random.randrange(3, 90) for _ in range(random.randint(0, 6)))]
        choices = [[random.randrange(3, 90) for _ in range(random.randint(1, longest))] for _ in range(options - 1)]
        choices.append(greedy(model, context, random.randint(1, longest)))
        contexts += [context] * options
        continuations += choices
    order = random.sample(range(len(contexts)), len(contexts))
    return [contexts[place] for place in order], [continuations[place] for place in order]


def assert_equal(results, expected):
    assert [is_greedy for _, is_greedy in results] == [is_greedy for _, is_greedy in expected]
    torch.testing.assert_close([x for x, _ in results], [x for x, _ in expected], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("architecture", CAUSAL, ids=lambda architecture: architecture.id)
def test_every_architecture_agrees_with_single_forwards(architecture):
    model = lively(architecture.model()).eval()
    pairs = questions(model, prefix=7)
    results = fastgen.log_likelihoods(model, *pairs)
    assert_equal(results, one_by_one(model, *pairs))
    report = fastgen.explain()
    if why := NOT_SHARED.get(architecture.id):
        assert report.prefix_length == 0 and why in report.codes(PREFILL)
    else:
        assert report.prefix_length == 7 and report.inputs == 5 and report.rows == 20


@pytest.mark.parametrize("tokens_per_batch", (1, 30, 8192))
@pytest.mark.parametrize(("prefix", "options", "longest"), ((0, 4, 4), (9, 1, 3), (9, 4, 1), (3, 3, 5)))
def test_batches_of_any_size_agree_with_single_forwards(prefix, options, longest, tokens_per_batch):
    model = unchanged("llama")
    pairs = questions(model, prefix, options=options, longest=longest)
    results = fastgen.log_likelihoods(model, *pairs, tokens_per_batch=tokens_per_batch)
    assert_equal(results, one_by_one(model, *pairs))


def test_equal_pairs_and_different_numbers_of_continuations():
    model = tiny("gpt2")
    contexts = [[5, 6, 7], [5, 6, 7], [5, 6, 8, 9], [5, 6, 7], [5, 6, 7], [5, 6, 10]]
    continuations = [[11, 12], [13], [14, 15, 16], [11, 12], [11, 17], [18]]
    results = fastgen.log_likelihoods(model, contexts, continuations)
    assert_equal(results, one_by_one(model, contexts, continuations))
    assert results[0] == results[3] and fastgen.explain().inputs == 3 and fastgen.explain().rows == 5


def test_a_window_must_hold_the_padding_after_a_prefix():
    model = tiny("mistral", sliding_window=20)
    contexts, continuations = [[5, 6, 7, *range(20, 32)], [5, 6, 7, 8]], [[40], [*range(50, 60)]]  # 16 tokens at most
    assert_equal(fastgen.log_likelihoods(model, contexts, continuations), one_by_one(model, contexts, continuations))
    assert fastgen.explain().codes(PREFILL) == {"SLIDING_WINDOW"}


def test_a_prefix_is_computed_once_for_all_batches():
    model = unchanged("llama")
    _, seen = shapes_of_forwards(model, *questions(model, prefix=9, longest=1), tokens_per_batch=8)
    assert seen[0] == (1, 9) and len(seen) > 3 and all(length < 9 for _, length in seen[1:])


def test_contexts_are_not_shared_if_nothing_is_gained():
    model = unchanged("llama")
    pairs = questions(model, prefix=7)
    with configured(share="auto"):
        assert_equal(fastgen.log_likelihoods(model, *pairs), one_by_one(model, *pairs))
        assert fastgen.explain().codes(PREFILL) == {"PREFIX_SHORT"}
        with costs(rates=FREE):
            assert_equal(fastgen.log_likelihoods(model, *pairs), one_by_one(model, *pairs))
    assert fastgen.explain().prefix_length == 7


def test_an_encoder_and_a_model_with_a_hook_are_not_shared():
    encoder, hooked = tiny("bert-encoder"), tiny("llama")
    hooked.model.layers[0].register_forward_hook(lambda module, args, output: None)
    for model, code in ((encoder, "NOT_CAUSAL"), (hooked, "HOOKS")):
        pairs = questions(hooked, prefix=7)
        results = fastgen.log_likelihoods(model, *pairs)
        assert code in fastgen.explain().codes(PREFILL)
        if model is hooked:
            assert_equal(results, one_by_one(model, *pairs))


@pytest.mark.parametrize(("template", "begin"), [("$A", []), ("$A </s>", []), ("<s> $A </s>", [0]), ("<s> $A", [0])])
def test_strings_are_split_as_in_the_harness(template, begin):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo_path())
    specials = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=specials)
    model = tiny("llama", vocab_size=len(tokenizer))
    contexts = ["Wendy sold 31 books. ", "Wendy sold 31 books. ", "Wendy sold two"]
    continuations = ["She was glad", "No", " cars."]
    results = fastgen.log_likelihoods(model, contexts, continuations, tokenizer)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    tokens = [begin + encode(context.rstrip()) for context in contexts]
    both = [begin + encode(context + continuation) for context, continuation in zip(contexts, continuations)]
    assert_equal(results, one_by_one(model, tokens, [whole[len(start) :] for start, whole in zip(tokens, both)]))


@pytest.mark.parametrize(("begin", "end"), [("<s>", "</s>"), (None, "</s>")])
def test_an_empty_context_is_the_token_that_texts_begin_with(begin, end):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo_path(), bos_token=begin, eos_token=end)
    model, first = tiny("llama", vocab_size=len(tokenizer)), tokenizer.convert_tokens_to_ids(begin or end)
    texts = ["She was glad", f"{begin or end}She was"]
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    results = fastgen.log_likelihoods(model, ["", ""], texts, tokenizer)
    assert ids[0][0] != first and ids[1][0] == first
    assert_equal(results, one_by_one(model, [[first], [first]], [ids[0], ids[1][1:]]))


def test_no_token_is_added_to_a_text_that_begins_with_it():
    """Texts of chat templates begin with it."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo_path(), bos_token="<s>")
    first = tokenizer.convert_tokens_to_ids("<s>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", first)])
    model = tiny("llama", vocab_size=len(tokenizer))
    results = fastgen.log_likelihoods(model, ["<s>Wendy sold 31 books."], [" She"], tokenizer)
    texts = "<s>Wendy sold 31 books.", "<s>Wendy sold 31 books. She"
    context, both = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    assert context[0] == first != context[1]
    assert_equal(results, one_by_one(model, [context], [both[len(context) :]]))


def shapes_of_forwards(model, *args, **kwargs):
    """Returns the log-likelihoods, and the shapes of the tokens of all forwards."""
    with watched("score tokens") as forwards:
        results = fastgen.log_likelihoods(model, *args, **kwargs)
    return results, [tuple(forward.args[1].shape) for forward in forwards]


def test_no_forward_has_more_tokens_than_a_batch_may():
    """Not even if one context has many continuations, and another one long ones."""
    model, random = tiny("llama"), Random(3)
    draw = partial(random.choices, range(5, 90))
    asked = [(draw(k=6), draw(k=60)) for _ in range(3)]
    for context in (draw(k=6) for _ in range(3)):
        asked += [(context, draw(k=2)) for _ in range(50)]
    contexts, continuations = zip(*asked)
    results, shapes = shapes_of_forwards(model, contexts, continuations, tokens_per_batch=100)
    assert fastgen.explain().codes() == set() and len(shapes) > 4
    assert all(rows * length <= 100 for rows, length in shapes)
    assert_equal(results, one_by_one(model, contexts, continuations))


def test_each_task_has_its_own_prefix():
    model, random = tiny("llama"), Random(4)
    draw = partial(random.choices, range(5, 90))
    template, shots = draw(k=3), [draw(k=30), draw(k=40)]
    asked = [(draw(k=9), draw(k=2))]
    for number in (0, 1, 0, 1, 1):
        context = [*template, *shots[number], *draw(k=4)]
        asked += [(context, draw(k=2)) for _ in range(2)]
    contexts, continuations = zip(*asked)
    with costs(rates=FREE):
        results, shapes = shapes_of_forwards(model, contexts, continuations)
    assert {(1, 33), (1, 43)} <= set(shapes) and max(length for rows, length in shapes if rows > 1) < 10
    report = fastgen.explain()
    assert (report.prefix_length, report.prefix_tokens_saved) == (43, 33 + 2 * 43)
    assert "43 tokens of the inputs in each of 2 groups" in str(report)
    assert_equal(results, one_by_one(model, contexts, continuations))
    fastgen.log_likelihoods(model, contexts, continuations)  # for so few tokens another forward does not pay
    assert fastgen.explain().prefix_length == 0


def test_long_continuations_do_not_prevent_sharing():
    """The costs with and without a common context count them in both."""
    model, random = tiny("llama"), Random(6)
    draw = partial(random.choices, range(5, 90))
    contexts = [context for context in (draw(k=50) for _ in range(8)) for _ in range(4)]
    continuations = [draw(k=60) for _ in contexts]
    with configured(share="auto"), costs(rates=FREE):
        results = fastgen.log_likelihoods(model, contexts, continuations)
        assert "1200 tokens need not be computed" in str(fastgen.explain())
        small = fastgen.log_likelihoods(model, contexts, continuations, tokens_per_batch=110)
        assert ", 0 tokens need not be computed" in str(fastgen.explain())  # each part computes the context
    assert_equal(small, results)


def test_adapters_of_peft_count_and_prefixes_are_shared():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny("llama"), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    contexts, continuations = questions(model, 12)
    results = fastgen.log_likelihoods(model.eval(), contexts, continuations)
    assert fastgen.explain().prefix_length == 12
    assert_equal(results, one_by_one(model, contexts, continuations))
    with model.disable_adapter():
        plain = fastgen.log_likelihoods(model, contexts, continuations)
        assert_equal(plain, one_by_one(model, contexts, continuations))
    assert plain != results


def test_wrappers_of_peft_that_do_more_are_called():
    peft = pytest.importorskip("peft")
    base = log_likelihoods.base_of
    plain = {"target_modules": ["q_proj"], "init_lora_weights": False}
    model = peft.get_peft_model(tiny("llama"), peft.LoraConfig(**plain))
    assert base(model) is model.get_base_model() and base(model.get_base_model()) is model.get_base_model()
    handle = model.register_forward_hook(lambda module, args, output: output)
    assert base(model) is model
    handle.remove()
    activated = peft.LoraConfig(**plain, alora_invocation_tokens=[7, 8], task_type="CAUSAL_LM")
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    for config in (activated, prompts):
        model = peft.get_peft_model(tiny("llama"), config)
        assert base(model) is model
    mixed = peft.get_peft_model(tiny("llama"), peft.LoraConfig(**plain), mixed=True)
    assert base(mixed) is mixed


def test_wrappers_that_pass_arguments_of_any_name_on_are_shared():
    peft = pytest.importorskip("peft")
    layers = {"target_modules": ["k_proj", "fc2"], "feedforward_modules": ["fc2"], "init_ia3_weights": False}
    model = peft.get_peft_model(tiny("opt"), peft.IA3Config(task_type="CAUSAL_LM", **layers)).eval()
    pairs = questions(model, prefix=30)
    with fresh_trust(accepted=True):
        assert_equal(fastgen.log_likelihoods(model, *pairs), one_by_one(model, *pairs))
    assert fastgen.explain().shared


def test_keys_not_worth_sharing_are_repeated_for_each_row():
    pairs = questions(model := tiny("llama"), prefix=30)
    with configured(share="auto"), costs(rates=FREE), watched("shared attention") as attended:
        results = fastgen.log_likelihoods(model, *pairs)
    assert_equal(results, one_by_one(model, *pairs))
    assert fastgen.explain().shared and not attended


@pytest.mark.parametrize("requires_grad", (True, False))
def test_a_node_holds_no_more_than_its_keys(requires_grad):
    """GPT-2's keys are views of a product that holds queries, too; autograd holds that product anyway."""
    product = torch.randn(2, 5, 12, 4, requires_grad=requires_grad)
    layer = NodeLayer(DynamicLayer(), 2, Counter(), is_leaf=False)
    layer.update(*product.transpose(1, 2).split(4, dim=1)[1:])
    for states, whole in ((layer.keys, product[:, :, 4:8]), (layer.values, product[:, :, 8:])):
        assert torch.equal(states, whole.transpose(1, 2))
        assert (states.untyped_storage().nbytes() > states.nbytes) is requires_grad


def test_nothing_is_shared_if_fastgen_is_disabled():
    model = unchanged("llama")
    contexts, continuations = questions(model, 12)
    with fastgen.disabled():
        results = fastgen.log_likelihoods(model, contexts, continuations)
    assert fastgen.explain().codes(PREFILL) == {"DISABLED"} and not fastgen.explain().shared
    assert_equal(results, fastgen.log_likelihoods(model, contexts, continuations))
    assert fastgen.explain().shared


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    (
        ({"contexts": "abc", "continuations": ["d"] * 3}, TypeError, "contexts is one string"),
        ({"continuations": []}, ValueError, r"2 contexts and 0 continuations \(accepted: equal numbers\)"),
        ({"contexts": [[5], []]}, ValueError, r"contexts\[1\] is empty \(accepted: at least one token\)"),
        ({"continuations": [[], [7]]}, ValueError, r"continuations\[0\] is empty"),
        ({"contexts": ["a", "b"], "continuations": ["c", "d"]}, ValueError, r"contexts\[0\] is a string, and"),
        ({"model": tiny("bart")}, ValueError, r"has an encoder \(accepted: decoder-only models\)"),
        ({"contexts": [5, 6]}, TypeError, r"contexts\[0\] is 5 \(accepted: a list of token ids"),
        ({"contexts": torch.tensor([5, 6])}, TypeError, r"contexts\[0\] is tensor\(5\) \(accepted"),
        ({"continuations": [7, 8]}, TypeError, r"continuations\[0\] is 7 \(accepted"),
        ({"continuations": [[7], [[8], [9]]]}, TypeError, r"continuations\[1\] is \[\[8\], \[9\]\] \(accepted"),
        ({"continuations": [" a", " b"]}, TypeError, r"continuations\[0\] is ' a' \(accepted"),
        ({"contexts": ["a", "b"]}, TypeError, r"contexts\[0\] is 'a' \(accepted"),
        ({"contexts": [[5], [5, 1.5]]}, TypeError, r"contexts\[1\] is \[5, 1.5\] \(accepted"),
        ({"contexts": None}, TypeError, r"contexts is a NoneType \(accepted: a list"),
        ({"contexts": [[5], [5, 99]]}, ValueError, r"contexts\[1\] holds 99 \(accepted: token ids from 0 to 98\)"),
        ({"continuations": [[7], [-1]]}, ValueError, r"continuations\[1\] holds -1 \(accepted: token ids from 0"),
        ({"contexts": [[5], [5] * 128]}, ValueError, r"contexts\[1\] and .* have 128 and 2 tokens \(accepted: 129 tog"),
        ({"tokens_per_batch": 0}, ValueError, r"tokens_per_batch is 0 \(accepted: an integer of at least 1\)"),
        ({"model": nn.Linear(2, 2)}, TypeError, r"model is a Linear \(accepted: a decoder-only model"),
    ),
)
def test_errors_name_the_value_and_what_would_be_accepted(changed, error, message):
    arguments = {"model": unchanged("gpt2"), "contexts": [[5, 6]] * 2, "continuations": [[7], [8, 9]]}
    assert len(fastgen.log_likelihoods(**arguments)) == 2
    assert fastgen.log_likelihoods(unchanged("gpt2"), [], []) == []
    with pytest.raises(error, match=message):
        fastgen.log_likelihoods(**(arguments | changed))


def test_models_that_compute_positions_go_beyond_their_training():
    model, contexts, continuations = tiny("llama"), [[5] * 130, [6] * 130], [[7, 8], [9]]
    assert model.config.max_position_embeddings == 128
    results = fastgen.log_likelihoods(model, contexts, continuations)
    expected = one_by_one(model, contexts, continuations)
    torch.testing.assert_close([score for score, _ in results], [score for score, _ in expected], rtol=1e-4, atol=1e-4)
