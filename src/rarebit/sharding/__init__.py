"""Tables spread over processes: the plan, the lookups on TorchRec, and the pieces on disk."""
