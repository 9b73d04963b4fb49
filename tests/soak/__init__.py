"""A service that loses, gains and updates replicas for a long time, and what it holds at the end."""
