"""A discrete-event model of replicas and of a router in front of them.

A trace (``traces``) is sessions with fixed tokens. ``simulate`` sends its requests through policies
(``policies``) to engines (``engine``), which are vLLM's scheduler and prefix cache over a cost of
steps, and sums up what came of it.
"""
