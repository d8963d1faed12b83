"""One atomic, checksummed way to write folders: models, checkpoints, runs, studies and prepared data."""
