"""Publish a checkpoint: model card, the Hub, folding the attention factor."""
