"""Documents, texts and tokens, and the generated ones of the bundled checkpoint."""
