"""The training loop, optimizers, metrics, and models as files."""
