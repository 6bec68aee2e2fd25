"""What the process owes to the machine it runs on: its tasks, threads, clocks, signals, cores and files.

Here is what every part of the program may use and what knows nothing of texts, tokens or requests.
"""
