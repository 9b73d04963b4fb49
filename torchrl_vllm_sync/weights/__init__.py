"""A weight's way outside the engine: what is sent, one push at a time, and who got it."""
