"""Fuzzing of the host side: what a captured guest, its files and its archives can do to the process that serves them.

One input is a pair of byte strings (`tape.Case`): what the host does, and what the guest does wrong. Time is virtual and threads are
run in place (`clock`), so a case is the same every time and a wait of a minute costs nothing; a wait without end is seen at once.
`tests/security/test_fuzz_*.py` run a fixed set and a fresh seed in a minute, `python -m bench.fuzz` runs for hours.
"""
