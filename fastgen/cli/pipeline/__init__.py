"""Stages of the commands that run beside the model; know no host library.

ordered_pool.py      worker processes whose results are handed on in the order of their tasks
worker.py            what runs inside one of those processes
ordered_threads.py   the same with threads
choice.py            which of the two a stage needs, measured
interrupt.py         Ctrl-C ends a command in time, whatever it is doing
part_file.py         OUTPUT.part, which holds whole records and can be gone on with
standard_output.py   the standard output in its place
locked_file.py       files that one run at a time writes to
whole_file.py        files that are written whole or not at all
differences.py       what is different between two runs, in words
"""
