"""nbdist beside the other ways to run a notebook cell on N ranks, measured in one run.

    make bench-peers                                  environments, measurement, table and plot
    python -m benchmarks.peers --rounds 1 --tools nbdist,ipyparallel --rows warm

kernel.py        one real kernel, driven from outside: a cell, its seconds, a limit, Stop, what is left afterwards
environments.py  a virtual environment for each tool, over one torch
server.py        the same behind a Jupyter server
tools.py         how each tool is told to run a cell on two ranks, as its documentation says
rows.py          what is measured
run.py           who runs when: in turns, so that a machine that slows down hits all alike
report.py        medians, spreads, the table, the plot
"""
