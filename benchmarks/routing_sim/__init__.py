"""A discrete-event model of replicas and of the routers in front of them.

A trace (``traces``, ``mooncake``) is a scenario (``scenario``): sessions with fixed tokens
(``workload``), and what befalls the cluster meanwhile. ``simulate`` sends its requests through
policies (``interface``, ``policies``) to engines (``model``, ``decoding``), which run the jobs
(``job``) with a prefix cache (``cache``) and at costs (``costs``, fitted by ``calibration``). What
came of it is summed up by ``results``, where each number is explained, beside what no routing could
beat (``bound``). ``decisions`` times the policies themselves.
"""
