"""Frames as they came: files that receivers append to and everything else reads.

A folder for each run holds *segments*. A receiver process appends to segments of its own only, one for each run, and
begins another after some 64 MiB, after an error, and when it starts; it holds a lock on those that it appends to. A
segment is a sequence of *batches* (``format``), each of which went to the disk as one before any frame of it was
acknowledged, and it is self-contained: the descriptions of its frames are in it.
"""
