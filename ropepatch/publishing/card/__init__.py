"""The model card of an extended checkpoint: method, results, how to load it, and citations."""
