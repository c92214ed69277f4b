"""Which values are containers, which are leaves, and how each is taken apart and rebuilt."""
