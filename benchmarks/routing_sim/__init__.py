"""A discrete-event model of replicas and of the routers in front of them.

A trace (``traces``, ``mooncake``) is a scenario (``scenario``): sessions with fixed tokens
(``workload``), and what befalls the cluster meanwhile. ``simulate`` sends its requests through
policies (``interface``, ``policies``) to engines (``model``) with a prefix cache (``cache``) and
costs (``costs``, fitted by ``calibration``), and sums up what came of it (``results``), beside what
no routing could beat (``bound``). ``decisions`` times the policies themselves.
"""
