"""OpenAI's batch format: requests are recognized, settings in bodies are applied, responses have its form."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cli_loop import command, plain_samples, write_lines
from cli_models import copy_with_template
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import fastgen
from fastgen.optimizer.transformers.compat import REPETITION_PENALTY_COUNTS_PADDING

TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


@pytest.fixture(scope="module")
def chat(gpt2, tmp_path_factory):
    return copy_with_template(gpt2, tmp_path_factory.mktemp("chat"), TEMPLATE)


def request(name: str, words: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": words}]
    body = {"model": "gpt-9", "messages": messages, **body}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def run(chat: Path, folder: Path, requests: list[dict], *flags: str, status: int = 0) -> list[dict]:
    source, output = write_lines(folder / "in.jsonl", list(map(json.dumps, requests))), folder / "out.jsonl"
    assert command(chat, source, output, "--overwrite", *flags) == status
    return [json.loads(line) for line in output.read_text().splitlines()]


def plain(chat: Path, words: str, seed: int | None = None, **settings: Any) -> tuple[str, int, int]:
    """Returns the text, and the tokens of prompt and answer, of a loop as users write it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(chat)
    tokenizer = transformers.AutoTokenizer.from_pretrained(chat)
    inputs = tokenizer(f"user {words} ", return_tensors="pt", add_special_tokens=False)
    if seed is not None:
        torch.manual_seed(seed)
    with fastgen.disabled():
        ids = model.generate(
            **{name: inputs[name] for name in ("input_ids", "attention_mask")}, pad_token_id=2, **settings
        )
    length = inputs["input_ids"].shape[1]
    return tokenizer.decode(ids[0, length:], skip_special_tokens=True), length, ids.shape[1] - length


def test_requests_are_recognized_and_bodies_are_applied(chat, tmp_path, capsys):
    requests = [
        request("a", "word1 word2", max_tokens=3),
        request("b", "word3", max_completion_tokens=8, temperature=0),
        request("c", "word4 word5 word6", stop=["x"], logprobs=True, user="me"),
        request("d", "word7", max_tokens=5, temperature=0.7, top_p=0.9),
    ]
    answers = run(chat, tmp_path, requests, "--output_format", "openai", "--seed", "5", "--bs", "1")
    expected = [
        plain(chat, "word1 word2", max_new_tokens=3),
        plain(chat, "word3", max_new_tokens=8),
        plain(chat, "word4 word5 word6"),
        (plain_samples(chat, "user word7 ", [(5, 4, 0)], 5, temperature=0.7, top_p=0.9, top_k=50)[0], 2, 5),
    ]
    for name, response, (text, prompt, tokens) in zip("abcd", answers, expected, strict=True):
        assert (response["custom_id"], response["error"], response["response"]["status_code"]) == (name, None, 200)
        body = response["response"]["body"]
        assert (body["object"], body["model"], body["created"]) == ("chat.completion", str(chat), 0)
        usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        assert body["usage"] == usage
        (choice,) = body["choices"]
        assert choice["message"] == {"role": "assistant", "content": text}
        assert choice["finish_reason"] in ("stop", "length")
    assert answers[0]["response"]["body"]["choices"][0]["finish_reason"] == "length"
    assert "fields of request bodies were ignored: logprobs, user" in capsys.readouterr().err


def test_bodies_set_warpers_and_penalties_as_generate_does(chat, tmp_path):
    cuts = {"top_k": 3, "min_p": 0.01}
    requests = [
        request("a", "word7", max_tokens=5, temperature=0.7, **cuts),
        request("b", "word7", max_tokens=5, repetition_penalty=5),
        request("c", "word7", max_tokens=5),
    ]
    flags = ("--output_format", "openai", "--seed", "5")
    answers = run(chat, tmp_path, requests, *flags, status=int(REPETITION_PENALTY_COUNTS_PADDING))
    alone = ("--do_sample", "--max_new_tokens", "5", "--temperature", "0.7", "--top_k", "3", "--gen", "min_p=0.01")
    assert texts(answers)[0] == texts(run(chat, tmp_path, [request("a", "word7")], *flags, *alone))[0]
    if REPETITION_PENALTY_COUNTS_PADDING:
        assert "1, or --repetition_penalty 5.0 for all requests" in answers[1]["error"]["message"]
        return
    punished, free = (plain(chat, "word7", max_new_tokens=5, **each)[0] for each in ({"repetition_penalty": 5.0}, {}))
    assert texts(answers)[1:] == [[punished], [free]] and punished != free


