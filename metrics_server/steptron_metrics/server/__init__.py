"""The processes of a server.

A supervisor starts the others, and starts them again when they die: receivers, and the processor, which makes of the
journal what is stored, judged and shown.
"""
