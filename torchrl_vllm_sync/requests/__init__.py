"""A prompt's way outside the engine: checked once, one call a replica, and back."""
