"""Frames on disk until the server takes them: segments in a folder that one process at a time has."""
