"""The whole fleet on virtual time: one process, one seed, the same run again byte for byte.

``loop.py`` is the event loop and its clock, ``net.py`` TCP, ``zmq_net.py`` ZMQ, ``redis_server.py`` Redis,
all in memory. ``seams.py`` puts them in the place of what the machine gives, and runs a coroutine on them.
"""
