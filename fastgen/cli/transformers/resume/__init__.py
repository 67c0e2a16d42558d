"""OUTPUT.part and going on with it.

part_file.py    whole records while a run goes on; locked_file.py: only one run at a time writes them
signature.py    what decides which records a run writes; differences.py: what is another, in words
run_state.py    what a run that goes on has to know besides the records, such as the random numbers
"""
