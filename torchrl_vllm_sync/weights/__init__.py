"""Weights on their way from the trainer to the engines: what is sent, and how the bytes travel."""
