"""Field embeddings `(..., F, D)` to features. With `num_sets`, they are `(M, B, F, D)`, and every set has its own weights."""
