"""Deltas in C++: the zstd frames, XOR and Adler-32 of arc2.py in one pass. Compiled once per machine; arc2.py does without."""
