"""What is wrong with a table: spectra, dead and untrained rows, and what to try, in plain words."""

from rarebit.diagnosis.report import Diagnosis

__all__ = ["Diagnosis"]
