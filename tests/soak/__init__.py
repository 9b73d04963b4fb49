"""A service that loses, gains and updates replicas for long, and what it holds at the end."""
