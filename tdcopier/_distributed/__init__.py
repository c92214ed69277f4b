"""The parts of `tdcopier.distributed`.

`collectives.py` has the calls that all ranks of a group make. Channels are parcels from process to
process, over groups of two: `pair.py` has the messages of one pair, `rendezvous.py` brings pairs
together by a store, `sender.py` and `receiver.py` are the two ends, and `ends.py` has what both
need.
"""
