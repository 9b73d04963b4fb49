"""A discrete-event model of replicas and of the routers in front of them; see ``interface``."""
