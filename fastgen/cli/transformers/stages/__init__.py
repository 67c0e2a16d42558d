"""The stages of a run, which work beside each other.

pipeline.py         the stages put together; items.py: what they hand to each other; progress.py: how far they are
prefetcher.py       read, tokenize, batch: preprocess.py, audio.py, batches.py
transfer.py         copies to and from a GPU
generation.py       generate, within the memory
writer.py           detokenize, write: postprocess.py
ordered_threads.py  worker threads; choice.py: threads or processes, measured
"""
