"""A room of the house."""
