"""The parts of one replica: its actor, requests, weight updates and workers."""
