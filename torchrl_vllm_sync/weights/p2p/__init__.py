"""Weights that the trainer writes into spare memory of the engines."""
