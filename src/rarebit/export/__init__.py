"""Models as files that need no Rarebit: ONNX, torch.export, Triton, plain tables."""
