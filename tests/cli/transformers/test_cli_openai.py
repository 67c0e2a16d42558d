"""OpenAI's batch format: requests are recognised, what their bodies ask for is applied, responses have its form."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cli_models import save_gpt2

import fastgen
from fastgen.cli.transformers.command import main
from fastgen.cli.transformers.pipeline import batch_seed

TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_gpt2(tmp_path_factory.mktemp("gpt2"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def request(name: str, words: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": words}]
    body = {"model": "gpt-9", "messages": messages, **body}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def run(chat: Path, folder: Path, requests: list[dict], *flags: str, status: int = 0) -> list[dict]:
    (folder / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in requests))
    command = [str(chat), str(folder / "in.jsonl"), str(folder / "out.jsonl"), "--overwrite", *flags]
    assert main(command) == status
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def plain(chat: Path, words: str, seed: int | None = None, **settings: Any) -> tuple[str, int, int]:
    """Text, and tokens of prompt and answer, as a user would write it."""
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


def test_requests_are_recognised_and_bodies_are_applied(
    chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    requests = [
        request("a", "word1 word2", max_tokens=3),
        request("b", "word3", max_completion_tokens=8, temperature=0),
        request("c", "word4 word5 word6", stop=["x"], user="me"),
        request("d", "word7", max_tokens=5, temperature=0.7, top_p=0.9),
    ]
    found = run(chat, tmp_path, requests, "--output_format", "openai", "--seed", "5", "--bs", "1")
    expected = [
        plain(chat, "word1 word2", max_new_tokens=3),
        plain(chat, "word3", max_new_tokens=8),
        plain(chat, "word4 word5 word6"),
        plain(chat, "word7", seed=None, max_new_tokens=5, do_sample=True, temperature=0.7, top_p=0.9),
    ]
    for name, response, (text, prompt, tokens) in zip("abcd", found, expected, strict=True):
        assert response["custom_id"] == name and response["error"] is None
        assert response["response"]["status_code"] == 200
        body = response["response"]["body"]
        assert (body["object"], body["model"]) == ("chat.completion", str(chat))
        (choice,) = body["choices"]
        usage = body["usage"]
        assert usage["prompt_tokens"] == prompt and usage["total_tokens"] == prompt + usage["completion_tokens"]
        assert choice["message"]["role"] == "assistant" and choice["finish_reason"] in ("stop", "length")
        if name != "d":
            assert (choice["message"]["content"], usage["completion_tokens"]) == (text, tokens)
    assert found[0]["response"]["body"]["choices"][0]["finish_reason"] == "length"
    samples = {
        plain(chat, "word7", batch_seed(5, n), max_new_tokens=5, do_sample=True, temperature=0.7, top_p=0.9)[0]
        for n in range(4)
    }
    assert found[3]["response"]["body"]["choices"][0]["message"]["content"] in samples
    assert "what bodies of requests have besides was not used: stop, user" in capsys.readouterr().err


def test_other_formats_keep_the_fields_of_requests(chat: Path, tmp_path: Path) -> None:
    requests = [request("a", "word1 word2"), request("b", "word3")]
    found = run(chat, tmp_path, requests)
    assert [{name: record[name] for name in requests[0]} for record in found] == requests
    assert [record["outputs"][0]["text"] for record in found] == [
        plain(chat, "word1 word2")[0],
        plain(chat, "word3")[0],
    ]


def test_a_bad_request_fails_alone(chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    requests = [
        request("a", "word1"),
        request("b", "word1", max_tokens="many"),
        request("c", "word1", max_tokens=63),
        {"custom_id": "d", "body": {"messages": []}},
    ]
    found = run(chat, tmp_path, requests, "--output_format", "openai", status=1)
    errors = [response["error"] and response["error"]["message"] for response in found]
    assert errors[0] is None and 'has a string as "max_tokens"' in errors[1]
    assert "the limit is 1" in errors[2] and "has an empty list" in errors[3]
    assert [response["response"] is None for response in found] == [False, True, True, True]
    assert 'line 2: custom_id "b": ' in capsys.readouterr().err


def test_messages_without_chat_stop_at_the_first_and_name_the_flag(
    chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    record = {"text": [{"role": "user", "content": "word1"}]}
    source.write_text((json.dumps(record) + "\n") * 3000)
    assert main([str(chat), str(source), str(output), "--causal_lm"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "line 1 has a list" in error and "--causal_lm --chat" in error
    source.write_text('{"text": "word1", "meta": {"a": 1}}\n' * 3000)
    assert main([str(chat), str(source), str(output), "--causal_lm", "--text_field", "meta"]) == 2
    assert 'has an object in its field "meta"' in capsys.readouterr().err
    assert not output.exists()


def test_an_output_of_nothing_but_failures_is_not_put_in_place(
    chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "in").write_text("word1 " * 70 + "\n\n" + "word2 " * 80 + "\n")
    assert main([str(chat), str(tmp_path / "in"), str(tmp_path / "out"), "--causal_lm"]) == 1
    assert "every input failed (2), so no OUTPUT is written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
