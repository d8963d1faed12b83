"""Field embeddings `(..., F, D)` to features. An optional leading axis holds embedding sets."""
