"""A checkpoint as it is: where it lies, what it holds, and how stock transformers reads it."""