def test_a_body_with_top_k_of_minus_1_has_no_limit(chat, tmp_path):
    drawn = {"max_tokens": 5, "temperature": 0.7, "seed": 3}
    requests = [request(f"{top_k}", "word7", **drawn, top_k=top_k) for top_k in (-1, 0, -2)]
    *free, refused = run(chat, tmp_path, requests, "--output_format", "openai", status=1)
    assert texts(free)[0] == texts(free)[1]
    assert "a whole number, 0 or more, or -1" in refused["error"]["message"]


def test_bodies_set_template_variables_and_continue_messages(gpt2, tmp_path):
    end = "{% if add_generation_prompt %}word2 {% endif %}"
    thinking = "{% if enable_thinking is defined and not enable_thinking %}word3 {% endif %}"
    chat = copy_with_template(gpt2, tmp_path / "model", TEMPLATE + end + thinking)
    begun = [{"role": "user", "content": "word5"}, {"role": "assistant", "content": "word6"}]
    requests = [
        request("a", "word4"),
        request("b", "word4", enable_thinking=False),
        request("c", "word4", chat_template_kwargs={"enable_thinking": False}),
        request("d", "word4", add_generation_prompt=False),
        request("e", "", messages=begun, continue_final_message=True),
        request("f", "word4", continue_final_message=True),
        request("g", "word4", chat_template_kwargs={"tokenize": False}),
        request("h", "word4", enable_thinking="no"),
        request("i", "", messages="word4", continue_final_message=True),
    ]
    answers = run(chat, tmp_path, requests, "--output_format", "openai", status=1)
    prompts = ["word4 word2", "word4 word2 word3", "word4 word2 word3", "word4", "word5 assistant word6"]
    assert texts(answers) == [[plain(chat, prompt)[0]] for prompt in prompts]
    assert [each["error"]["message"] for each in answers[5:]] == [
        'has true or false as "continue_final_message" of its body (accepted: true after a message of the assistant)',
        'has true or false as "chat_template_kwargs.tokenize" of its body '
        "(accepted: an object with variables of the chat template)",
        'has a string as "enable_thinking" of its body (accepted: true or false)',
        'has true or false as "continue_final_message" of its body (accepted: true after a message of the assistant)',
    ]


@pytest.mark.parametrize("output_format", ["openai", "jsonl"])
def test_ignored_fields_are_named_in_records_and_if_quiet(chat, tmp_path, capsys, output_format):
    applied = {"max_tokens": 3, "temperature": 0, "seed": 1, "n": 1, "stop": ["x"], "top_p": 1, "user": None}
    ignored = {"tools": [], "response_format": {"type": "json_object"}, "logprobs": False}
    requests = [request("a", "word1", **applied), request("b", "word1", **applied, **ignored)]
    records = run(chat, tmp_path, requests, "--output_format", output_format, "--quiet")
    plainly, other = (record["response"]["body"] if output_format == "openai" else record for record in records)
    assert "ignored_fields" not in plainly and other["ignored_fields"] == ["logprobs", "response_format", "tools"]
    said = capsys.readouterr().err
    assert said.endswith(": fields of request bodies were ignored: logprobs, response_format, tools\n")
    assert said.count("\n") == 1


def test_other_formats_keep_the_fields_of_requests(chat, tmp_path):
    requests = [request("a", "word1 word2"), request("b", "word3")]
    answers = run(chat, tmp_path, requests)
    assert [{name: record[name] for name in requests[0]} for record in answers] == requests
    assert [record["outputs"][0]["text"] for record in answers] == [
        plain(chat, "word1 word2")[0],
        plain(chat, "word3")[0],
    ]


