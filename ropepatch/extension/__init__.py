"""Planning an extension, patching a model, and writing checkpoints that stock transformers loads."""
