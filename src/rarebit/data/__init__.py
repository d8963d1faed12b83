"""Raw files to encoded arrays to batches."""
