"""Fast programs: how a client's work is compiled. Algorithms and models need not know about it."""
