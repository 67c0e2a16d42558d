"""The model of a run.

loading.py           device, model and tokenizer
settings.py          flags to arguments of generate; speaking.py: models whose outputs are sounds
limits.py            what the model cannot take; padding.py: whether lines may be sorted, measured
default_batch.py     how large batches are where no flag says so
library_messages.py  what transformers logs, once
"""
