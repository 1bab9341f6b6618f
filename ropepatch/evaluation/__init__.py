"""Measuring a model: any model, patched or not.

Loss: `perplexity`. Retrieval: `retrieval`. Intervals and ranking: `intervals`,
`results`, `comparisons`, `ranking`. Running: `suites`, `tasks`, `harness`, `measuring`.
"""
