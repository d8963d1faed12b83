"""Files and folders that survive a crash: atomic writes, checksums, locks, nested states. Never pickle."""
