"""The codes of reasons and their meanings for users (the tables of docs/reasons.md), and `counted` for messages.

A reason says why fastgen did not do a part of a call. A new code is described here, and nowhere else:
`python tools/generated_pages.py` writes the page. The conditions, and the texts with details of a call, are in the
functions registered by `check` (optimizer/decoding/report.py), most of them of each host's `CallChecks` (checks.py).

Tests: tests/optimizer/test_report.py, tests/test_docs.py
"""

from __future__ import annotations

# By the sections of the page. The codes of the first section are decisions (`Reason.is_decision`): fastgen could have
# done the part, and chose not to.
CHOSEN = "Chosen: there is nothing to gain, or a switch forbids it"

CODES: dict[str, dict[str, str]] = {
    CHOSEN: {
        "CAPTURE_OFF": "decode steps are not captured under `FASTGEN_CUDA_GRAPHS=off`",
        "DISABLED": (
            "fastgen is disabled: `fastgen.log_likelihoods` and `fastgen.token_log_probs` compute every row in full"
        ),
        "DRAFTS_OFF": "no drafts are checked under `FASTGEN_DRAFTS=off`",
        "ENDED_EARLY": "the call ended before a capture would have been worthwhile",
        "FEW_FRAMES": "a vocoder's input is short: oneDNN would save no time",
        "FEW_KEYS": (
            "a layer holds few keys: storing them for each row costs less than the second matrix product that shared "
            "keys need"
        ),
        "FEW_STEPS": "the call has fewer than 24 decode steps, on a GPU fewer than 4; for drafts fewer than 8",
        "MANY_ROWS": (
            "the call has more than eight rows, under `FASTGEN_REPEATABLE=1` more than one: the first row whose draft "
            "fails would end the draft of all rows"
        ),
        "NOT_WORTH_CAPTURING": "replays would save less than the capture costs, or too few steps are left",
        "NOTHING_REPEATED": (
            "no draft was worth a forward pass: the text repeated too little of its input and of itself"
        ),
        "ONE_ROW_PER_INPUT": "the call has neither beams nor several samples, and the caller repeats no row",
        "PREFIX_SHORT": (
            "the common prefix of prompts, or the kept part of a prompt, is too short to be worth a forward pass of "
            "its own"
        ),
        "SHARE_NEVER": "nothing is shared under `FASTGEN_SHARE=never`",
        "TOO_SMALL": (
            "a prefill once per input saves less than it costs (the detail shows both, in milliseconds), or the call "
            "is so short and the model so small that no optimization can save as much as fastgen costs; there are no "
            "drafts for a model whose steps take at least four times as long in Python as in kernels"
        ),
    },
    "The call": {
        "NO_CALL": (
            "no `generate` call in this thread has gone through fastgen (or no scoring call, if `explain` was called "
            "for scoring); calls inside `fastgen.disabled()` are not reported"
        ),
        "NO_PATCH": (
            "no patch is active, or some patches of a library are inactive, because of its version, a switch or an "
            "error; `fastgen.status()` lists all patches. After a call: later calls do not use fastgen"
        ),
        "ASSISTANT": "the model is the assistant of an assisted generation",
        "CHUNKED_PREFILL": "`prefill_chunk_size` is set, and the cache is a `StaticCache`",
        "CONSTRAINTS": "constraints that fairseq's search does not support",
        "CUSTOM_GENERATE": "`custom_generate` may read the cache, so the cache keeps the library's layers",
        "HARNESS": (
            "lm-evaluation-harness computes the answer without fastgen: rolling log-likelihoods, autocast, a model "
            "with an encoder, texts that are empty or too long"
        ),
        "LOW_MEMORY": "beam search with `low_memory`",
        "MIN_LEN": "fairseq's `min_len` is above the longest output",
        "NO_PREFILL": "the decoding method does not call `_prefill`",
        "NOT_CAUSAL": "keys and values of a token depend on later tokens: no common prefix is used",
        "NO_SOURCE": "fairseq's `net_input` has no source",
        "OUTPUTS": (
            "the call returns attentions or hidden states: the library's loop collects them, and no common prefix is "
            "used, because it would leave out columns"
        ),
        "PREFIX_ENDS": "a prefix in fairseq contains the token that ends a sentence",
        "NAN": (
            "logits are NaN after a common prefix: the library computes the prompt again, because torch's attention "
            "without a mask, over few keys, treats keys with NaN as if they were masked. The code is also used if "
            "scores became NaN after inputs had left the batch: the library's loop repeats the search, because NaN "
            "counts as the best score, for these inputs as well"
        ),
        "PREFIX_OUTDATED": (
            "inside `fastgen.reusing_prefix`, the model has changed since its prefix was kept: the prefix is computed "
            "again"
        ),
        "RETURN_DICT": (
            "`return_dict_in_generate` is set, or the caller passed a cache: finished inputs are kept in the batch, "
            "because outputs and the cache of all rows are returned. Padded prompts get no common prefix, because it "
            "would change the columns of the cache"
        ),
        "SAMPLED_BEAMS": (
            "beams are sampled: finished inputs are kept in the batch, because random numbers are drawn for all beams "
            "together"
        ),
        "STARTS_WITH_PADDING": "the first token is padding",
        "STOPPING_CRITERION": (
            "the call has a stopping criterion other than length and end tokens: finished inputs are kept in the batch"
        ),
        "STREAMER": "a streamer gets a token of each row in each step: finished rows are kept in the batch",
        "SYNCED_GPUS": "`synced_gpus` is set",
        "TRAINER": (
            "a TRL trainer does the computation itself, without fastgen: images, the auxiliary loss of experts, logits "
            "for `compute_metrics`, a batch that is split among devices"
        ),
        "TORCH_MODE": "a `TorchFunctionMode`, `TorchDispatchMode` or functorch transform is active",
        "AUTOCAST": (
            "autocast is on, or is entered inside the forward pass, as in models that accelerate has prepared with "
            "mixed precision"
        ),
        "GRADIENTS": "autograd records the call: gradients are enabled",
    },
    "Rows and arguments": {
        "ARGUMENT_COLUMNS": "the columns of an argument cannot be assigned to a common prefix or to drafted tokens",
        "ARGUMENT_ROWS": "an argument of the model does not have the prompt's rows",
        "ARGUMENT_TYPE": "an argument of the model has a type whose rows fastgen does not know",
        "GROUP_SIZES_DIFFER": (
            "the sizes of the groups of equal rows have no common divisor: the prefill runs once per group, and keys "
            "are stored for each row"
        ),
        "IMAGES": "an image or video cannot be assigned to an input or its tokens",
        "IMAGES_DIFFER": "equal rows of the prompt have different images or videos",
        "PADDING_INSIDE": "a mask hides tokens between visible ones, or all tokens of a row",
        "ROWS_DIFFER": "the rows of an input are not equal",
        "ROWS_NOT_MULTIPLE": "the number of rows is not a multiple of beams, samples or inputs",
        "SHAPES": "an operation does not support these shapes or dtypes",
    },
    "The KV cache": {
        "CACHE_LAYERS": "a cache with layers of classes that are not supported",
        "CACHE_OFFLOADED": "a cache that is offloaded to the CPU",
        "CACHE_NOT_EMPTY": (
            "the cache held keys before the prefill, and it is a `StaticCache`, or has layers of another class or a "
            "different number of rows; or the model takes only one token at a time once its cache holds keys"
        ),
        "CACHE_TYPE": "a cache of a class that is not supported",
        "LAYERS_DIFFER": "the layers of the cache differ in kind, shape, dtype or device: no static cache is used",
        "LAYER_EMPTY": "a layer of the cache is empty: no static cache is used",
        "LAYER_TYPE": "layers of this class cannot be shared, and are stored for each row",
        "MATERIALIZED": "the model materializes its keys: no static cache is used",
        "MODEL_CACHE": "the model makes its own cache",
        "NO_CACHE": "the model returns no cache, or the call uses none",
        "REORDERS_ITSELF": "the model reorders its cache with its own method, `_reorder_cache`",
        "SLIDING_WINDOW": "a sliding window is shorter than the call: no static cache is used",
        "STATIC_CACHE": "a `StaticCache` stores keys and values for each row",
        "USER_CACHE": (
            "the caller passed a cache: finished inputs are kept in the batch, and `reusing_prefix` keeps nothing. The "
            "library's own prefill fills a `StaticCache`. If user code runs in each step, no step is captured "
            "and there are no drafts, because that code could read the cache"
        ),
    },
    "The model and user code": {
        "COMPILED": "the model or a part of it is compiled, or `compile_config` is set",
        "DECODER": "fairseq's decoder, or its layers, are of classes that are not supported",
        "DIFFERS": (
            "at first use, results of the model class differed from those without fastgen: the class is left alone"
        ),
        "ENCODER_ROWS": "the decoder of a fairseq model gets the encoder's output for each row",
        "ENSEMBLE": "fairseq decodes with an ensemble of several models",
        "ENSEMBLE_TYPE": "fairseq's models are in an ensemble of a class other than `EnsembleModel`",
        "HOOKS": "the model has forward hooks, which would see fewer rows, and which a replay does not call",
        "FUNCTION_REPLACED": (
            "a torch function that chooses tokens or moves rows (`torch.multinomial`, `torch.argmax`) has been "
            "replaced: the library's loop runs"
        ),
        "METHOD_REPLACED": (
            "a method that the loop calls, or the `__call__` of a processor or of a processor list, is not the "
            "library's"
        ),
        "MODEL_CHANGED": "user code that runs in each step has changed the model during the call",
        "MODEL_STATE": "the model keeps states of its rows in its modules",
        "PREPARES_INPUTS": (
            "the model prepares the inputs of a step with its own method, which may have a state: there are no drafts"
        ),
        "PROCESSOR_BY_ROW": (
            "a logits processor may know the rows by their batch index, or holds a value for each row: finished inputs "
            "are kept in the batch"
        ),
        "ROWS_COUPLED": (
            "the rows of a batch influence each other: the model's experts have a capacity, or "
            "its products are quantized dynamically by torch, with one scale for all rows"
        ),
        "TOKENS_COUPLED": (
            "the tokens of a forward pass influence each other: experts take fewer tokens than a draft has"
        ),
        "TRAINING": "a module is in training mode and uses dropout or other randomness, or might use it",
        "TRANSFORMERS_VERSION": "this version of transformers prepares its steps in a different way",
        "USER_CODE": (
            "code that is not the library's runs in the forward pass or in each step: it may treat rows differently, "
            "and a replay does not call it"
        ),
        "FIRST_USE": (
            "code that no test covers: the library does this call, and fastgen's results are compared with the "
            "library's"
        ),
        "VIRTUAL_TOKENS": (
            "the model puts tokens of its own before the prompt, as PEFT's prompt tuning does: no common prefix is used"
        ),
        "WEIGHTS_UNREADABLE": (
            "inside `fastgen.reusing_prefix`, the bits of some weights cannot be read: nothing is kept"
        ),
        "UNVERIFIED": "the code must be compared at its first use, but this call cannot be compared",
    },
    "Decode steps, operations and vocoders": {
        "ATTENTION": (
            "the attention is not supported: in transformers, only sdpa and eager are, and scoring with gradients is "
            "supported only on a CPU"
        ),
        "CUDA_STREAM": "user code computes on a stream other than the default",
        "CAPTURE_REFUSED": (
            "an earlier capture of this model, or of this call under `FASTGEN_REPEATABLE=1`, failed, could not be "
            "prepared (the text shows the error) or gave different logits: steps stay eager"
        ),
        "DEVICE": "the device is neither a CPU nor an NVIDIA GPU",
        "DRAFTS_REFUSED": (
            "the first forward pass over several tokens failed, or its logits differed from those of single steps: "
            "there are no drafts in calls of this kind; or a later one failed: there are no more drafts in this call"
        ),
        "DTYPE": "the dtype or device is not supported: oneDNN's convolutions take only float32, on a CPU",
        "ERROR": "an error in fastgen, after which the library did the work",
        "GRAPHS_IN_USE": "another call uses the captured steps of the model",
        "KV_CACHE_TOO_LARGE": "keys and values are larger than what captured graphs may hold",
        "LAYERS": "a vocoder without supported layers, or whose layers all run user code",
        "MAY_SYNC": "the forward pass may synchronize with the device: transformers does not mark it as compilable",
        "MIXED": "weights and inputs have several dtypes or devices",
        "NGRAMS_READ": "the dictionaries of the encoder's n-grams were read, and may have been changed",
        "NGRAM_SIZE": "the size of n-grams is not a positive integer",
        "NO_ONEDNN": "this build of torch has no oneDNN",
        "OUT_OF_MEMORY": "there is not enough memory for static buffers",
        "POSITIONS": (
            "a table of positions is too short, or of a kind that is not supported; or a token's column matters to the "
            "model, not only its position and the mask: padded prompts get no common prefix"
        ),
        "PROCESSOR_CHANGED": "an n-gram processor was changed after it was made",
        "PROCESSOR_MADE_ELSEWHERE": "an n-gram processor was made while fastgen was off",
        "QUANTIZED": "a quantized model",
        "SCORES_ON_OTHER_DEVICE": "scores and tokens are on different devices",
        "SEVERAL_DEVICES": "the model is on several devices",
        "SHARDED": "parts of the model are sharded, and gathered in each step",
        "SWITCHED_OFF": (
            "a group of patches has failed, or its results differed: the text says how. `fastgen.enable()` switches "
            "it on again"
        ),
        "TRIE_OUTSIDE_VOCABULARY": "a `PrefixTrie` has tokens that are not in the model's vocabulary",
    },
}


def counted(count: int, noun: str) -> str:
    """Returns a number with its noun: 0 lines, 1 line, 2 lines."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
