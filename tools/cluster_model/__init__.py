"""A discrete-event model of a cluster of replicas: what routing costs and saves on more machines than are at hand.

`traces` makes requests, `replica` is an engine with a batch and a KV cache, `routing` chooses a replica (the
prefix-aware router is the server's own code), `run` puts them together. `tools/simulate_cluster.py` is the command.
"""
