"""The fairseq commands: fastgen-generate-for-fairseq and fastgen-eval-lm-for-fairseq.

command.py      how both begin and end: importing fairseq, fastgen's own flags, errors and exit statuses
args.py         their flags, what contradicts, and who does what they ask for
mistakes.py     what is wrong with DATA or --path, where fairseq fails on them
pipeline.py     fairseq-generate's steps, with the text made beside the model; lines, logs and scores in its order
hypotheses.py   a batch's hypotheses as arrays for the workers
workers.py      worker processes whose results are handed on in order
postprocess.py  arrays to the lines of fairseq-generate and to scores, in a worker process
"""
