"""Tables that are stored small, and looked up without unpacking."""
