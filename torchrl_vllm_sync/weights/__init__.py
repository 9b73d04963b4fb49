"""The path of weights outside the engine: sources, pushes, transports, and what replicas hold."""
