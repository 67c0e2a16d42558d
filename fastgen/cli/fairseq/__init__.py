"""The fairseq commands.

command.py    starts and ends them
args.py       parses flags
pipeline.py   generates
printer.py    turns hypotheses into lines
"""
