"""One technique per file. The file name is the name in settings files, and with dashes on the command line."""
