"""The parts of `tdcopier.distributed`.

`collectives.py` has the calls that all ranks of a group make, `ranks.py` what they share. Channels
carry parcels from process to process: `rendezvous.py` brings two together by a store, at the
`address.py` of each, `link.py` is the connection of the two, `sender.py` and `receiver.py` are its
ends, `ends.py` has what both need, and `hub.py` an end with many links. `publisher.py` and
`follower.py` send weights over links.
"""
