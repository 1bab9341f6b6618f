"""The explorer: one HTML page that shows why RoPE fails past the trained length."""
