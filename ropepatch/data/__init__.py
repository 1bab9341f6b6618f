"""Documents, texts and tokens, and the synthetic data of the bundled checkpoint."""
