"""Which values are containers, which are leaves, and how each is taken apart and rebuilt.

`registry.py` (`_find_rule`) has the order in which a class is looked up.
"""
