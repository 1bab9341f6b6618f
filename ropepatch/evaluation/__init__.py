"""Measuring a model: any model, patched or not."""
