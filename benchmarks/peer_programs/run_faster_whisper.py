"""faster-whisper: recordings longer than 30 s, by CTranslate2.

It gets features, and a tokenizer of the names that ctranslate2_model.py gives to tokens. Recordings follow each other:
its way of cutting them at timestamps takes one at a time. All that would try a window again, or skip it, is off.
"""

from __future__ import annotations

from answer import Call, Task, Tokens, answer
from ctranslate2_model import Names, convert
from faster_whisper import WhisperModel
from faster_whisper.tokenizer import Tokenizer
from faster_whisper.transcribe import TranscriptionOptions
from tokenizers import Tokenizer as Words
from tokenizers.models import WordLevel

OFF = {
    **dict.fromkeys(("log_prob_threshold", "no_speech_threshold", "compression_ratio_threshold")),
    **dict.fromkeys(("initial_prompt", "prefix", "hallucination_silence_threshold", "hotwords")),
}
DEFAULTS = {"best_of": 1, "patience": 1, "length_penalty": 1, "repetition_penalty": 1, "no_repeat_ngram_size": 0}


def load(task: Task) -> Call:
    names = Names(task)
    converted = convert(task, names)
    words = Words(WordLevel(names.get_vocab(), unk_token=names.unk_token))
    words.save(f"{converted}/tokenizer.json")
    settings = {"device": "cpu", "compute_type": task.dtype, "cpu_threads": task.threads, "num_workers": 1}
    whisper = WhisperModel(converted, local_files_only=True, **settings)
    tokenizer = Tokenizer(words, multilingual=False)
    options = TranscriptionOptions(
        **OFF,
        **DEFAULTS,
        beam_size=task.arguments["num_beams"],
        max_new_tokens=task.arguments["max_new_tokens"],
        temperatures=[0.0],
        condition_on_previous_text=False,
        prompt_reset_on_temperature=0.5,
        suppress_blank=False,
        suppress_tokens=[],
        without_timestamps=False,
        max_initial_timestamp=1.0,
        word_timestamps=False,
        prepend_punctuations="",
        append_punctuations="",
        multilingual=False,
        clip_timestamps="0",
    )
    recordings = task.inputs["input_features"].numpy()

    def call() -> Tokens:
        transcripts = [whisper.generate_segments(features, tokenizer, options, False) for features in recordings]
        return [[token for segment in segments for token in segment.tokens] for segments in transcripts]

    return call


if __name__ == "__main__":
    answer(load, "faster-whisper", "ctranslate2")
