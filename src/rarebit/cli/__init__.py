"""The command line. Each command is a thin call of one Python function."""
