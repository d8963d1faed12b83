"""One self-contained page from stored results: plain HTML and hand-made SVG, offline, readable without a script."""
