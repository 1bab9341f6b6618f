"""Training of a patched model to its longer context: some hundred steps of a recipe."""
