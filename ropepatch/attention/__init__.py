"""Causal attention by places: what no table of frequencies can say.

`bands` says which keys a query sees from which place, `kernels` computes it by stock kernels, `scored` with
the scores written down, for a block of queries at a time.
"""