def texts(responses: list[dict]) -> list[list[str]]:
    """Returns the contents of all choices of each response."""
    return [
        [choice["message"]["content"] for choice in each["response"]["body"]["choices"]]
        for each in responses
        if each["error"] is None
    ]


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """A model whose tokens are bytes, in which the library can look for stop strings."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate(["</s>", *alphabet])}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=257, n_embd=16, n_layer=1, n_head=2, n_positions=64, initializer_range=0.5, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    printable = [index for index, letter in enumerate(alphabet, start=1) if not ("0" <= letter <= "~")]
    model.generation_config.update(suppress_tokens=[0, *printable], max_new_tokens=12)
    folder = tmp_path_factory.mktemp("letters")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("as_list", [False, True])
def test_an_answer_ends_before_its_stop_string(letters, tmp_path, as_list):
    whole, prompt, tokens = plain(letters, "ab")
    assert len(whole) == tokens == 12
    stop = whole[5:7]
    requests = [request("a", "ab", stop=[stop, "\n"] if as_list else stop), request("b", "ab"), request("c", "cd")]
    answers = run(letters, tmp_path, requests, "--output_format", "openai", "--bs", "3")
    assert texts(answers) == [[whole[: whole.index(stop)]], [whole], [plain(letters, "cd")[0]]]
    body, other = (each["response"]["body"] for each in answers[:2])
    assert body["choices"][0]["finish_reason"] == "stop" and other["choices"][0]["finish_reason"] == "length"
    model, tokenizer = transformers.AutoModelForCausalLM.from_pretrained(letters), transformers.AutoTokenizer
    tokenizer = tokenizer.from_pretrained(letters)
    with fastgen.disabled():
        ids = model.generate(
            **tokenizer("user ab ", return_tensors="pt"), stop_strings=[stop], tokenizer=tokenizer, pad_token_id=0
        )
    assert body["usage"]["completion_tokens"] == ids.shape[1] - prompt < tokens


def test_a_stop_string_cuts_texts_of_any_tokenizer(chat, tmp_path):
    whole = plain(chat, "word1 word2")[0]
    stop = whole.split()[2]
    answers = run(chat, tmp_path, [request("a", "word1 word2", stop=stop)], "--output_format", "openai")
    assert texts(answers) == [[whole[: whole.index(stop)]]]
    assert answers[0]["response"]["body"]["choices"][0]["finish_reason"] == "stop"


def test_a_seed_gives_the_same_samples_in_any_file(chat, tmp_path):
    asked = {"temperature": 0.9, "max_tokens": 6}
    first, other = request("a", "word1", seed=-7, n=3, **asked), request("b", "word4 word5", **asked)
    keys = [(2**64 - 7, 0, sample) for sample in range(3)]
    expected = plain_samples(chat, "user word1 ", keys, 6, temperature=0.9, top_k=50)
    assert len(set(expected)) > 1
    for number, requests in enumerate([[first], [other, first, other], [first, first, other, other]]):
        answers = texts(run(chat, tmp_path, requests, "--output_format", "openai", "--seed", str(number), "--bs", "4"))
        for answer, sent in zip(answers, requests, strict=True):
            assert answer == expected if sent is first else len(answer) == 1


def test_greedy_requests_with_different_seeds_share_batches(chat, tmp_path):
    requests = [request(str(number), "word1", seed=number, temperature=0) for number in range(3)]
    assert texts(run(chat, tmp_path, requests, "--output_format", "openai")) == [[plain(chat, "word1")[0]]] * 3


def test_content_may_be_parts_of_text_or_null_for_an_assistant(chat, tmp_path):
    def asked(*contents: Any) -> dict[str, Any]:
        roles = ("user", "assistant", "user")
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
        return request("a", "") | {"body": {"messages": messages}}

    parts = [{"type": "text", "text": "word1"}, {"type": "text", "text": "word2"}]
    requests = [asked(parts), asked("word1\nword2"), asked("word1", None, "word3"), asked("word1", "", "word3")]
    answers = texts(run(chat, tmp_path, requests, "--output_format", "openai"))
    assert answers[0] == answers[1] == [plain(chat, "word1 word2")[0]] and answers[2] == answers[3]
    image = [{"type": "text", "text": "word1"}, {"type": "image_url", "image_url": {"url": "a"}}]
    answers = run(chat, tmp_path, [requests[0], asked(image), asked([]), asked(None)], status=1)
    assert [record.get("error") for record in answers[1:]] == [
        'has no text as "content" of message 1 in its field "body.messages"'
    ] * 3


BAD = [
    (
        {"max_tokens": 10**9},
        'has 1000000000 as "max_tokens" of its body (accepted: up to 63, of MODEL\'s 64 positions)',
    ),
    ({"max_completion_tokens": 10**30}, "accepted: up to 63"),
    ({"max_tokens": 64}, "accepted: up to 63"),
    ({"max_tokens": float("inf")}, 'has Infinity as "max_tokens" of its body (accepted: a whole number, 1 or more)'),
    ({"max_tokens": float("nan")}, "accepted: a whole number"),
    ({"max_tokens": 0}, "accepted: a whole number"),
    ({"max_tokens": 2.5}, "accepted: a whole number"),
    ({"temperature": float("inf")}, "accepted: a number, 0 or more"),
    ({"top_p": 1.5}, "accepted: a number from 0 to 1"),
    ({"n": 0}, "accepted: 1 to 128"),
    ({"n": 2}, 'has 2 as "n" of its body (accepted: 1, or a "temperature" above 0)'),
    ({"seed": "a"}, 'has a string as "seed"'),
    ({"stop": [""]}, 'has a list as "stop" of its body (accepted: strings with text)'),
    ({"stop": 5}, 'has 5 as "stop"'),
    ({"max_tokens": "many"}, 'has a string as "max_tokens"'),
    ({"max_tokens": 63}, "the limit is 1"),
    ({"messages": []}, "has an empty list"),
]


def test_a_body_with_an_unsupported_field_is_named(chat, tmp_path, capsys):
    requests = [
        request("a", "word1", max_tokens=3.0, stop=[], n=1),
        *(request("b", "word1", **body) for body, _ in BAD),
    ]
    good, *bad = run(chat, tmp_path, requests, "--output_format", "openai", status=1)
    assert texts([good]) == [[plain(chat, "word1", max_new_tokens=3)[0]]]
    assert 'line 2: custom_id "b": ' in capsys.readouterr().err
    for response, (_, message) in zip(bad, BAD, strict=True):
        assert response["response"] is None
        said = response["error"]["message"]
        assert message in said and "-" not in said and " inf" not in said
    several = [request("a", "word1"), request("b", "word1", n=2, temperature=1)]
    source = write_lines(tmp_path / "in.jsonl", list(map(json.dumps, several)))
    assert command(chat, source, tmp_path / "out.txt", "--output_format", "text") == 1
    assert (tmp_path / "out.txt").read_text() == plain(chat, "word1")[0] + "\n\n"
    answers = run(chat, tmp_path, [several[0], several[0] | {"body": several[0]["body"] | {"n": 2}}], "--beam", "2")
    assert [len(record["outputs"]) for record in answers] == [1, 2]


def test_messages_without_a_chat_model_end_the_run(chat, tmp_path, capsys):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_lines(source, [json.dumps({"text": [{"role": "user", "content": "word1"}]})] * 3000)
    assert command(chat, source, output, "--causal_lm") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "line 1 has a list" in error and "--causal_lm --chat" in error
    write_lines(source, ['{"text": "word1", "meta": {"a": 1}}'] * 3000)
    assert command(chat, source, output, "--causal_lm", "--text_field", "meta") == 2
    assert 'has an object in its field "meta"' in capsys.readouterr().err
    assert not output.exists()


def test_an_output_of_failures_only_is_not_put_in_place(chat, tmp_path, capsys):
    source = write_lines(tmp_path / "in", ["word1 " * 70, "", "word2 " * 80])
    assert command(chat, source, tmp_path / "out", "--causal_lm") == 1
    assert "every input failed (2), so no OUTPUT is written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
