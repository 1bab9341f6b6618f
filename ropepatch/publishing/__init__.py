"""A checkpoint to others: its card, the Hub, GGUF, folded attention."""
