"""A checkpoint to others: its card, the Hub, folded attention."""
