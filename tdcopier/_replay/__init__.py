"""Replay buffers that other processes use: the server, its clients, and what passes between them.

`tdcopier.replay` has the public names.
"""
