"""Checkpoints: finding, parsing, checking and loading them with stock transformers."""
