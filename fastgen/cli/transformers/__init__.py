"""fastgen-generate-for-transformers, in the order in which a run uses it.

command.py   the command: main(argv) -> exit status
flags/       what may be asked for, and what contradicts
run.py       one run, from the model to the scores; plan.py: what its flags mean for the stages
model/       device, model and tokenizer; arguments of generate; what the model cannot take
files/       INPUT, OUTPUT and references; lines and records; files that are written whole or not at all
stages/      read → tokenize → batch → generate → detokenize → write, beside each other
resume/      OUTPUT.part, and what --resume has to know to go on with it
stop.py      Ctrl-C and SIGTERM let a batch in flight finish
compare.py   --compare; metrics.py: ROUGE, BLEU, chrF, exact match
"""
