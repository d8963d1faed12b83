"""What is wrong with a table: spectra, dead and untrained rows, and what to try, in plain words."""
