"""Controls, neighbours and theory: what we measure and do not recommend."""
