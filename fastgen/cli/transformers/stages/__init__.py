"""The stages of a run, which work beside each other in threads.

pipeline.py     the stages put together; items.py: what they hand to each other; progress.py: how far they are
prefetcher.py   read, tokenize, batch: preprocess.py, audio.py, batches.py
generation.py   generate, within the memory
writer.py       detokenize, write: postprocess.py
"""
