"""fastgen-generate-for-transformers, in the order in which a run uses it.

command.py    main(argv) -> exit status, and one run; args.py: every flag; flag_values.py: their values
files.py      reading INPUT, writing files whole; records.py: what a line holds, how a record is written
signature.py  what decides which records a run writes; journal.py: OUTPUT.part, going on with it, and OUTPUT
tasks.py      what differs between text, chat, speech in and speech out: no branch on that elsewhere
model.py      device, model, tokenizer and their limits; settings.py: arguments of generate, languages
text.py       tokens and back to text; audio.py: sounds and back to WAV files
batching.py   which lines share a batch
pipeline.py   read → tokenise → batch → generate → detokenise → write, beside each other
progress.py   what is said meanwhile; metrics.py: references, ROUGE, BLEU, chrF, exact match, word error rate
"""
