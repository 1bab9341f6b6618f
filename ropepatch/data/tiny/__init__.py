"""The bundled checkpoint: a LLaMA with 2 M parameters, trained on 256 tokens."""
