"""A discrete-event model of replicas and of the routers in front of them.

A trace (``traces``) is a scenario (``scenario``): sessions with fixed tokens, and when new weights
come. ``simulate`` sends its requests through policies (``policies``) to engines (``engine``), which
run them with a prefix cache (``cache``) and at costs (``costs``), and sums up what came of it.
"""
