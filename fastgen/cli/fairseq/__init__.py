"""The fairseq commands: fastgen-generate-for-fairseq and fastgen-eval-lm-for-fairseq.

command.py      how both begin and end: importing fairseq, fastgen's own flags, errors and exit statuses
args.py         their flags, what contradicts, what is wrong with DATA or --path, and who does what they ask for
pipeline.py     fairseq-generate's loop, with the text made beside the model; lines, logs and scores in its order
postprocess.py  tensors to plain numbers, and these to the lines of fairseq-generate in a worker process
workers.py      worker processes whose results are written in order
"""
