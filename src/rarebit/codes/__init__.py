"""Tables that are stored small and looked up as they are."""
