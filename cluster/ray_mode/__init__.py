"""How does a cluster run on Ray? Places, starts, watches and replaces the processes.

    kvrelay up ─► RayCluster ─► Controller (actor) ─► directory, nodes, gateways (actors)

Ray starts processes and notices their ends; nothing on the way of a request goes through it. A call
of an actor costs 3 ms of CPU and an item of a stream 2.5 (measured with Ray 2.60), so gateways
speak with nodes over connections of their own (`cluster.node_service`), and KV goes from node to
node as everywhere.

This package imports Ray where it is used: the command line has to work without it.
"""
