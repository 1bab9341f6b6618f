"""From a scaling to a patched model and a checkpoint that stock transformers loads."""
