"""What the commands of both hosts share; knows no host library.

ordered_pool.py  worker processes whose results are handed on in the order of their tasks
worker.py        what runs inside one of those processes
interrupt.py     Ctrl-C ends a command in time, whatever it is doing
"""
