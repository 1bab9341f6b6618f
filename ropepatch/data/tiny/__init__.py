"""The bundled checkpoint: a LLaMA of 2 M parameters that reads, and retrieves, within 256 tokens."""
