"""Steptron: pre-training and post-training of sparse mixture-of-experts language models.

Importing the package starts no process, touches no GPU and loads neither torch nor Megatron-Core:
each sub-package imports what it needs when it is imported itself.
"""

__version__ = "0.1.0"
