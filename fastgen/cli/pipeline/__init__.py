"""What the commands of both hosts share; knows no host library.

results_in_order.py  one thread hands on what workers make, in order
ordered_pool.py      worker processes for that; worker.py: what runs inside of one
interrupt.py         Ctrl-C ends a command in time, whatever it is doing
"""
