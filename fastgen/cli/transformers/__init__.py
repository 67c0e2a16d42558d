"""fastgen-generate-for-transformers, in the order in which a run uses it.

generate.py          the command: main(argv) -> exit status
arguments.py         its flags; argument_types.py: what they accept; flag_checks.py: what contradicts
files.py             INPUT, OUTPUT and references, checked; lines.py: reading them in small parts
run.py               one run, from the model to the scores
loading.py           device, model and tokenizer
padding.py           whether lines may be sorted, measured
settings.py          flags to arguments of generate; generation_config.py, languages.py: those by other names
limits.py            what a model cannot take
signature.py         what a run depends on, for --resume
plan.py              what the flags mean for the stages
pipeline.py          the stages put together; items.py: what they hand to each other
ahead.py             read, tokenise, batch: preprocess.py, audio.py, records.py, batches.py
transfer.py          copies to and from a GPU
model.py             generate, within the memory; beam_scores.py; compare.py: --compare
behind.py            detokenise, write: postprocess.py
run_state.py         what --resume goes on with, such as the random numbers
library_messages.py  what transformers logs, once
progress.py          bar, rates, time left
metrics.py           ROUGE, BLEU, chrF, exact match
"""
