"""The fairseq commands: fastgen-generate-for-fairseq and fastgen-eval-lm-for-fairseq.

command.py           how both begin and end: importing fairseq, fastgen's own flags, errors and exit statuses
fairseq_generate.py  fastgen-generate-for-fairseq: its flags, what is wrong with them, and who generates
fairseq_eval_lm.py   fastgen-eval-lm-for-fairseq
mistakes.py          what is wrong with DATA or --path, where fairseq fails on them
pipeline.py          fairseq-generate's steps, with the text made beside the model
hypotheses.py        a batch's hypotheses as arrays for the workers
postprocess.py       arrays to the lines of fairseq-generate, in a worker process
scores.py            scoring in parts that add up to the same result
output.py            lines, logs and scores in the order in which fairseq-generate writes them
"""
